"""Regions that fork onto other streams: their graphs keep the branches, which run side by side and share no memory.
And how long a replay takes the GPU: as long as a graph does whose addresses were never replaced."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda.bindings import call, load, read_edges
from pygraph.runtime.cuda.capture import payload_of
from pygraph.runtime.cuda.nodes import handles
from pygraph.runtime.recording import Recording
from tests.gpu.programs import DEVICE, device_tensor
from tests.gpu.replays import Function, captured, fresh_arguments, microseconds, replay_and_compare

BRANCHES = 4
ROUNDS = 4
REPLAYS = 20
SPIN = 400_000
"""Cycles (a fifth of a millisecond) that a branch waits for at a time: many times as long as a kernel here takes."""

LONG = 10_000_000
"""Cycles of one long kernel (5 ms): all else in its graph takes no time beside it."""

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


STEPS: dict[str, Step] = {
    "pointwise": pointwise,
    "products": products,
    "draws": draws,
    "written in place": written_in_place,
}


@functools.cache
def sides() -> list[torch.cuda.Stream]:
    """Streams that nobody else has: torch hands out the same few again and again, and one of those might be that of a
    capture."""
    torch.empty(1, device="cuda")  # the context, for this thread
    driver = load()
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    handles_ = [int(call(driver.cuStreamCreate, flags)) for _ in range(BRANCHES - 1)]
    return [torch.cuda.ExternalStream(handle) for handle in handles_]


def forked(step: Step, spin: int = SPIN) -> Function:
    """BRANCHES branches of ROUNDS steps, all but one on streams of their own. In every round another branch waits, so
    that each of them is ahead of and behind every other at some time."""

    def branch(x: torch.Tensor, w: torch.Tensor, number: int) -> torch.Tensor:
        for turn in range(ROUNDS):
            if spin and (turn + number) % BRANCHES < 2:
                torch.cuda._sleep(spin)
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


def graph_of(recording: Recording) -> int:
    """The handle of a recording that no executable was made of."""
    graph = payload_of(recording).graph
    assert graph is not None
    return int(graph.raw_cuda_graph())


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


def plain_graph(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Torch's own graph of ``function``, and what it returned, which replays write to."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        returned = function()
    graph.instantiate()
    return graph, returned


# -- branches on streams of the region's own ------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_branches_that_overtake_each_other_compute_what_they_do_uncaptured(driver: Driver, name: str) -> None:
    """A byte that two branches shared would be written by the one while the other needs it."""
    fn, args = forked(STEPS[name]), arguments()
    made, held = captured(driver, fn, args), list[Any]()
    for seed in range(REPLAYS):
        again = fresh_arguments(args, seed)
        held.append((again, replay_and_compare(driver, fn, made, again)))  # nothing returns to where it was
    made.executable.close()


def test_a_graph_keeps_its_branches(driver: Driver) -> None:
    fn, args = forked(pointwise), arguments()
    fn(list(args))
    torch.cuda.synchronize()
    recording = driver.capture(fn, args)
    ours = shape(graph_of(recording))
    plain, _ = plain_graph(lambda: fn(list(args)))
    theirs = shape(int(plain.raw_cuda_graph()))
    count = len(recording.launches)
    assert (ours["nodes"], ours["roots"]) == (count, 1)
    assert ours == theirs, f"captured {ours}, by torch's own capture {theirs}"
    phases = recording.phases
    sizes = Counter(phases)
    assert len(phases) == count
    assert max(sizes.values()) > BRANCHES * ROUNDS, f"phases {phases}"
    assert sum(size > 1 for size in sizes.values()) == 1, f"phases {phases}: before and behind the branches is a chain"
    assert call(load().cuGraphGetEdges, load().CUgraph(graph_of(recording)))[-1] == ours["edges"]


def test_branches_run_side_by_side(driver: Driver) -> None:
    def slow(x: torch.Tensor, w: torch.Tensor, turn: int) -> torch.Tensor:
        if turn in range(BRANCHES):
            torch.cuda._sleep(LONG // ROUNDS)
        return x + w

    fn, args = forked(slow, spin=0), arguments()
    replay = captured(driver, fn, args).executable.replay
    assert replay(list(args)) is not None
    plain, _ = plain_graph(lambda: fn(list(args)))
    rounds = [(microseconds(lambda: replay(list(args)), 10), microseconds(plain.replay, 10)) for _ in range(5)]
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))
    assert ours <= 1.3 * theirs, f"{ours:.0f} µs a replay, {theirs:.0f} µs in torch's own graph"


# -- a library that forks by itself ---------------------------------------------------------------------------------

CHANNELS, GROUPS, KERNEL, LENGTH = 768, 16, 128, 250


def convolution() -> nn.Module:
    """The positional embedding of wav2vec2: cuDNN computes its groups on streams of its own."""
    torch.manual_seed(3)
    made = nn.Conv1d(CHANNELS, CHANNELS, KERNEL, padding=KERNEL // 2, groups=GROUPS)
    return made.to(DEVICE, torch.float16).eval()


def sound() -> torch.Tensor:
    return device_tensor(1, CHANNELS, LENGTH, dtype=torch.float16)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


def test_a_grouped_convolution_keeps_the_branches_of_the_library(driver: Driver) -> None:
    module = convolution()

    def fn(args: list[Any]) -> tuple[torch.Tensor, ...]:
        x, weight, bias = args
        return (F.conv1d(x, weight, bias, padding=KERNEL // 2, groups=GROUPS),)

    args = [sound(), module.weight.detach(), module.bias.detach()]
    expected = [fn(list(args))[0] for _ in range(3)]
    spread = max(apart(expected[0], each) for each in expected)
    assert spread == 0, f"uncaptured runs lie {spread} apart: nothing can be said of a replay"
    made, held = captured(driver, fn, args), list[Any]()
    for seed in range(5):
        again = fresh_arguments(args, seed)
        held.append((again, replay_and_compare(driver, fn, made, again)))
    recording = driver.capture(fn, args)
    ours = shape(graph_of(recording))
    plain, _ = plain_graph(lambda: fn(list(args)))
    theirs = shape(int(plain.raw_cuda_graph()))
    assert ours == theirs, f"captured {ours}, by torch's own capture {theirs}"
    made.executable.close()
