"""Inductor's and AOTAutograd's caches between plain and PyGraph compilations of one model, across processes."""

from __future__ import annotations

import json
import linecache
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.utils import counters

import pygraph
from pygraph import version
from pygraph.cache import cache_dir
from pygraph.inductor import compile as inductor
from pygraph.inductor.decision import Decision, Placed
from pygraph.ir import Graph, Stage
from pygraph.passes.base import Pass, PassContext, PassResult
from tests import failing

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
backend = sys.argv[1]
options = json.loads(sys.argv[2]) or None
step = torch.compile(model, backend=backend, options=options)
results = []
for seed in range(4):
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(8, 16)
    loss = step(x).square().sum()
    loss.backward()
    got = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    want = model(x).square().sum()
    want.backward()
    want = [want.detach(), *(p.grad for p in model.parameters())]
    results.append(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want)))
import pygraph
heavy = ("pygraph.inductor.compile", "pygraph.frontend.fx", "pygraph.ir", "pygraph.passes")
imported = [name for name in heavy if name in sys.modules]
from pygraph.report.facts import to_json
graphs = to_json(pygraph.reports())["graphs"]
for graph in graphs:
    del graph["times_ms"]
    for one in graph["passes"]:
        del one["ms"]
print(json.dumps({
    "imported": imported,
    "graphs": graphs,
    "correct": all(results),
    "replays": pygraph.counters().get("replays", 0),
    "regions": [len(r.regions) for r in pygraph.reports()],
    "errors": [r.error for r in pygraph.reports()],
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
    "fx_misses": counters["inductor"]["fxgraph_cache_miss"],
    "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


def run(cache: Path, backend: str, **options: Any) -> dict[str, Any]:
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, backend, json.dumps(options)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["correct"]
    return result


def assert_plain(result: dict[str, Any]) -> None:
    assert result["replays"] == 0
    assert result["regions"] == []


def assert_ours(result: dict[str, Any]) -> None:
    assert result["regions"] == [1, 1]
    assert result["errors"] == [None, None]
    assert result["replays"] == 4


def test_plain_after_pygraph_and_pygraph_from_the_cache(tmp_path: Path) -> None:
    first = run(tmp_path, "pygraph")
    assert_ours(first)
    assert first["fx_misses"] == 2
    plain = run(tmp_path, "inductor")
    assert_plain(plain)
    assert plain["fx_hits"] == 0
    again = run(tmp_path, "pygraph")
    assert_ours(again)
    assert (again["aot_hits"], again["fx_hits"], again["fx_misses"]) == (1, 2, 0)
    assert again["graphs"] == first["graphs"]
    assert again["imported"] == []


def test_pygraph_after_plain_and_plain_from_the_cache(tmp_path: Path) -> None:
    assert_plain(run(tmp_path, "inductor"))
    ours = run(tmp_path, "pygraph")
    assert_ours(ours)
    assert ours["aot_hits"] == 0
    again = run(tmp_path, "inductor")
    assert_plain(again)
    assert again["aot_hits"] == 1
    restored = run(tmp_path, "pygraph")
    assert_ours(restored)
    assert restored["aot_hits"] == 1


BASE = Decision("cpu", {"mm": Placed("aten.mm.default", 0, None, True)}, (0,), frozenset({0}), "legality")


@pytest.mark.parametrize(
    "other",
    [
        Decision("cuda", BASE.nodes, BASE.regions, BASE.selected, BASE.pipeline),
        Decision("cpu", BASE.nodes, BASE.regions, BASE.selected, "legality,placement"),
        Decision("cpu", {"mm": Placed("aten.mm.default", 1, None, True)}, (1,), BASE.selected, BASE.pipeline),
        Decision("cpu", {"mm": Placed("aten.bmm.default", 0, None, True)}, (0,), BASE.selected, BASE.pipeline),
        Decision("cpu", {"mm": Placed("aten.mm.default", None, "x", False)}, (), BASE.selected, BASE.pipeline),
        Decision("cpu", {"mm_1": BASE.nodes["mm"]}, (0,), BASE.selected, BASE.pipeline),
    ],
)
def test_each_part_of_a_decision_changes_its_digest(other: Decision) -> None:
    assert other.digest() != BASE.digest()


# -- programs that AOTAutograd's cache restores ------------------------------------------------------------------------

SOURCE = """
import torch
{above}
def step(x, y):
    return torch.relu(x @ y) * 2.0
"""


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> Iterator[Path]:
    """Empty caches that keep programs; the folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._functorch.config.patch(enable_autograd_cache=True):
        yield tmp_path


def restored(
    fn: Callable[..., Any], *args: torch.Tensor, calls: int = 1, backend: str = "pygraph", **options: Any
) -> tuple[bool, bool]:
    """Whether AOTAutograd's cache had the program of ``fn``, and whether Inductor's had, when it is compiled anew."""
    torch._dynamo.reset()
    pygraph.reset()
    counters.clear()
    compiled = torch.compile(fn, backend=backend, options=options or None)
    given = args or (torch.ones(8, 8), torch.ones(8, 8))
    with torch.no_grad():
        for _ in range(calls):
            torch.testing.assert_close(compiled(*given), fn(*given))
    assert [report.error for report in pygraph.reports()] == ([None] if backend == "pygraph" else [])
    return bool(counters["aot_autograd"]["autograd_cache_hit"]), bool(counters["inductor"]["fxgraph_cache_hit"])


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ y) * 2.0


def test_a_restored_program_is_replayed(keeping: Path) -> None:
    assert restored(product, calls=4) == (False, False)
    assert restored(product, calls=4) == (True, True)
    assert [region.state for region in pygraph.reports()[0].regions] == ["replay"]
    assert restored(product, backend="inductor") == (False, False)
    assert restored(product, backend="inductor") == (True, True)


@pytest.mark.parametrize(
    "options",
    [{"passes": "legality,placement,partitioning{max-regions=0}"}, {"strict": True}, {"inductor": {"debug": 1}}],
)
def test_other_options_are_a_miss(keeping: Path, options: dict[str, Any]) -> None:
    restored(product)
    assert restored(product, **options)[0] is False
    assert restored(product, **options)[0] is True
    assert restored(product)[0] is True


@pytest.mark.parametrize("options", [{"passes": ["legality,placement", "idle", "partitioning"]}, {"dump_dir": "dumps"}])
def test_what_cannot_be_known_or_is_to_be_seen_is_never_restored(
    keeping: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(keeping)
    if "passes" in options:
        options = {"passes": ["legality,placement", Idle(), "partitioning"]}
    restored(product, **options)
    assert restored(product, **options) == (False, True)


def test_another_calibration_is_a_miss(keeping: Path) -> None:
    restored(product)
    folder = cache_dir()
    assert folder is not None
    (folder / "calibration").mkdir()
    (folder / "calibration" / "some.json").write_text("{}")
    assert restored(product)[0] is False


def test_other_source_lines_are_a_miss_of_the_report_alone(keeping: Path) -> None:
    locs = []
    for above in ("", "\n"):
        path = keeping / "user_step.py"
        path.write_text(SOURCE.format(above=above))
        linecache.checkcache()
        assert restored(runpy.run_path(str(path))["step"]) == (False, bool(above))
        decision = pygraph.reports()[0].decision
        assert decision is not None
        locs.append([placed.loc for placed in decision.nodes.values()])
    assert locs[0] != locs[1]


def test_lost_or_damaged_facts_are_a_miss(keeping: Path) -> None:
    restored(product)
    for damage in (Path.unlink, lambda path: path.write_bytes(b"\x80")):
        (facts,) = [path for path in (keeping / "pygraph").rglob("*") if path.is_file()]
        damage(facts)
        assert restored(product) == (False, True)
        assert restored(product) == (True, True)


def test_a_program_whose_capture_failed_is_compiled_again_and_cut(keeping: Path) -> None:
    x = (failing.inputs(), failing.weight())
    found = []
    for calls in (1, failing.CALLS, failing.CALLS, failing.CALLS):  # fails only when it is restored, in the second one
        hit, _ = restored(failing.one, *x, calls=calls)
        (report,) = pygraph.reports()
        found.append((hit, len(report.regions), [left.reason for left in report.uncaptured()]))
    assert found == [(False, 1, []), (True, 1, [])] + [(hit, 2, ["failed-capture"]) for hit in (False, True)]
    assert failing.states(report) == ["replay", "replay"]


def test_sizes_that_vary_are_restored(keeping: Path) -> None:
    for known in (False, True):
        torch._dynamo.reset()
        pygraph.reset()
        counters.clear()
        compiled = torch.compile(product, backend="pygraph", dynamic=True)
        for size in (4, 4, 4, 6, 6, 6):
            x, y = torch.randn(size, 8), torch.randn(8, size)
            torch.testing.assert_close(compiled(x, y), product(x, y))
        assert bool(counters["aot_autograd"]["autograd_cache_hit"]) is known
        assert pygraph.counters()["captures"] == 2


# -- what the key holds ------------------------------------------------------------------------------------------------


def hits() -> int:
    """How many programs came from Inductor's cache while a small function was compiled anew."""
    torch._dynamo.reset()
    counters["inductor"].clear()
    passes = ["legality,placement", Idle(), "partitioning"]
    ours = torch.compile(lambda x: x @ x, backend="pygraph", options={"passes": passes})
    with torch.no_grad():
        ours(torch.ones(8, 8))
    assert pygraph.reports()[-1].error is None
    return int(counters["inductor"]["fxgraph_cache_hit"])


@dataclass(frozen=True)
class Idle(Pass):
    """A pass of a user that does nothing."""

    name: ClassVar[str] = "idle"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage | None] = None

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> Path:
    """A copy of the package whose sources count for the key, with the small function in the cache."""
    package = tmp_path / "pygraph"
    shutil.copytree(version.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(version, "PACKAGE", package)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    version.package_digest.cache_clear()
    assert hits() == 0
    assert hits() == 1
    return package


SHAPING = [
    "calibration",
    "frontend",
    "ir",
    "inductor",
    "passes",
    "runtime",
    "version.py",
    "compat.py",
    "ir/text",
]


def test_a_changed_source_of_the_package_is_a_miss(cached: Path) -> None:
    for part in SHAPING:
        path = cached / part
        path = sorted(path.glob("*.py"))[-1] if path.is_dir() else path
        path.write_text(f"{path.read_text()}\n")
        version.package_digest.cache_clear()  # as in a new process
        assert hits() == 0, part
    assert hits() == 1


def test_what_only_reports_or_measures_is_no_part_of_the_key(cached: Path) -> None:
    for part in ("report", "bench", "cli"):
        (cached / part / "another.py").write_text("")
    version.package_digest.cache_clear()
    assert hits() == 1


def test_a_changed_module_of_a_users_pass_is_a_miss(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "users_pass.py"
    monkeypatch.setattr(sys.modules[Idle.__module__], "__file__", str(module))
    for helper in ("1", "2"):
        module.write_text(f"HELPER = {helper}")
        inductor._source.cache_clear()
        assert hits() == 0
        assert hits() == 1
    monkeypatch.undo()
    inductor._source.cache_clear()


def test_a_pass_without_a_file_is_another_one_in_each_process(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[Idle.__module__], "__file__")
    for _ in range(2):
        inductor._source.cache_clear()
        assert hits() == 0
        assert hits() == 1
    monkeypatch.undo()
    inductor._source.cache_clear()


def test_each_other_part_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [inductor.program_key(BASE, ())]
    keys.append(inductor.program_key(replace(BASE, pipeline="legality,placement"), ()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one")
    keys.append(inductor.program_key(replace(BASE, device="cuda"), ()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    keys.append(inductor.program_key(replace(BASE, device="cuda"), ()))
    monkeypatch.setattr(torch, "__version__", "3.0")
    keys.append(inductor.program_key(BASE, ()))
    monkeypatch.setattr(version, "__version__", "3.0")
    keys.append(inductor.program_key(BASE, ()))
    assert len(set(keys)) == len(keys)


def test_the_users_tag_is_part_of_every_key_and_nothing_is_added_twice(
    keeping: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = inductor.compat.compile_fx_inner

    def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.compiler.config.cache_key_tag)
        return plain(*args, **kwargs)

    monkeypatch.setattr(inductor.compat, "compile_fx_inner", compile_fx_inner)
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert restored(product) == (False, False)
        assert torch.compiler.config.cache_key_tag == "mine"
    (tag,) = seen
    assert tag.startswith("mine|pygraph ")
    assert tag.count("|") == 1
    assert restored(product) == (False, False)
