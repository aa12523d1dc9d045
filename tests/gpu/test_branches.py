"""Regions that fork onto other streams: their graphs keep the branches, and the branches share no memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pygraph.program.recording import Recording
from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda.bindings import call, load, read_edges
from pygraph.runtime.cuda.capture import payload_of
from pygraph.runtime.cuda.nodes import handles
from tests.gpu.replays import Function, captured, fresh_arguments, replay_and_compare
from tests.runtime.regions import same_bits

BRANCHES = 4
ROUNDS = 4
REPLAYS = 20
SPIN = 400_000
"""Cycles (a fifth of a millisecond) that a branch waits for at a time: many times as long as a kernel here takes."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def pointwise(x: torch.Tensor, w: torch.Tensor, turn: int) -> torch.Tensor:
    """Some intermediates of one size, each of which is given up as soon as the next is there."""
    return torch.sin(x * 1.5 + turn) * w - x


def products(x: torch.Tensor, w: torch.Tensor, turn: int) -> torch.Tensor:
    return torch.tanh((x @ w) * 0.1 + turn) @ w * 0.1 + x


def draws(x: torch.Tensor, w: torch.Tensor, turn: int) -> torch.Tensor:
    return F.dropout(x * 2 + turn, 0.3) + torch.rand_like(x) * w


def written_in_place(x: torch.Tensor, w: torch.Tensor, turn: int) -> torch.Tensor:
    """Fills and copies, besides kernels."""
    made = torch.zeros_like(x)
    made.copy_(x)
    made.mul_(w).add_(turn)
    return torch.empty_like(x).copy_(made) + x


@functools.cache
def sides() -> list[torch.cuda.Stream]:
    """Streams that nobody else has: torch hands out the same few again and again, and one of those might be that of a
    capture."""
    torch.empty(1, device="cuda")  # the context, for this thread
    driver = load()
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    handles_ = [int(call(driver.cuStreamCreate, flags)) for _ in range(BRANCHES - 1)]
    return [torch.cuda.ExternalStream(handle) for handle in handles_]


def forked(step: Step) -> Function:
    """BRANCHES branches of ROUNDS steps, all but one on streams of their own. In every round another branch waits, so
    that each of them is ahead of and behind every other at some time."""

    def branch(x: torch.Tensor, w: torch.Tensor, number: int) -> torch.Tensor:
        for turn in range(ROUNDS):
            if (turn + number) % BRANCHES < 2:
                torch.cuda._sleep(SPIN)
            x = step(x, w, turn + number)
        return x

    def fn(args: list[Any]) -> tuple[torch.Tensor, ...]:
        x, w = args
        main = torch.cuda.current_stream()
        begin = x * 0.5 + 1
        made = []
        for number, side in enumerate(sides(), start=1):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                made.append(branch(begin, w, number))
        made.append(branch(begin, w, 0))
        for side in sides():
            main.wait_stream(side)
        total = made[0]
        for each in made[1:]:
            total = total + each
        return total, made[-1] * 2, torch.cos(total)

    return fn


def arguments() -> list[Any]:
    return [torch.randn(128, 128, device="cuda"), torch.randn(128, 128, device="cuda") / 8]


def shape(graph: int) -> dict[str, object]:
    """Nodes, roots and edges of a graph, and how often each kind of edge data occurs."""
    driver = load()
    edges = read_edges(graph)
    followers = {later for _, later, _ in edges}
    nodes = [int(handle) for handle in handles(driver, graph)]
    return {
        "nodes": len(nodes),
        "roots": sum(node not in followers for node in nodes),
        "edges": len(edges),
        "data": Counter(data.hex() for _, _, data in edges),
    }


def plain_graph(fn: Function, args: list[Any]) -> torch.cuda.CUDAGraph:
    """Torch's own graph of ``fn``."""
    fn(list(args))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        fn(list(args))
    graph.instantiate()
    return graph


def assert_branches_are_torchs(driver: Driver, fn: Function, args: list[Any]) -> tuple[Recording, dict[str, object]]:
    """A capture's graph has the shape of torch's own; returns the capture and that shape."""
    torchs = plain_graph(fn, args)
    plain = shape(int(torchs.raw_cuda_graph()))
    recording = driver.capture(fn, args)
    graph = payload_of(recording).graph
    assert graph is not None
    found = shape(int(graph.raw_cuda_graph()))
    assert found == plain, f"captured {found}, by torch's own capture {plain}"
    return recording, found


# -- branches on streams of the region's own ------------------------------------------------------------------------


@pytest.mark.parametrize("step", [pointwise, products, draws, written_in_place])
def test_branches_that_overtake_each_other_compute_what_they_do_uncaptured(driver: Driver, step: Step) -> None:
    """A byte that two branches shared would be written by the one while the other needs it."""
    fn, args = forked(step), arguments()
    made, held = captured(driver, fn, args), list[Any]()
    for seed in range(REPLAYS):
        again = fresh_arguments(args, seed)
        held.append((again, replay_and_compare(driver, fn, made, again)))  # nothing returns to where it was
    made.executable.close()


def test_a_graph_keeps_its_branches(driver: Driver) -> None:
    recording, found = assert_branches_are_torchs(driver, forked(pointwise), arguments())
    count, phases = len(recording.launches), recording.phases
    sizes = Counter(phases)
    assert (found["nodes"], found["roots"], len(phases)) == (count, 1, count)
    assert max(sizes.values()) > BRANCHES * ROUNDS, f"phases {phases}"
    assert sum(size > 1 for size in sizes.values()) == 1, f"phases {phases}: before and behind the branches is a chain"


# -- a library that forks by itself ---------------------------------------------------------------------------------


def test_a_grouped_convolution_keeps_the_branches_of_the_library(driver: Driver) -> None:
    """The positional embedding of wav2vec2: cuDNN computes its groups on streams of its own."""

    def fn(args: list[Any]) -> tuple[torch.Tensor, ...]:
        return (F.conv1d(*args, padding=64, groups=16),)

    shapes = ((1, 768, 250), (768, 48, 128), (768,))
    args = [torch.randn(size, dtype=torch.float16, device="cuda") / 64 for size in shapes]
    expected = fn(list(args))
    assert all(same_bits(fn(list(args)), expected) for _ in range(2)), "nothing can be said of a replay"
    made, held = captured(driver, fn, args), list[Any]()
    for seed in range(5):
        again = fresh_arguments(args, seed)
        held.append((again, replay_and_compare(driver, fn, made, again)))
    made.executable.close()
    assert_branches_are_torchs(driver, fn, args)
