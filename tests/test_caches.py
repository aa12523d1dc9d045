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
from pygraph import cache, compat, version, warm
from pygraph.inductor.compile import program_key
from pygraph.inductor.decision import Decision, Placed
from pygraph.ir import Graph, Stage
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.pipeline import _source
from tests import failing, forked

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
step = torch.compile(model, backend="pygraph", options={"inductor": {"fallback_by_default": True}})
for seed in range(4):
    x = torch.randn(8, 16)
    found = []
    for run in (step, model):
        model.zero_grad()
        loss = run(x).square().sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*found)
import pygraph
heavy = ("pygraph.inductor.compile", "pygraph.frontend.lift", "pygraph.ir", "pygraph.passes")
imported = [name for name in heavy if name in sys.modules]
from pygraph.report.facts import to_json
graphs = to_json(pygraph.reports())["graphs"]
for graph in graphs:
    del graph["times_ms"]
    for one in graph["passes"]:
        del one["time_ms"]
print(json.dumps({
    "imported": imported,
    "graphs": graphs,
    "replays": pygraph.counters().get("replays", 0),
    "hits": [counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]],
}))

library = torch.library.Library("pygraph_declared", "DEF")
library.define(f"scale(Tensor x, float k={sys.argv[1]}) -> Tensor")
library.impl("scale", lambda x, k=float(sys.argv[1]): x * k, "CPU")
library.impl("scale", lambda x, k=0.0: torch.empty_like(x), "Meta")

def scaled(x):
    return torch.ops.pygraph_declared.scale(x * 2) + 1

x = torch.arange(4.0)
torch.testing.assert_close(torch.compile(scaled, backend="pygraph")(x), scaled(x))
"""


def run(cache: Path, default: str, *, fork: bool) -> dict[str, Any]:
    """The script's report on its model. ``default`` is that of an argument of its operator. Not of a ``fork``, the
    process has a hash seed of its own."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    if fork:
        done = forked.run(SCRIPT, default, env=environ)
    else:
        command = [sys.executable, "-c", SCRIPT, default]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def told(graph: dict[str, Any]) -> dict[str, Any]:
    """A report but for what calls have done so far."""
    return {**graph, "regions": [{**region, "record": None} for region in graph["regions"]]}


def test_a_later_process_restores_programs_and_their_reports_without_the_compiler(tmp_path: Path) -> None:
    """And compiles again what calls an operator that it declares otherwise: results are those of this process."""
    first, second = run(tmp_path, "2.0", fork=True), run(tmp_path, "3.0", fork=False)
    assert first["hits"] == [0, 0]
    assert second["hits"] == [1, 2]
    assert (first["replays"], second["replays"]) == (4, 6), "two regions, one call earlier"
    assert [told(graph) for graph in second["graphs"]] == [told(graph) for graph in first["graphs"]]
    assert "pygraph.ir" in first["imported"]
    assert second["imported"] == []


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
    """Compile ``fn`` anew, and compare its calls with eager. Return two flags, True for a hit: of AOTAutograd's cache,
    and of Inductor's."""
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
    folder = cache.cache_dir()
    assert folder is not None
    cache.store_json(folder / "calibration" / "some.json", {})
    assert restored(product)[0] is False


def test_another_source_of_the_package_is_a_miss(keeping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restored(product)
    monkeypatch.setattr(warm, "package_digest", lambda package: "another")
    assert restored(product)[0] is False


def test_other_source_lines_are_a_miss_of_the_report_alone(keeping: Path) -> None:
    locs = []
    for above in ("", "\n"):
        path = keeping / "user_step.py"
        path.write_text(SOURCE.format(above=above))
        linecache.checkcache()
        assert restored(runpy.run_path(str(path))["step"]) == (False, bool(above))
        graph = pygraph.reports()[0].graph
        assert graph is not None
        locs.append([node.loc for node in graph.nodes])
    assert locs[0] != locs[1]


def one_bit_flipped(path: Path) -> None:
    """In the index of the argument that the region may take for one that outlives the call."""
    content = path.read_bytes()
    at = content.index(b'"held": [') + len(b'"held": [')
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def of_another_program(path: Path) -> None:
    """As of two processes that compile a graph at the same time, and time its kernels otherwise."""
    content = cache.load(path)
    assert content is not None
    cache.store(path, b"0" * 64 + content[64:])


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = [Path.unlink, one_bit_flipped, of_another_program, replaced_by_a_pipe, lambda path: path.chmod(0o666)]


def test_lost_or_damaged_facts_are_a_miss(keeping: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight)

    x = torch.ones(8, 8)
    restored(weighted, x)
    for damage in DAMAGE:
        (facts,) = (keeping / "pygraph").iterdir()
        damage(facts)
        assert restored(weighted, x) == (False, True)
        assert restored(weighted, x) == (True, True)


def test_a_restored_program_calls_what_cannot_be_captured(keeping: Path) -> None:
    x = (failing.inputs(), failing.weight())
    for known in (False, True):
        failing.again()
        assert restored(failing.one, *x, calls=failing.CALLS)[0] is known
        (report,) = pygraph.reports()
        assert failing.states(report) == ["replay"]
        (region,) = report.regions
        assert region.record is not None
        assert [call.operator for call in region.record.eager] == ["quantized.pygraphfails_double.default"]


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


EMPTY = torch.fx.GraphModule({}, torch.fx.Graph())


@dataclass(frozen=True)
class Idle(Pass):
    """A pass of a user that does nothing."""

    name: ClassVar[str] = "idle"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage | None] = None

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False)


def test_each_part_of_a_decision_and_of_the_machine_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    mm = Placed("aten.mm.default", 0, None, True)
    base = Decision("cpu", {"mm": mm}, frozenset({0}), "legality")
    changes: list[dict[str, Any]] = [{}, {"pipeline": "legality,placement"}, {"nodes": {"mm_1": mm}}]
    changes += [{"nodes": {"mm": replace(mm, **change)}} for change in ({"region": 1}, {"op": "aten.bmm.default"})]
    changes += [{"nodes": {"mm": replace(mm, region=None, reason="x", capturable=False)}}]
    keys = [program_key(replace(base, **change), (), EMPTY) for change in changes]
    for name in ("one", "another"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        keys.append(program_key(replace(base, device="cuda"), (), EMPTY))
    for module in (torch, version):
        monkeypatch.setattr(module, "__version__", "3.0")
        keys.append(program_key(base, (), EMPTY))
    assert len(set(keys)) == len(keys)


def test_sources_that_may_shape_a_program_change_the_key(tmp_path: Path) -> None:
    package = tmp_path / "pygraph"
    shutil.copytree(version.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    def digest() -> str:
        version.package_digest.cache_clear()  # as in a new process
        return version.package_digest(package)

    apart = ("report", "bench", "cli", "testing")
    shaping = [path for path in package.iterdir() if path.is_dir() and path.name not in apart]
    found = [digest()]
    for path in (*(folder / "__init__.py" for folder in shaping), package / "compat.py", package / "version.py"):
        path.write_text(f"{path.read_text()}\n")
        found.append(digest())
    assert len(set(found)) == len(found) > 5
    for part in apart:
        (package / part / "another.py").write_text("")
    assert digest() == found[-1], "what only reports or measures is no part of the key"


def test_the_module_of_a_users_pass_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without a file, as of a notebook, is another one in each process."""
    module, keys = tmp_path / "users_pass.py", []
    base = Decision("cpu", {}, frozenset(), "legality,idle")
    for helper in ("HELPER = 1", "HELPER = 2", None, None):
        module.write_text(helper or "")
        monkeypatch.setattr(sys.modules[__name__], "__file__", str(module) if helper else None)
        _source.cache_clear()
        keys.append(program_key(base, (Idle(),), EMPTY))
        assert program_key(base, (Idle(),), EMPTY) == keys[-1]
    _source.cache_clear()
    assert len(set(keys)) == len(keys)


def test_the_users_tag_is_part_of_every_key_and_nothing_is_added_twice(
    keeping: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = compat.compile_fx_inner

    def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.compiler.config.cache_key_tag)
        return plain(*args, **kwargs)

    monkeypatch.setattr(compat, "compile_fx_inner", compile_fx_inner)
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert restored(product) == (False, False)
        assert torch.compiler.config.cache_key_tag == "mine"
    (tag,) = seen
    assert tag.startswith("mine|pygraph ")
    assert tag.count("|") == 1
    assert restored(product) == (False, False)
