"""The suite's programs with state, changing sizes or inputs, and its training steps, as tiny builds on the CPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import pygraph
from pygraph.backend import pygraph as backend
from pygraph.bench.registry import missing
from pygraph.bench.suite import (
    decode,
    gnn,
    moe,
    recommendation,
    scalars,
    sizes,
    small,
    stencil,
    training,
)
from pygraph.bench.workload import Compile, Workload

MODULES = (decode, gnn, moe, recommendation, scalars, sizes, small, stencil, training)
PROGRAMS = {workload.name: workload for module in MODULES for workload in module.WORKLOADS}

WITH_STATE = (
    "accumulation-training",
    "cpu-scalar-update",
    "decode-dynamic",
    "decode-kv",
    "decode-llama-static",
    "mlp-training",
    "ocean",
    "stencil-small",
)
"""What a step leaves is what the next one finds."""

QUICK = (
    "cpu-scalar-update",
    "decode-dynamic",
    "dlrm-1",
    "early-exit",
    "float-schedule",
    "graphsage-fresh",
    "lstm-loop",
    "mlp-training",
    "ocean",
)
"""Compiled in every run of the tests; the others take minutes together."""

NOT_WORTH_A_GRAPH = ("matmul-8192",)

CALLS = 12
"""Enough for each of four sizes in turn to be run uncaptured, captured and replayed."""


def results(workload: Workload, calls: int, compile: Compile = lambda target: target) -> list[list[torch.Tensor]]:
    """Copies of what the first steps return."""
    absent = missing(workload)
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed")
    step = workload.tiny(compile, "cpu")
    return [[tensor.detach().clone() for tensor in tree_leaves(step())] for _ in range(calls)]


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def test_names_are_unique_and_kebab_case() -> None:
    assert len(PROGRAMS) == sum(len(module.WORKLOADS) for module in MODULES)
    assert [name for name in PROGRAMS if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
    assert {workload.kind for workload in PROGRAMS.values()} <= {"inference", "training", "decode"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_build_computes_the_same(name: str) -> None:
    first, second = (results(PROGRAMS[name], 3) for _ in range(2))
    for call, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert ours, "a step has to return tensors"
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"tensor {place} of call {call}"


@pytest.mark.parametrize("name", WITH_STATE)
def test_state_stays_finite(name: str) -> None:
    *_, last = results(PROGRAMS[name], 200)
    for place, tensor in enumerate(last):
        assert tensor.isfinite().all(), f"tensor {place}"
        assert tensor.abs().max() < 100, f"tensor {place}"


def test_the_ocean_keeps_moving_and_keeps_its_water() -> None:
    """Velocities neither die out, which would leave roundings to compare, nor grow."""
    *_, (u, v, h, _) = results(PROGRAMS["ocean"], 2000)
    assert 0.02 < float(u.abs().max()) < 1
    assert 0.002 < float(v.abs().max()) < 1
    assert float(h.min()) > 0.5
    assert float(h.double().mean()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("name", "sure"), [("moe-dense", False), ("early-exit", True)])
def test_programs_take_the_ways_they_are_about(name: str, sure: bool) -> None:
    """Experts get tokens that they answer; a cascade is sure about one input of four only."""
    outputs = [tensors[0] for tensors in results(PROGRAMS[name], 4)]
    if sure:
        assert [float(out.amax(-1).mean()) > 0.5 for out in outputs] == [False, False, True, False]
    else:
        assert all(float(out.std()) > 0.1 for out in outputs)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.sweep]) for name in PROGRAMS]
)
def test_compiled_programs_equal_eager(name: str) -> None:
    workload = PROGRAMS[name]
    expected = results(workload, CALLS)

    def compile(target: Any) -> Any:
        return torch.compile(target, backend=backend)

    with torch._inductor.config.patch(fallback_random=workload.random):
        actual = results(workload, CALLS, compile)
    for call, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), f"tensor {place} of call {call}"
            assert apart(a, b) <= workload.tolerance, f"tensor {place} of call {call}"
    assert [report.error for report in pygraph.reports() if report.error] == []
    assert (pygraph.counters().get("replays", 0) > 0) == (name not in NOT_WORTH_A_GRAPH)
