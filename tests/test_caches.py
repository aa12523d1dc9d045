"""Inductor's and AOTAutograd's caches between plain and PyGraph compilations of one model, across processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.utils import counters

import pygraph
from pygraph.ir import Graph, Stage
from pygraph.lowering import compile as lowering
from pygraph.lowering.decision import Decision, Placed
from pygraph.passes.base import Pass, PassContext, PassResult

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
print(json.dumps({
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
    assert (again["fx_hits"], again["fx_misses"]) == (2, 0)


def test_pygraph_after_plain_and_plain_from_the_cache(tmp_path: Path) -> None:
    assert_plain(run(tmp_path, "inductor"))
    ours = run(tmp_path, "pygraph")
    assert_ours(ours)
    assert ours["aot_hits"] == 0
    again = run(tmp_path, "inductor")
    assert_plain(again)
    assert again["aot_hits"] + again["fx_hits"] > 0


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
    shutil.copytree(lowering.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(lowering, "PACKAGE", package)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    lowering._package_digest.cache_clear()
    assert hits() == 0
    assert hits() == 1
    return package


SHAPING = [
    "analysis",
    "calibration",
    "frontend",
    "ir",
    "lowering",
    "passes",
    "runtime",
    "version.py",
    "compat.py",
    "ir/grammar.lark",
]


def test_a_changed_source_of_the_package_is_a_miss(cached: Path) -> None:
    for part in SHAPING:
        path = cached / part
        path = sorted(path.glob("*.py"))[-1] if path.is_dir() else path
        path.write_text(f"{path.read_text()}\n")
        lowering._package_digest.cache_clear()  # as in a new process
        assert hits() == 0, part
    assert hits() == 1


def test_what_only_reports_or_measures_is_no_part_of_the_key(cached: Path) -> None:
    for part in ("report", "bench", "cli"):
        (cached / part / "another.py").write_text("")
    lowering._package_digest.cache_clear()
    assert hits() == 1


def test_a_changed_module_of_a_users_pass_is_a_miss(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "users_pass.py"
    monkeypatch.setattr(sys.modules[Idle.__module__], "__file__", str(module))
    for helper in ("1", "2"):
        module.write_text(f"HELPER = {helper}")
        lowering._source.cache_clear()
        assert hits() == 0
        assert hits() == 1
    monkeypatch.undo()
    lowering._source.cache_clear()


def test_a_pass_without_a_file_is_another_one_in_each_process(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[Idle.__module__], "__file__")
    for _ in range(2):
        lowering._source.cache_clear()
        assert hits() == 0
        assert hits() == 1
    monkeypatch.undo()
    lowering._source.cache_clear()


def test_each_other_part_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [lowering.program_key(BASE, ()), lowering.program_key(BASE, (), "failed")]
    keys.append(lowering.program_key(replace(BASE, pipeline="legality,placement"), ()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one")
    keys.append(lowering.program_key(replace(BASE, device="cuda"), ()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    keys.append(lowering.program_key(replace(BASE, device="cuda"), ()))
    monkeypatch.setattr(torch, "__version__", "3.0")
    keys.append(lowering.program_key(BASE, ()))
    monkeypatch.setattr(lowering, "__version__", "3.0")
    keys.append(lowering.program_key(BASE, ()))
    assert len(set(keys)) == len(keys)


def test_the_key_is_added_to_the_users_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def compile_fx_inner(*args: Any, **kwargs: Any) -> None:
        seen.append(torch.compiler.config.cache_key_tag)

    monkeypatch.setattr(lowering.compat, "compile_fx_inner", compile_fx_inner)
    with torch.compiler.config.patch(cache_key_tag="mine"):
        lowering.compile_steered(None, [], {}, BASE, lambda graph: {}, "key")  # type: ignore[arg-type]
        assert torch.compiler.config.cache_key_tag == "mine"
    assert seen == ["mine|pygraph key"]
