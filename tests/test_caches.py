"""Inductor's and AOTAutograd's caches between plain and PyGraph compilations of one model, across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.lowering.decision import Decision, Placed

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


def test_the_cache_key_tag_holds_the_users_the_decision_and_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraph.lowering import compile as lowering

    seen: list[str] = []

    def compile_fx_inner(*args: Any, **kwargs: Any) -> None:
        seen.append(torch.compiler.config.cache_key_tag)

    monkeypatch.setattr(lowering.compat, "compile_fx_inner", compile_fx_inner)
    with torch.compiler.config.patch(cache_key_tag="mine"):
        lowering.compile_steered(None, [], {}, BASE, lambda graph: {})  # type: ignore[arg-type]
        assert torch.compiler.config.cache_key_tag == "mine"
    assert seen[0].startswith("mine|pygraph ")
    assert BASE.digest() in seen[0]
    assert lowering._source_digest() in seen[0]
