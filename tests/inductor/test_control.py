"""``torch.cond`` and ``torch.while_loop`` in compiled programs: a region goes through them, and replays decide.

Most programs call torch's operators one by one: Inductor takes a second for each kernel that it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import CaptureError
from pygraph.program import fold
from pygraph.runtime import life
from pygraph.runtime.control import Bodies, cond
from pygraph.runtime.variants import LOOKS
from tests.small import UNFUSED

pytestmark = pytest.mark.usefixtures("fresh")

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) / 2


def x(value: float) -> torch.Tensor:
    """A tensor whose sum is positive if ``value`` is."""
    return torch.full((4, 4), value) + torch.arange(16.0).view(4, 4) / 1000


def replayed(fn: Callable[..., Any], *calls: tuple[Any, ...], fused: bool = False) -> Any:
    """The report of ``fn``, compiled, whose ``calls`` give what eager ones do; the last ones are replays."""
    compiled = torch.compile(fn, backend="pygraph", options=None if fused else UNFUSED, dynamic=False)
    with torch.no_grad():
        for args in (calls[0], *calls, *calls):
            expected, actual = fn(*args), compiled(*args)
            torch.testing.assert_close(actual, expected, equal_nan=True)
    (report,) = pygraph.reports()
    records = [region.record for region in report.regions]
    assert len(records) == 1
    for record in records:
        assert record is not None
        assert (record.state.value, record.reason) == ("replay", None)
        assert (record.captures, record.replays, record.notes) == (1, 2 * len(calls) - 1, [])
    return report


def choose(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = x @ W

    def one(a: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a @ W, y + 1

    def other(a: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.clone(), torch.tanh(y @ W)

    b, c = torch.cond(x.sum() > 0, one, other, (a, y))
    return b + c @ W


def count(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    def check(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return i < n

    def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.tanh(x @ W)

    i, x = torch.while_loop(check, body, (torch.zeros((), dtype=torch.int64), x + 1))
    return x + 1, i


def test_a_region_goes_through_a_branch_and_replays_run_either_body() -> None:
    calls = (x(1.0), x(0.5)), (x(-1.0), x(0.5)), (x(2.0), x(0.1)), (x(-3.0), x(0.2))
    report = replayed(choose, *calls, fused=True)
    assert report.regions[0].record.segments == 1


@pytest.mark.parametrize("values", [(1, 256, 0), (0.5, 1.0, 0.0, torch.nan)], ids=["integer", "float"])
def test_a_branch_on_a_number_runs_the_first_body_unless_it_is_zero(values: tuple[float, ...]) -> None:
    def fn(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.cond(p, lambda x: x @ W, torch.tanh, (x.clone(),)) + 1

    replayed(fn, *((x(0.5), torch.tensor(value)) for value in values))


def test_a_region_goes_through_a_loop_which_the_device_counts() -> None:
    record = replayed(count, *((x(0.1 * n), torch.tensor(n)) for n in (3, 1, 0, 7)), fused=True).regions[0].record
    assert record.launches > record.segments == 1, "those around bodies and in them"


def test_branches_within_branches() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        def small(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 2, lambda x: x @ W, torch.tanh, (x.clone(),))

        return torch.cond(x.sum() > 0, small, lambda x: x @ W @ W, (x,)) + 1

    replayed(fn, (x(1.0),), (x(0.01),), (x(-1.0),))


def test_a_branch_within_a_loop() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.cond(i % 2 == 0, lambda x: x @ W, lambda x: x + 1, (x,))

        first = torch.zeros((), dtype=torch.int64)
        i, x = torch.while_loop(lambda i, x: i < n, body, (first, x.clone()))
        return x, i

    replayed(fn, *((x(0.3), torch.tensor(n)) for n in (4, 1, 0, 5)))


def test_a_loop_within_a_branch() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        def often(x: torch.Tensor) -> torch.Tensor:
            first = torch.zeros((), dtype=torch.int64)
            _, x = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(x @ W)), (first, x.clone()))
            return x

        return torch.cond(x.sum() > 0, often, lambda x: x @ W, (x,)) + 1

    replayed(fn, (x(1.0),), (x(-1.0),))


def test_a_loop_that_swaps_what_it_carries() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def body(i: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return i + 1, y.clone(), x + 1

        first = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(lambda i, x, y: i < n, body, (first, x.clone(), y.clone()))

    replayed(fn, *((x(1.0), x(2.0), torch.tensor(n)) for n in (3, 2, 0)))


def test_a_loop_ends_by_a_condition_on_data() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        (done,) = torch.while_loop(lambda x: x.abs().max() > 0.05, lambda x: (x * 0.7,), (x.clone(),))
        return done + 1

    replayed(fn, (x(1.0),), (x(100.0),), (x(0.001),), (torch.full((4, 4), torch.nan),))


def test_constants_and_tensors_from_outside_reach_bodies() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return torch.cond(x.sum() > 0, lambda x: x * table + y, lambda x: x + y @ W, (x,))

    replayed(fn, (x(1.0), x(2.0)), (x(-1.0), x(3.0)))


def test_results_that_are_expanded() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def one(x: torch.Tensor) -> torch.Tensor:
            return (x[0] + 1).expand(4, 4)

        b = torch.cond(x.sum() > 0, one, lambda x: (x[1] * 2).expand(4, 4), (x,))
        return b + x, b

    replayed(fn, (x(1.0),), (x(-1.0),))


def test_equal_results_are_tensors_of_their_own() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tanh(x @ W)
            return new.clone(), new.clone()

        b, c = torch.cond(x.sum() > 0, twice, lambda x: (x * 2, x * 3), (x,))
        first = torch.zeros((), dtype=torch.int64), x.clone(), x.clone()
        _, d, e = torch.while_loop(lambda i, d, e: i < n, lambda i, d, e: (i + 1, d + 1, d + 1), first)
        return b, c, d, e

    replayed(fn, *((x(value), torch.tensor(n)) for value, n in ((1.0, 2), (-1.0, 0), (2.0, 1))))
    compiled = torch.compile(fn, backend="pygraph", options=UNFUSED, dynamic=False)
    results = compiled(x(1.0), torch.tensor(2))
    assert len({result.untyped_storage().data_ptr() for result in results}) == 4


def test_bodies_whose_results_are_not_expanded_alike_are_not_captured() -> None:
    bodies = Bodies(lambda: 0, lambda fn, args: fn(args), torch.Tensor.data_ptr, torch.Tensor.data_ptr)
    with bodies.noted(), pytest.raises(CaptureError, match="results of other strides"):
        cond(torch.tensor(True), lambda args: [torch.zeros(1).expand(4)], lambda args: [torch.ones(4)], [])


def test_sizes_that_vary() -> None:
    compiled = torch.compile(choose, backend="pygraph", options=UNFUSED, dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            for rows in (3, 5):
                for value in (1.0, -1.0):
                    given = torch.full((rows, 4), value), torch.full((rows, 4), 0.25)
                    torch.testing.assert_close(compiled(*given), choose(*given))
    records = [region.record for report in pygraph.reports() for region in report.regions if region.record]
    assert {record.reason for record in records} == {None}
    assert sum(record.captures for record in records) == 2
    assert sum(record.replays for record in records) == 8


def test_gradients_through_a_branch() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: torch.tanh(x @ w), (x, w)).sum()

    compiled = torch.compile(fn, backend="pygraph", options=UNFUSED, dynamic=False)
    for value in (1.0, 1.0, -1.0, 2.0, -2.0, 3.0):
        given = [(x(value), W.clone().requires_grad_()) for _ in range(2)]
        fn(*given[0]).backward()
        compiled(*given[1]).backward()
        torch.testing.assert_close(given[1][1].grad, given[0][1].grad)
    states = [region.record.state.value for report in pygraph.reports() for region in report.regions if region.record]
    assert states.count("replay") == len(states) > 1


def test_bodies_that_draw_stay_outside() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x + 1, (x @ W,))
        return y @ W

    compiled = torch.compile(fn, backend="pygraph", options=UNFUSED, dynamic=False)
    with torch.no_grad():
        for value in (1.0, 1.0, -1.0, 1.0):
            torch.manual_seed(3)
            expected = fn(x(value))
            torch.manual_seed(3)
            assert compiled(x(value)).shape == expected.shape
    (report,) = pygraph.reports()
    assert len(report.regions) == 2
    assert [row.reason for row in report.uncaptured()] == ["control-flow"]


def test_a_body_that_calls_an_unknown_operator_stays_outside() -> None:
    @torch.library.custom_op("pygraph_tests::control", mutates_args=())
    def control(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    control.register_fake(lambda x: torch.empty_like(x))

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: control(x), lambda x: x + 1, (x @ W,))
        return y @ W

    compiled = torch.compile(fn, backend="pygraph", options=UNFUSED, dynamic=False)
    with torch.no_grad():
        for value in (1.0, -1.0, 1.0):
            torch.testing.assert_close(compiled(x(value)), fn(x(value)))
    (report,) = pygraph.reports()
    assert len(report.regions) == 2


def test_a_loop_over_a_compiled_step_with_a_branch() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(x @ W), lambda x: x + 1, (x,))

    def expected(x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = step(x)
        return x

    compiled = torch.compile(step, backend="pygraph", options=UNFUSED, dynamic=False)
    for steps in (5, 5, 7, 6):
        done = pygraph.loop(compiled, x(0.5), steps=steps, held=W)
        torch.testing.assert_close(done.state, expected(x(0.5), steps))
    assert (done.record.reason, done.record.captures, done.record.replays) == (None, 1, 2)


# -- comparison --------------------------------------------------------------------------------------------------------


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.tanh(x @ W), lambda x: x @ W @ W, (x,)) + 1


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reason of each comparison, or nothing."""
    found: list[str] = []
    real = life.compare

    def compare(*args: Any, **more: Any) -> Any:
        verdict = real(*args, **more)
        found.append(verdict.refusal.reason if verdict.refusal else "")
        return verdict

    monkeypatch.setattr(life, "compare", compare)
    return found


def test_calls_are_compared_until_each_body_was(compared: list[str]) -> None:
    compiled = torch.compile(branch, backend="pygraph", options=UNFUSED, dynamic=False)
    counts = []
    with torch.no_grad():
        for value in (1.0, 1.0, 2.0, 3.0, -1.0, -2.0, 1.0, -3.0):
            torch.testing.assert_close(compiled(x(value)), branch(x(value)))
            counts.append(len(compared))
    assert counts == [0, 1, 2, 3, 4, 4, 4, 4]
    record = pygraph.reports()[0].regions[0].record
    assert record is not None
    assert (record.captures, record.replays, record.notes) == (1, 6, [])


def test_a_body_that_does_not_come_is_replayed_after_some_calls_and_the_report_says_so(compared: list[str]) -> None:
    compiled = torch.compile(branch, backend="pygraph", options=UNFUSED, dynamic=False)
    with torch.no_grad():
        for _ in range(LOOKS + 8):
            compiled(x(1.0))
        assert len(compared) == 1 + LOOKS
        torch.testing.assert_close(compiled(x(-1.0)), branch(x(-1.0)))
    record = pygraph.reports()[0].regions[0].record
    assert record is not None
    assert len(compared) == 1 + LOOKS
    assert [note.partition(" ")[2] for note in record.notes] == ["was replayed before a call ran it that was compared"]


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_body_that_would_do_something_else_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch, compared: list[str], first: float
) -> None:
    """The words of the body that the first calls do not run are those of the other one's last launch."""
    real = fold._folded

    def wrong(program: Any, nest: Any, *more: Any) -> Any:
        made = real(program, nest, *more)
        (owner,) = (launch for launch in made.recording.launches if launch.bodies)
        bodies = list(owner.bodies)
        bodies[first > 0] = bodies[first < 0]
        launches = [replace(e, bodies=tuple(bodies)) if e is owner else e for e in made.recording.launches]
        return replace(made, recording=replace(made.recording, launches=tuple(launches)))

    monkeypatch.setattr(fold, "_folded", wrong)
    compiled = torch.compile(branch, backend="pygraph", options=UNFUSED, dynamic=False)
    with torch.no_grad():
        for value in (first, first, first, -first, first, -first):
            torch.testing.assert_close(compiled(x(value)), branch(x(value)))
    record = pygraph.reports()[0].regions[0].record
    assert record is not None
    assert compared[-1] == "comparison-failed"
    assert (record.state.value, str(record.reason).partition(":")[0]) == ("uncaptured", "comparison-failed")
