"""A replay takes the GPU as long as a graph does whose addresses were never replaced. Work on a second stream would
make all kernels of the process slower: a file of its own is a process of its own."""

from __future__ import annotations

from typing import Any

import torch

from pygraph.runtime.contract import Driver
from tests.gpu.replays import captured, microseconds

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


def test_patched_kernels_are_no_slower(driver: Driver) -> None:
    x = torch.randn(64, 64, device="cuda")
    replay = captured(driver, chain, [torch.randn(64, 64, device="cuda")]).executable.replay
    outputs = replay([x])
    assert outputs is not None
    assert torch.equal(outputs[0], chain([x])[0])
    plain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain):
        kept = chain([x])
    rounds = [(microseconds(lambda: replay([x]), CALLS), microseconds(plain.replay, CALLS)) for _ in range(ROUNDS)]
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))
    assert ours <= EXCESS * theirs, f"{ours:.1f} µs a replay, {theirs:.1f} µs a plain graph"
    assert torch.equal(kept[0], outputs[0])
