"""The workloads of the suite, as tiny builds on the CPU: the same each time they are built, and equal to eager."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import pygraph
from benchmarks import suite
from benchmarks.running import built, program_of
from benchmarks.suite import WORKLOADS
from pygraph.bench.timing import CALLS_COMPARED

TINY = list({workload.tiny: name for name, workload in WORKLOADS.items()}.values())
"""Workloads of several batches have one tiny build."""
_SLOW = ("diffusion", "language")
QUICK = [name for name in TINY if not WORKLOADS[name].packages and WORKLOADS[name].domain not in _SLOW]
"""Those whose tiny build runs in well under a second."""
TRANSFORMERS = [name for name in TINY if WORKLOADS[name].packages == ("transformers",)]
COMPILED = [(name, "pygraph") for name in TINY] + [(n, "step") for n in TINY if WORKLOADS[n].kind == "training"]
"""To compile all takes many minutes."""
NOT_WORTH_A_GRAPH = ("matmul-8192",)
CALLS = 12
"""Enough for each of four sizes in turn to be run uncaptured, captured and replayed."""


def results(name: str, calls: int, side: str = "eager") -> list[list[torch.Tensor]]:
    """Copies of what has to be equal after each of the first steps."""
    for package in WORKLOADS[name].packages:
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # torchvision built for another torch fails with a RuntimeError
            pytest.skip(f"{name} needs {package}: {error}")
    _, step = built(WORKLOADS[name], side, "cpu", tiny=True)
    return [[tensor.detach().clone() for tensor in tree_leaves(step())] for _ in range(calls)]


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def test_every_workload_is_known_by_its_name_and_complete() -> None:
    assert len(WORKLOADS) == sum(len(module.WORKLOADS) for module in suite._MODULES) >= 25, "two have one name"
    for name, each in WORKLOADS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert each.kind in ("inference", "training", "decode")
        assert 0 < each.tolerance < 1 <= each.calls


@pytest.mark.parametrize("name", QUICK)
def test_results_are_compared_until_each_size_was_replayed(name: str) -> None:
    """A size is run, captured when it comes again, and replayed from then on: there must be replays to compare."""
    seen: dict[Any, set[str]] = {}

    def compile(target: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(target, set()).add(
                str([leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
            )
            return target(*args, **kwargs)

        return call

    workload = WORKLOADS[name]
    step = workload.tiny(compile, "cpu")
    for _ in range(5):
        step()
    sizes = max(map(len, seen.values()))
    assert workload.turns >= sizes
    program = program_of(workload, ["eager", "whole-step", "step"], tiny=True, calls=None, suite="benchmarks.suite")
    assert program.compared >= max(CALLS_COMPARED, 3 * sizes)
    assert ("whole-step" in program.sides) == workload.whole_step
    assert ("step" in program.sides) == (workload.kind == "training")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_run_and_know_their_keywords(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config takes any keyword, and mypy does not look into the package."""
    transformers = pytest.importorskip("transformers")
    configs, init = list[Any](), transformers.PreTrainedModel.__init__

    def noted(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        configs.append(config)
        init(self, config, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", noted)
    (found,) = results(name, 1)
    assert found
    assert all(tensor.isfinite().all() for tensor in found)
    assert configs
    for config in configs:
        assert vars(config).keys() <= vars(type(config)()).keys()


@pytest.mark.usefixtures("fresh")
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "side"), COMPILED)
def test_compiled_programs_equal_eager(name: str, side: str) -> None:
    workload = WORKLOADS[name]
    expected = results(name, CALLS)
    with torch._inductor.config.patch(fallback_random=workload.random):
        actual = results(name, CALLS, side)
    by_inductor = None
    for call, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), f"tensor {place} of call {call}"
            assert apart(a, b) <= workload.tolerance, f"tensor {place} of call {call}"
            if apart(a, b) > 1e-3:  # Adam's first steps enlarge what Inductor rounds otherwise than eager
                by_inductor = by_inductor or results(name, CALLS, "default")
                assert apart(a, by_inductor[call][place]) <= 1e-3, f"tensor {place} of call {call}"
    assert [report.error for report in pygraph.reports() if report.error] == []
    assert (pygraph.counters().get("replays", 0) > 0) == (name not in NOT_WORTH_A_GRAPH)


_EXACT = ["gcn-fixed", "decode-kv", "mlp-training"]
_CALLABLES = [name for name, each in WORKLOADS.items() if each.whole_step and "adamw" not in name]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "name", [*_EXACT, *(pytest.param(name, marks=pytest.mark.sweep) for name in _CALLABLES if name not in _EXACT)]
)
def test_callables_that_are_captured_as_they_run_equal_eager(name: str) -> None:
    torch.manual_seed(0)
    expected = results(name, 6)
    torch.manual_seed(0)
    actual = results(name, 6, "graph")
    for ours, theirs in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if name in _EXACT:
        assert pygraph.counters()["replays"] >= 3
