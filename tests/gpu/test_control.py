"""``torch.cond`` and ``torch.while_loop`` in compiled programs on a device: replays decide, and the host waits for
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

pytestmark = pytest.mark.usefixtures("fresh")

W = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8


def x(value: float) -> torch.Tensor:
    return torch.full((64, 64), value, device="cuda") + torch.arange(4096.0, device="cuda").view(64, 64) / 1e5


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


def replayed(fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> None:
    """``calls`` of ``fn``, compiled, give what those of Inductor's default do; the last round is of replays alone."""
    compiled = torch.compile(fn, backend="pygraph", options=options or None, dynamic=False)
    default = torch.compile(fn, dynamic=False)
    with torch.no_grad():
        expected = [default(*args) for args in calls]
        for args, wanted in zip((calls[0], *calls, *calls), (expected[0], *expected, *expected), strict=True):
            torch.testing.assert_close(compiled(*args), wanted, equal_nan=True)
        (report,) = pygraph.reports()
        (record,) = [region.record for region in report.regions]
        assert record is not None
        before = record.replays
        held = [compiled(*args) for args in calls]  # in flight together
        for actual, wanted in zip(held, expected, strict=True):
            torch.testing.assert_close(actual, wanted, equal_nan=True)
    assert (record.state.value, record.reason, record.segments) == ("replay", None, 1)
    assert (record.replays - before, record.uncaptured, record.refusals) == (len(calls), 2, {})


@pytest.fixture(scope="module")
def w() -> torch.Tensor:
    return W.cuda()


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_a_branch(w: torch.Tensor, order: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x @ w)

        def one(a: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.sin(a) @ w, y + 1

        def other(a: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a.clone(), torch.tanh(y @ w) * 2

        b, c = torch.cond(x.sum() > 0, one, other, (a, y))
        return b + c @ w

    replayed(fn, *((x(value), x(0.5)) for value in (1.0, -1.0, 2.0, -3.0)), order=order)


def test_a_loop_that_counts(w: torch.Tensor) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.zeros((), dtype=torch.int64, device="cuda")
        loop = torch.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, torch.tanh(x @ w)), (first, x * 2))
        return loop[1] + 1, loop[0]

    replayed(fn, *((x(0.1), number(n)) for n in (3, 1, 0, 100)))


def test_a_loop_that_ends_by_data() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        (done,) = torch.while_loop(lambda x: x.abs().max() > 0.05, lambda x: (x * 0.7,), (x.clone(),))
        return done + 1

    replayed(fn, (x(1.0),), (x(100.0),), (x(0.001),), (x(float("nan")),))


def test_a_loop_that_swaps() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.zeros((), dtype=torch.int64, device="cuda")
        body = lambda i, x, y: (i + 1, y.clone(), x + 1)  # noqa: E731
        return torch.while_loop(lambda i, x, y: i < n, body, (first, x.clone(), y.clone()))

    replayed(fn, *((x(1.0), x(2.0), number(n)) for n in (3, 2, 0)))


def test_branches_and_loops_within_each_other(w: torch.Tensor) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.cond(i % 2 == 0, lambda x: x @ w, lambda x: torch.tanh(x) + 1, (x,))

        def often(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            first = torch.zeros((), dtype=torch.int64, device="cuda")
            return torch.while_loop(lambda i, x: i < n, body, (first, x.clone()))[1]

        return (torch.cond(x.sum() > 0, often, lambda x, n: torch.cos(x @ w), (x, n)),)

    replayed(fn, *((x(value), number(n)) for value, n in ((1.0, 4), (-1.0, 4), (0.5, 1), (0.3, 0), (0.2, 5))))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 follows no gradient through torch.cond here")
def test_gradients(w: torch.Tensor) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x, w: torch.sin(x @ w), lambda x, w: torch.tanh(x @ w) * 2, (x, w)).sum()

    compiled = torch.compile(fn, backend="pygraph", dynamic=False)
    default = torch.compile(fn, dynamic=False)
    for value in (1.0, 1.0, -1.0, 2.0, -2.0, 3.0):
        given = [(x(value).requires_grad_(), w.clone().requires_grad_()) for _ in range(2)]
        default(*given[0]).backward()
        compiled(*given[1]).backward()
        for actual, expected in zip(given[1], given[0], strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-4)
    states = [region.record.state.value for report in pygraph.reports() for region in report.regions if region.record]
    assert states.count("replay") == len(states) > 1


def test_replays_do_not_wait_for_the_device(w: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(x @ w), lambda x: x @ w - 1, (x,))

    compiled = torch.compile(fn, backend="pygraph", dynamic=False)
    with torch.no_grad():
        for value in (1.0, 1.0, -1.0, 1.0):
            compiled(x(value))
        given = x(-2.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = compiled(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(actual, fn(given))


def test_what_a_body_of_several_configurations_computes_is_captured_though_no_call_came_to_it(w: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        def seldom(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(torch.nn.functional.layer_norm(x @ w, (64,)).exp() @ w, 0).cumsum(1) @ w

        return torch.cond(x.sum() > 0, lambda x: x @ w + 1, seldom, (x,))

    replayed(fn, (x(1.0),), (x(2.0),))
    assert "false_graph" in " ".join(pygraph.reports()[0].regions[0].record.notes)  # type: ignore[union-attr]


def test_launches_around_bodies_draw(w: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(x @ w, 0.5)
        x = torch.cond(x.sum() > 0, lambda x: x @ w + 1, lambda x: torch.tanh(x @ w), (x,))
        return torch.nn.functional.dropout(x, 0.5)

    compiled = torch.compile(fn, backend="pygraph", dynamic=False, options={"order": "program"})
    default = torch.compile(fn, dynamic=False)
    with torch.no_grad():
        for value in (1.0, 1.0, -1.0, 2.0, -2.0, 3.0):
            results = []
            for run in (default, compiled):
                torch.manual_seed(7)
                results.append((run(x(value)), torch.rand(3, device="cuda")))
            torch.testing.assert_close(*results)
    record = pygraph.reports()[0].regions[0].record
    assert record is not None
    assert (record.state.value, record.reason) == ("replay", None)
