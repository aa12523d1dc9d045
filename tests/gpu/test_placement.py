"""Placement on a real device: programs that mix the CPU and the GPU, against eager, with their CPU tensors changing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir import UPLOAD
from tests.gpu.mixed import MIXED, Mixed
from tests.gpu.programs import (
    EVERYTHING,
    assert_replayed,
    assert_same,
    compiled,
    device_tensor,
    figures,
    replaying_regions,
)

CALLS = 5

pytestmark = pytest.mark.usefixtures("fresh")


def calls_equal_eager(case: Mixed, **options: Any) -> None:
    """Fresh values at fresh addresses in each call; results, devices, and what the program mutates are eager's."""
    torch.manual_seed(1)
    program = case.build()
    twin = copy.deepcopy(program)
    ours = compiled(program, dynamic=case.dynamic, **EVERYTHING, **options)
    held: list[Any] = []
    for turn in range(CALLS):
        torch.manual_seed(turn)
        mine = case.inputs(turn)
        yours = copy.deepcopy(mine)
        if case.between is not None and turn:
            case.between(program, turn)
            case.between(twin, turn)
        actual, expected = ours(*mine), twin(*yours)
        torch.cuda.synchronize()  # copies that were not waited for are there
        assert_same(actual, expected, call=turn)
        assert_same(mine, yours, call=f"{turn}, in its arguments")
        held.append((mine, actual))


def assert_decided(case: Mixed) -> None:
    """One graph, as many replayed regions as expected, and nothing outside for another reason than expected."""
    assert_replayed(case.regions)
    assert len(pygraph.reports()) == 1, figures()
    assert len(replaying_regions()) == case.regions, figures()
    outside = {left.reason for report in pygraph.reports() for left in report.uncaptured()}
    assert outside <= set(case.cut), figures()
    (report,) = pygraph.reports()
    assert report.emitted is not None
    assert not [kernel for kernel in report.emitted.outside if kernel.startswith("triton_")], report.emitted.outside


def assert_counts(case: Mixed) -> None:
    """The first call of a set of sizes warms a region up, the second is captured, all others are replayed."""
    sizes = [tuple(x.shape for x in case.inputs(turn)[:1]) for turn in range(CALLS)]
    replayed = sum(sizes[:turn].count(size) >= 2 for turn, size in enumerate(sizes))
    for region in replaying_regions():
        assert region.record is not None
        assert region.record.replays == replayed, figures()


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in MIXED] + [(name, {"verify": "always"}) for name in tuple(MIXED)[::2]],
    ids=str,
)
def test_a_program_of_two_devices_equals_eager(name: str, options: dict[str, Any]) -> None:
    calls_equal_eager(MIXED[name], **options)
    assert_decided(MIXED[name])
    assert_counts(MIXED[name])


def test_several_cpu_tensors_are_uploaded_at_once() -> None:
    calls_equal_eager(MIXED["many-uploads"])
    (report,) = pygraph.reports()
    assert report.graph is not None
    uploads = [len(node.outputs) for node in report.graph.nodes if node.op == UPLOAD]
    assert uploads == [7], f"uploads of {uploads} tensors\n{figures()}"


def test_results_of_a_replay_on_the_cpu_are_the_callers_own() -> None:
    """What an earlier call returned stays as it was: nothing on the CPU is shared between calls."""
    case = MIXED["fetched-at-the-end"]
    program = case.build()
    ours = compiled(program, **EVERYTHING)
    earlier: list[tuple[Any, Any]] = []
    for turn in range(CALLS):
        torch.manual_seed(turn)
        result = ours(*case.inputs(turn))
        for kept, copies in earlier:
            assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True)), f"changed by call {turn}"
        earlier.append((result, [t.clone() for t in result]))
    assert {t.device.type for kept, _ in earlier for t in kept} == {"cpu"}
    assert_replayed()


def test_copies_of_one_cpu_value_are_memory_of_their_own() -> None:
    """The caller writes to each result, as it may to eager's: no other result changes."""

    def copied(x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        position = torch.arange(16)
        one, other = (torch.empty_like(row, device=x.device).copy_(row) for _ in range(2))
        return position.to(x.device), position.to(x.device), one, other, x * 2

    call = compiled(copied, **EVERYTHING)
    for turn in range(CALLS):
        x, row = device_tensor(16, 16), torch.randn(16)
        ours, theirs = call(x, row), copied(x, row)
        for place, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            mine.add_(place + 1)
            yours.add_(place + 1)
        assert_same(ours, theirs, call=turn)
    assert_replayed()


def test_a_callers_own_capture_holds_the_numbers_of_then() -> None:
    """As with eager and with Inductor: a CPU number is an argument of the kernels, and stays what it was."""

    def scaled(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return (x * rate).sin() - rate * 0.5

    call = compiled(scaled, **EVERYTHING)
    x, rate = torch.randn(64, device="cuda"), torch.tensor(0.25)
    for _ in range(4):
        assert_same(call(x, rate), scaled(x, rate))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x, rate)
    expected = scaled(x, rate)
    rate.fill_(3.0)
    junk = [torch.full((16,), 7.0).pin_memory() for _ in range(64)]
    graph.replay()
    assert_same(result, expected)
    del junk
