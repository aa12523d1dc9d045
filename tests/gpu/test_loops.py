"""``pygraph.loop`` on CUDA: one launch, which the device ends, against loops in Python, bit by bit."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests.graph.calls import assert_same
from tests.graph.test_loop import assert_loop, plain

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).cuda().requires_grad_(False)


def test_an_integrator(net: nn.Module) -> None:
    def step(state: Any) -> Any:
        x, t = state
        half = net(x + 0.005 * net(x))
        return x + 0.01 * half, t + 0.01

    replays = []
    for steps in (3, 4, 5, 1, 0, 200, 180, 150):  # buffers of 16 rows, then of 256
        state = (torch.randn(32, 64, device="cuda"), torch.zeros((), device="cuda"))
        expected = plain(step, state, steps, None, lambda s: s[1])
        found = pygraph.loop(step, state, steps=steps, collect=lambda s: s[1], held=net)
        assert_loop(found, expected)
        replays.append(found.record.replays)
    assert replays[2:5] == [1, 2, 3], found.record
    assert replays[-1] > 3, found.record


def test_the_device_decides(net: nn.Module) -> None:
    def step(state: Any) -> Any:
        return torch.tanh(net(state))

    def until(state: Any) -> Any:
        return state.abs().max() < 0.2

    for scale in (1.0, 2.0, 0.01, 5.0, 0.0, 3.0):
        state = torch.randn(8, 64, device="cuda") * scale
        expected = plain(step, state, 50, until)
        found = pygraph.loop(step, state, steps=50, until=until, held=net)
        assert_loop(found, expected)
    assert found.record.replays, found.record


def test_nobody_waits(net: nn.Module) -> None:
    def step(state: Any) -> Any:
        return torch.tanh(net(state))

    def until(state: Any) -> Any:
        return state.abs().max() < 1e-6

    state = torch.randn(8, 64, device="cuda")
    for _ in range(4):
        found = pygraph.loop(step, state, steps=20, until=until, held=net)
    before = found.record.replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = pygraph.loop(step, state, steps=20, until=until, held=net)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.record.replays == before + 1
    assert_loop(found, plain(step, state, 20, until))


def test_a_cache_that_is_held() -> None:
    weight = torch.randn(64, 64, device="cuda") / 8

    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(4, 32, 64, device="cuda")

    ours, theirs = Cache(), Cache()

    def run(cache: Cache, state: Any) -> Any:
        x, position = state
        cache.keys.index_copy_(1, position, x)
        seen = torch.arange(32, device="cuda") <= position
        scores = (x @ cache.keys.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1)
        return (scores @ cache.keys) @ weight, position + 1

    for steps in (3, 4, 5, 9):
        state = (torch.randn(4, 1, 64, device="cuda"), torch.tensor([2], device="cuda"))
        found = pygraph.loop(lambda s: run(ours, s), state, steps=steps, held=[ours, weight])
        assert_loop(found, plain(lambda s: run(theirs, s), state, steps))
        assert_same(ours.keys, theirs.keys)
        ours.keys = ours.keys.clone()
    assert found.record.replays, found.record


def test_random_numbers_are_those_of_the_host() -> None:
    def step(state: Any) -> Any:
        return state + torch.rand_like(state)

    for steps in (3, 4, 5, 2):
        state = torch.zeros(64, device="cuda")
        torch.manual_seed(steps)
        expected = plain(step, state, steps)
        after = torch.rand(2, device="cuda")
        torch.manual_seed(steps)
        found = pygraph.loop(step, state, steps=steps)
        assert_loop(found, expected)
        assert_same(torch.rand(2, device="cuda"), after)
    assert found.record.replays == 2, found.record


def test_many_iterations() -> None:
    def step(state: Any) -> Any:
        return state + 1

    for steps in (2, 3, 100_000):
        found = pygraph.loop(step, torch.zeros(1, dtype=torch.int64, device="cuda"), steps=steps)
    assert found.state.item() == found.count.item() == 100_000


@pytest.mark.parametrize("draws", [False, True])
def test_ctrl_c_ends_a_loop(draws: bool) -> None:
    """The call itself waits where numbers are drawn; else ``synchronize`` does."""

    def step(state: Any) -> Any:
        count, noise = state
        return count + 1, torch.rand_like(noise) if draws else noise

    first = (torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(64, device="cuda"))
    for _ in range(3):
        found = pygraph.loop(step, first, steps=3)
    assert found.record.replays, found.record
    torch.cuda.synchronize()
    main = threading.get_ident()

    def run() -> None:
        nonlocal found
        found = pygraph.loop(step, first, steps=10**9)
        torch.cuda.synchronize()

    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run()
    timer.join()
    if not draws:
        assert 3 < found.count.item() == found.state[0].item() < 10**9
    torch.manual_seed(0)
    expected = plain(step, first, 5)
    torch.manual_seed(0)
    assert_loop(pygraph.loop(step, first, steps=5), expected)


def test_rows_are_there_while_a_replay_runs() -> None:
    """Work on another stream, queued later, writes what ends the loop."""
    last, seen = torch.tensor([5], device="cuda"), list[int]()

    def see(rows: torch.Tensor) -> None:
        seen.extend(rows.tolist())
        if len(seen) > 100:
            last.zero_()

    def run() -> Any:
        seen.clear()
        first, until = torch.zeros(1, dtype=torch.int64, device="cuda"), lambda state: state >= last
        return pygraph.loop(
            lambda s: s + 1, first, steps=10**6, until=until, collect=lambda s: s[0], follow=see, held=last
        )

    replays = [run().record.replays for _ in range(4)]
    last.fill_(10**9)
    torch.cuda.synchronize()
    found = run()
    assert found.record.replays == replays[-1] + 1 > 1
    assert 100 < found.count.item() < 10**6
    assert seen == list(range(1, found.count.item() + 1))
