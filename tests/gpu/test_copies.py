"""Copies of device memory in captured graphs: bytes, neighbours, branches, segments, and memory of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph.program.recording import LaunchKind
from pygraph.runtime.contract import Driver
from pygraph.runtime.discover import Captured
from tests.gpu.replays import Function, assert_replays, captured
from tests.runtime.regions import same_bits

SHIFTS = (0, 1, 4)
PAIRS = [(to, source) for to in SHIFTS for source in SHIFTS]
"""Bytes behind an aligned place at which each copy of a region begins: of its destination, and of its source."""

GUARD = 4096


def copies_of(nbytes: int) -> Function:
    """Copies of ``nbytes`` from rows of the second argument to those of the first, at every pair of shifts."""

    def region(args: list[Any]) -> Sequence[Any]:
        out, x = args
        for row, (to, source) in enumerate(PAIRS):
            out[row, to : to + nbytes].copy_(x[row, source : source + nbytes])
        return (out,)

    return region


def rows(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and the rows for ``copies_of`` in their middle."""
    width = -(-(nbytes + max(SHIFTS) + 1) // 512) * 512
    count = len(PAIRS) * width
    buffer = torch.randint(0, 256, (2 * GUARD + count,), dtype=torch.uint8, device="cuda")
    return buffer, buffer[GUARD:-GUARD].view(len(PAIRS), width)


def recorded_copies(made: Captured) -> int:
    return sum(launch.kind is LaunchKind.MEMCPY for launch in made.program.recording.launches)


@pytest.mark.parametrize("nbytes", [1, 17, 65536])
def test_copies_are_right_wherever_they_begin(driver: Driver, nbytes: int) -> None:
    """Replayed on memory elsewhere: all bytes are as uncaptured, and none beside them are written."""
    made = captured(driver, copies_of(nbytes), [rows(nbytes)[1], rows(nbytes)[1]])
    assert recorded_copies(made) == len(PAIRS), "torch did not copy by copy nodes"
    held = []
    for turn in range(3):
        (buffer, out), (all_bytes, x) = rows(nbytes), rows(nbytes)
        before, source = buffer.clone(), all_bytes.clone()
        replayed = made.executable.replay([out, x])
        assert replayed is not None, "the replay turned its arguments away"
        expected = before[GUARD:-GUARD].view(out.shape)
        copies_of(nbytes)([expected, x])  # these are views of ``before``: what surrounds them stays as it was
        torch.cuda.synchronize()
        places = (buffer != before).nonzero().flatten().tolist()
        where = [divmod(place - GUARD, out.shape[1]) for place in places[:8]]
        assert not places, f"replay {turn}: {len(places)} bytes differ, the first at (row, byte) {where} of {PAIRS}"
        assert torch.equal(all_bytes, source), "the source was written"
        held.append((out, x, torch.empty(512 * (turn + 1), dtype=torch.uint8, device="cuda")))
    made.executable.close()


def mixed(args: list[Any]) -> Sequence[Any]:
    """Copies of arguments, intermediates and outputs between kernels, a larger one, and a fill."""
    x, large = args
    y = x * 2
    z = torch.empty_like(y).copy_(y)
    total = torch.zeros_like(z)
    total[1:].copy_(z[:-1])
    return torch.empty_like(total).copy_(total) + x, z, torch.empty_like(large).copy_(large), total


def test_copies_among_kernels(driver: Driver) -> None:
    made = assert_replays(driver, mixed, [torch.randn(1001, device="cuda"), torch.randn(40_000, device="cuda")])
    assert recorded_copies(made) == 4


def mapped(like: torch.Tensor) -> torch.Tensor:
    """A tensor like ``like`` in mapped memory, which copy nodes that were made for ordinary memory refuse."""
    torch.cuda.empty_cache()
    held: list[torch.Tensor] = []
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        while not held or not is_mapped(held[-1]):  # what is left of an ordinary segment is given out first
            held.append(torch.randn_like(like))
        return held[-1]
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def is_mapped(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    segments = torch.cuda.memory_snapshot()
    return any(s["is_expandable"] and 0 <= address - s["address"] < s["total_size"] for s in segments)


def test_memory_of_another_kind_never_stops_a_replay_half_way(driver: Driver) -> None:
    """A copy in the first segment declines it, before anything ran; one in a later segment is made for it."""
    part = 512 << 10

    def region(args: list[Any]) -> Sequence[Any]:
        saved, outputs = list(args), []
        args.clear()
        while saved:
            large = saved.pop()
            head = torch.empty_like(large[:part]).copy_(large[:part])
            outputs.append(large.cos())
            outputs[-1][1 : part + 1].copy_(head)
            large.add_(1)  # seen if it were done twice, or half
            del large
        return outputs

    args = [torch.randn(8 << 20, device="cuda") for _ in range(8)]
    made = captured(driver, region, args)
    assert recorded_copies(made) == 16
    for position, replays in ((None, True), (0, True), (None, True), (7, False), (None, True), (0, True)):
        ours = [torch.randn_like(arg) for arg in args]
        if position is not None:
            ours[position] = mapped(args[position])
        before, theirs = [arg.clone() for arg in ours], [arg.clone() for arg in ours]
        outputs, expected = made.executable.replay(list(ours)), region(list(theirs))
        assert (outputs is not None) == replays, position
        assert same_bits(ours, theirs if replays else before), position
        assert outputs is None or same_bits(outputs, expected), position
    made.executable.close()
