"""A replay takes the GPU as long as a graph does whose addresses were never replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph.runtime.contract import Driver
from tests.gpu.replays import captured

LAUNCHES = 300
CALLS = 20
ROUNDS = 15
EXCESS = 1.06
"""What a replay may take beyond the plain graph: its outputs are allocated, and the host is in between. A third of a
microsecond in each kernel would come to a fifth."""


def chain(args: list[Any]) -> tuple[Any, ...]:
    x = args[0]
    for _ in range(LAUNCHES):
        x = x.sin()
    return (x,)


def microseconds(call: Callable[[], Any]) -> float:
    """GPU time of ``call``, on average of a block."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS * 1e3


def test_patched_kernels_are_no_slower(driver: Driver) -> None:
    x = torch.randn(64, 64, device="cuda")
    replay = captured(driver, chain, [torch.randn(64, 64, device="cuda")]).executable.replay
    outputs = replay([x])
    assert outputs is not None
    assert torch.equal(outputs[0], chain([x])[0])
    plain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain):
        kept = chain([x])
    rounds = [(microseconds(lambda: replay([x])), microseconds(plain.replay)) for _ in range(ROUNDS)]
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))
    assert ours <= EXCESS * theirs, f"{ours:.1f} µs a replay, {theirs:.1f} µs a plain graph"
    assert torch.equal(kept[0], outputs[0])
