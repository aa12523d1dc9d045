"""Judging what a replay did, without any run."""

from __future__ import annotations

import math

import pytest
import torch

from pygraph.runtime.judge import ODD_REPLAY, RUNS, Distance, Outcome, Spread, distance, judge
from pygraph.runtime.tensors import digest


def outcome(*results: torch.Tensor, structure: str = "a", rng: int | None = None) -> Outcome:
    names = tuple(f"output {index}" for index in range(len(results)))
    state = None if rng is None else torch.tensor([rng], dtype=torch.uint8)
    return Outcome((structure,), tuple(map(digest, results)), names, state, list(results))


ONE = torch.ones(64)
NEAR = ONE * (1 + 1e-6)
FAR = ONE * 1.5


def spread_of(*runs: torch.Tensor) -> Spread:
    spread = Spread()
    for run in runs:
        assert spread.widen(outcome(ONE), outcome(run), [True]) is None
    return spread


ALL = sum(RUNS)


@pytest.mark.parametrize(
    ("actual", "varying", "runs", "expected"),
    [
        (outcome(ONE), False, [], None),
        (outcome(NEAR), False, [NEAR] * ALL, "comparison-failed: replayed: output 0 has other values"),
        (outcome(ONE, structure="b"), True, [NEAR] * ALL, "comparison-failed: replayed: output 0 is b instead of a"),
        (outcome(ONE, ONE), True, [NEAR] * ALL, "comparison-failed: replayed: another number of operators is called"),
        (outcome(NEAR), True, [], "odd-replay: non-deterministic: output 0 has other values, though"),
        (outcome(FAR), True, [], "odd-replay: non-deterministic: output 0 is off by 5.00e-01"),
        (outcome(NEAR), True, [NEAR], None),
        (outcome(FAR), True, [NEAR], "odd-replay: non-deterministic: output 0 is off by 5.00e-01"),
        (outcome(FAR), True, [NEAR] * ALL, "odd-replay: non-deterministic: output 0 is off by 5.00e-01"),
        (outcome(FAR), True, [ONE * 1.2], None),
        (outcome(NEAR), True, [ONE] * ALL, "odd-replay: non-deterministic: output 0 has other values, though"),
        (outcome(FAR), True, [ONE] * ALL, "odd-replay: non-deterministic: output 0 is off by 5.00e-01"),
        (outcome(ONE * math.nan), True, [ONE], "odd-replay: non-deterministic: output 0 has a NaN"),
    ],
)
def test_one_result(actual: Outcome, varying: bool, runs: list[torch.Tensor], expected: str | None) -> None:
    found = judge(outcome(ONE), actual, [varying], spread_of(*runs))
    assert found is None if expected is None else str(found).startswith(expected), found


def test_what_had_a_tolerance_before_has_one_though_runs_agree() -> None:
    assert judge(outcome(ONE), outcome(NEAR), [True], Spread(), tolerant=True) is None
    assert judge(outcome(ONE), outcome(FAR), [True], Spread(), tolerant=True) is not None


def test_results_that_had_no_room_are_not_judged() -> None:
    """But by their bits."""
    near = outcome(NEAR)
    near.results.clear()
    assert str(judge(outcome(ONE), near, [True], spread_of(NEAR))).startswith("comparison-budget: output 0 varies")
    same = outcome(ONE)
    same.results.clear()
    assert judge(outcome(ONE), same, [True], Spread()) is None


def test_a_random_state_that_differs_says_nothing_of_the_rest() -> None:
    refusal = judge(outcome(ONE, rng=1), outcome(FAR, rng=2), [False], Spread())
    assert refusal is not None
    assert refusal.reason == "random-state"
    assert judge(outcome(ONE, rng=1), outcome(ONE), [False], Spread()) is None, "it drew nothing itself"


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (outcome(NEAR), None),
        (outcome(ONE, structure="b"), "comparison-failed: non-deterministic: in another uncaptured run, output 0 is b"),
        (
            outcome(ONE * math.inf),
            "comparison-failed: non-deterministic: in another uncaptured run, output 0 has a NaN",
        ),
        (outcome(NEAR, rng=2), "random-state"),
    ],
)
def test_runs_by_which_nothing_can_be_judged(again: Outcome, expected: str | None) -> None:
    found = Spread().widen(outcome(ONE, rng=1), again, [True])
    assert found is None if expected is None else str(found).startswith(expected), found
    assert "output 0 has other values" in str(Spread().widen(outcome(ONE), outcome(NEAR), [False]))


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        ([1.0, -100.0], [1.5, -100.0], (0.5, 100.0)),
        ([1.0, 1.0], [1.0, 1.0], (0.0, 1.0)),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 3.0], (2.0, 1.0)),
        ([math.inf, 1.0], [-math.inf, 1.0], "has a NaN or an infinity at another place"),
        ([math.inf, 1.0], [math.nan, 1.0], "has a NaN or an infinity at another place"),
        ([math.nan, 1.0], [1.0, 1.0], "has a NaN or an infinity at another place"),
        ([math.nan], [math.nan], (0.0, 0.0)),
        ([-0.0], [0.0], (0.0, 0.0)),
        ([1.0], [1.0, 1.0], "has another shape or dtype"),
    ],
)
def test_distance(reference: list[float], other: list[float], expected: tuple[float, float] | str) -> None:
    found = distance(torch.tensor(reference), torch.tensor(other))
    if isinstance(found, Distance):
        assert (found.apart.tolist(), found.magnitude.tolist()) == tuple([each] for each in expected)
    else:
        assert found == expected


@pytest.mark.parametrize("dtype", [torch.bits8, torch.uint4])
def test_values_without_arithmetic_have_no_distance(dtype: torch.dtype) -> None:
    ones, zeros = (torch.full((4,), value, dtype=torch.uint8).view(dtype) for value in (1, 0))
    assert distance(ones, zeros) == "holds other values, of a type that has no arithmetic"


def _summed(terms: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sums over the last dimension, in their own dtype, in an order that is drawn anew for each row."""
    order = torch.rand(terms.shape[0], 1, terms.shape[-1], generator=generator).argsort(-1)
    total = torch.zeros(terms.shape[:2], dtype=terms.dtype)
    for term in terms.gather(-1, order.expand(terms.shape)).unbind(-1):
        total += term
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "terms"), [((300, 64), 3), ((100, 64), 40), ((3000, 8), 12), ((1, 5000), 4)])
def test_a_sum_in_another_order_is_not_refused(dtype: torch.dtype, shape: tuple[int, int], terms: int) -> None:
    generator = torch.Generator().manual_seed(terms)
    scales = torch.exp(2 * torch.randn(shape[0], 1, 1, generator=generator))
    values = (torch.randn(*shape, terms, generator=generator) * scales).to(dtype)
    for _ in range(5):
        reference = _summed(values, generator)
        spread = Spread()
        for _ in range(RUNS[0]):
            assert spread.widen(outcome(reference), outcome(_summed(values, generator)), [True]) is None
        right = outcome(_summed(values, generator))
        assert judge(outcome(reference), right, [True], spread, tolerant=True) is None
        wrong = _summed(values, generator)
        smallest = int(wrong.abs().amax(1).argmin())
        wrong[smallest] = -wrong[smallest]
        refusal = judge(outcome(reference), outcome(wrong), [True], spread, tolerant=True)
        assert refusal is not None, "the smallest row has another sign"
        assert refusal.reason == ODD_REPLAY
