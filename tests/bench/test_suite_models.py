"""The suite's whole models: the same each time they are built, and equal to eager under PyGraph, in tiny sizes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import pygraph
from pygraph.backend import pygraph as backend
from pygraph.bench.suite import diffusion, language, speech, vision
from pygraph.bench.workload import Build, Workload

pytestmark = [pytest.mark.usefixtures("fresh")]

WORKLOADS = {w.name: w for module in (language, vision, speech, diffusion) for w in module.WORKLOADS}

REPRESENTATIVE = ("gpt2-1", "llama-prefill-1", "ddim-step-1")
"""Compiled whenever tests run: a result, a returned cache, and scalars on the CPU. The rest takes minutes."""

CALLS = 4
TOLERANCE = 1e-4
"""Eager and Inductor sum in other orders: some roundings of float32, and sampling enlarges those of its first steps."""


def installed(workload: Workload) -> Workload:
    """``workload``, or a skipped test where a package that it needs cannot be imported."""
    for package in workload.packages:
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # torchvision built for another torch fails with a RuntimeError
            pytest.skip(f"{workload.name} needs {package}: {error}")
    return workload


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def eager(build: Build) -> list[torch.Tensor]:
    return tensors(build(lambda target: target, "cpu")())


def compiled(target: Any) -> Any:
    return torch.compile(target, backend=backend)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        far = (a - b).abs().max().item() / b.abs().max().item()
        assert far <= TOLERANCE, f"result {place} is {far:.2e} of the largest magnitude away"


def test_names_are_unique_and_end_in_the_batch_size() -> None:
    names = [w.name for module in (language, vision, speech, diffusion) for w in module.WORKLOADS]
    assert len(names) == len(set(names))
    assert [name for name in names if not name.rpartition("-")[2].isdigit()] == []


@pytest.mark.parametrize("name", WORKLOADS)
def test_builds_are_equal_and_finite(name: str) -> None:
    workload = installed(WORKLOADS[name])
    first, second = eager(workload.tiny), eager(workload.tiny)
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.isfinite(a).all()
        assert a.std() > 0
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", WORKLOADS)
def test_steps_repeat(name: str) -> None:
    """A step changes nothing that a later one reads: blocks of calls do the same work throughout."""
    step = installed(WORKLOADS[name]).tiny(lambda target: target, "cpu")
    first = [tensor.clone() for tensor in tensors(step())]
    again = tensors(step())
    assert len(first) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "name", [n if n in REPRESENTATIVE else pytest.param(n, marks=pytest.mark.sweep) for n in WORKLOADS]
)
def test_pygraph_equals_eager(name: str) -> None:
    workload = installed(WORKLOADS[name])
    expected = eager(workload.tiny)
    step = workload.tiny(compiled, "cpu")
    for _ in range(CALLS):
        assert_close(tensors(step()), expected)
    assert [report.error for report in pygraph.reports() if report.error] == []
    regions = [region for report in pygraph.reports() for region in report.regions if region.wrapped]
    assert regions
    assert [(region.index, region.why) for region in regions if region.state != "replay"] == []


@pytest.mark.parametrize("name", [n for n, w in WORKLOADS.items() if w.domain == "vision"])
def test_results_depend_on_the_input(name: str) -> None:
    """Batch norms have statistics: without them a random network gives nearly the same result for any image."""
    seen: list[torch.nn.Module] = []
    step = installed(WORKLOADS[name]).tiny(lambda target: seen.append(target) or target, "cpu")
    expected = step()
    seen[0].register_forward_pre_hook(lambda _module, given: (given[0].flip(-1),))
    far = (step() - expected).abs().max() / expected.abs().max()
    assert far > 0.01, f"mirrored images give results only {far:.1e} away"
