"""Launches in the order of their dependences on a device: side by side, with equal bits, and proven for each graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph.program.recording import LaunchKind
from pygraph.program.text import parse_program
from pygraph.program.verify import verify
from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda import executable
from pygraph.runtime.provenance import Refusal
from tests.gpu.programs import compiled
from tests.gpu.replays import captured, fresh_arguments, replay_and_compare
from tests.runtime.regions import same_bits

CHAINS, STEPS = 4, 40


def chains(args: list[Any]) -> Sequence[torch.Tensor]:
    """Short kernels and copies: none of a chain needs those of another."""
    x, w = args
    made = []
    for chain in range(CHAINS):
        y = x * (chain + 1)
        for _ in range(STEPS):
            y = torch.sin(y)
        made.append(torch.empty_like(y).copy_(y) + w)
    return [torch.cat(made), sum(made[1:], made[0])]


def products(args: list[Any]) -> Sequence[torch.Tensor]:
    """Products, which share what their library works in."""
    x, w = args
    made = [(x * (chain + 1)) @ w @ w for chain in range(CHAINS)]
    return [torch.stack(made)]


@pytest.mark.parametrize("fn", [chains, products], ids=lambda fn: str(fn.__name__))
def test_any_addresses_give_the_bits_of_the_uncaptured_run(driver: Driver, fn: Any) -> None:
    args = [torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")]
    made = captured(driver, fn, args, "dependences")
    order = made.program.order
    assert order is not None
    assert order.longest_path() < len(made.program.recording.launches) / 2
    for seed in range(20):
        replay_and_compare(driver, fn, made, fresh_arguments(args, seed))
    printed = str(made.program)
    parsed = parse_program(printed)
    verify(parsed)
    assert str(parsed) == printed
    kinds = {launch.kind for launch in made.program.recording.launches}
    assert kinds >= ({LaunchKind.MEMCPY, LaunchKind.KERNEL} if fn is chains else {LaunchKind.KERNEL})


def test_a_graph_that_lacks_an_edge_is_never_replayed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = executable.replace_edges
    monkeypatch.setattr(executable, "replace_edges", lambda graph, edges: replace(graph, list(edges)[1:]))
    args = [torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")]
    with pytest.raises(pygraph.errors.CaptureError, match="does not wait for l"):
        captured(driver, chains, args, "dependences")
    monkeypatch.undo()
    assert not isinstance(captured(driver, chains, args, "dependences"), Refusal)


def test_arguments_that_share_memory_are_turned_away(driver: Driver) -> None:
    def counted(args: list[Any]) -> Sequence[torch.Tensor]:
        x, count = args
        made = torch.sin(x)
        count.add_(1)
        return [torch.cos(x) + made]

    args = [torch.randn(64, device="cuda") for _ in range(2)]
    made = captured(driver, counted, args, "dependences")
    assert made.program.order is not None
    replay_and_compare(driver, counted, made, fresh_arguments(args, 1))
    assert made.executable.replay([args[0], args[0]]) is None
    memory = torch.randn(96, device="cuda")
    assert made.executable.replay([memory[:64], memory[32:]]) is None
    assert made.executable.replay([memory[:64], torch.randn(64, device="cuda")]) is not None


def towers(x: torch.Tensor) -> torch.Tensor:
    """Chains of Triton kernels that Inductor cannot fuse, and emits one after the other. There are no products: at some
    sizes those of a library have to wait for each other, since they share what it works in."""
    made = []
    for tower in range(CHAINS):
        y = x + tower
        for step in range(24):
            y = y - torch.softmax(y, step % 2)
        made.append(y)
    return torch.cat(made)


@pytest.mark.parametrize("sizes", [[64], [64, 48]], ids=["one-size", "sizes-in-turn"])
def test_real_calls_choose_an_order(fresh: None, sizes: list[int]) -> None:
    xs = [torch.randn(size, 64, device="cuda") for size in sizes]
    if len(sizes) > 1:
        for x in xs:
            torch._dynamo.mark_dynamic(x, 0)
    ours, theirs = compiled(towers, cache_dir=None, order="measured"), torch.compile(towers)
    expected = [theirs(x) for x in xs]
    for _ in range(400):
        found = [ours(x) for x in xs]
        torch.cuda.synchronize()  # what the device took is known
    torch.testing.assert_close(found, expected)
    (report,) = pygraph.reports()
    (region,) = report.regions
    assert region.record is not None
    assert len(region.record.orders) == len(sizes), "which one is faster depends on what else the device does"
    assert same_bits(found, [ours(x) for x in xs])
