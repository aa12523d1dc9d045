"""Custom operators that are written in Python, and launches that come out otherwise each time, on a device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.program.program import Program
from pygraph.report.model import GraphReport
from pygraph.runtime.contract import Driver
from pygraph.runtime.nondeterminism import unrepeatable
from pygraph.runtime.region import Region

pytestmark = pytest.mark.usefixtures("fresh")

CALLS = 8
_runs: list[int] = []


def _counted(x: torch.Tensor) -> torch.Tensor:
    _runs.append(1)
    return x + len(_runs)


def _toggled(x: torch.Tensor) -> torch.Tensor:
    """Repeats itself in every second run."""
    _runs.append(1)
    return x + len(_runs) % 2


def _by_chance(x: torch.Tensor) -> torch.Tensor:
    _runs.append(1)
    return x * random.random()


def _pure(x: torch.Tensor) -> torch.Tensor:
    _runs.append(1)
    return torch.relu(x) * 2


def _added(x: torch.Tensor) -> torch.Tensor:
    _runs.append(1)
    return x.new_zeros(8, x.shape[1]).index_add_(0, torch.arange(x.shape[0], device=x.device) % 8, x)


def _define(name: str, body: Callable[[torch.Tensor], torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    op = torch.library.custom_op(f"pygraphgpucustom::{name}", body, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(fake)
    return op


OPERATORS = {
    name: _define(name, body, lambda x: torch.empty_like(x))
    for name, body in {"counted": _counted, "toggled": _toggled, "by_chance": _by_chance, "pure": _pure}.items()
}
added = _define("added", _added, lambda x: x.new_empty(8, x.shape[1]))


def program(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, w: torch.relu(op(torch.relu(x @ w)) @ w).sum(0)


def compiled(op: Any) -> Callable[..., torch.Tensor]:
    _runs.clear()
    return torch.compile(program(op), backend="pygraph")


def report() -> GraphReport:
    (found,) = pygraph.reports()
    return found


def again() -> None:
    """Forget all compilations: the next program is compiled anew."""
    torch._dynamo.reset()
    pygraph.reset()


def called() -> list[tuple[str, int]]:
    """The operators that the only region calls between its segments, each with its calls in a replay."""
    (region,) = report().regions
    assert region.record is not None
    return [(call.operator, call.count) for call in region.record.eager]


def test_a_counter_is_named_and_called_by_each_replay() -> None:
    def counting(x: torch.Tensor) -> torch.Tensor:
        return OPERATORS["counted"](x) * 1.0

    ours = torch.compile(counting, backend="pygraph")
    _runs.clear()
    found = [float(ours(torch.zeros(4, device="cuda"))[0]) for _ in range(CALLS)]
    assert found == [1, 4, 5, 6, 7, 8, 9, 10], "captures ran the body twice more"
    assert called() == [("pygraphgpucustom.counted.default", 1)], report().regions
    (region,) = report().regions
    assert region.record is not None
    assert "unstable-number" in region.record.eager_since["pygraphgpucustom.counted"]
    assert region.record.python_runs == {"pygraphgpucustom.counted.default": 2}


@pytest.mark.parametrize("name", ["counted", "toggled", "by_chance"])
def test_what_does_not_repeat_itself_is_called_and_the_rest_is_replayed(name: str) -> None:
    w = torch.randn(64, 64, device="cuda") / 8
    ours = compiled(OPERATORS[name])
    for _ in range(6):  # what repeats itself in two captures is found out by the comparison
        ours(torch.randn(32, 64, device="cuda"), w)
    for call in range(CALLS):
        x = torch.randn(32, 64, device="cuda")
        random.seed(call)
        before, state = len(_runs), random.getstate()
        got = ours(x, w)
        assert len(_runs) == before + 1, f"call {call}"
        del _runs[before:]
        random.setstate(state)
        torch.testing.assert_close(got, program(OPERATORS[name])(x, w), msg=lambda text, call=call: f"{call}: {text}")
        del _runs[before + 1 :]
    assert [region.state for region in report().regions] == ["replay"], report().notes
    assert called() == [(f"pygraphgpucustom.{name}.default", 1)]


def test_a_function_of_its_operands_is_replayed_and_its_runs_are_told() -> None:
    ours = compiled(OPERATORS["pure"])
    w = torch.randn(64, 64, device="cuda") / 8
    for _ in range(CALLS):
        x = torch.randn(32, 64, device="cuda")
        got, ran = ours(x, w), len(_runs)
        torch.testing.assert_close(got, program(OPERATORS["pure"])(x, w))
        del _runs[ran:]
    (region,) = report().regions
    assert region.record is not None
    assert region.state == "replay", report().notes
    assert region.record.python_runs == {"pygraphgpucustom.pure.default": len(_runs) - region.record.uncaptured}
    assert len(_runs) <= 2 + region.record.uncaptured


def sums(args: list[Any]) -> list[Any]:
    """One result that atomic additions decide, and two that they do not."""
    x, index = args
    out = torch.zeros(4, x.shape[1], device="cuda").index_add_(0, index, x)
    return [out * 2, torch.relu(x), x.sum(1)]


def _args() -> list[Any]:
    return [torch.randn(20000, 64, device="cuda"), torch.randint(0, 4, (20000,), device="cuda")]


@pytest.mark.parametrize(("fn", "decides"), [(sums, [True, False, False]), (lambda args: [added(args[0])], [True])])
def test_atomic_sums_are_held_to_their_spread_and_what_they_do_not_decide_to_its_bits(
    driver: Driver, fn: Callable[[list[Any]], list[Any]], decides: list[bool]
) -> None:
    args, programs = _args(), list[Program]()
    assert len({float(fn(list(args))[0].double().sum()) for _ in range(20)}) > 1, "repeats itself: nothing is tested"
    region = Region(fn, driver, name="toy", on_capture=programs.append)
    for _ in range(4):
        region(list(args))
    assert region.record.replays == 2, region.record
    (program,) = programs
    decided = unrepeatable(program.recording, program.slots)
    assert [program.recording.owner(output) in decided for output in program.recording.outputs] == decides


def test_inductors_own_atomic_kernels_are_known() -> None:
    def scatter(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, x.shape[1], device="cuda").index_add(0, index, x) * 2

    ours = torch.compile(scatter, backend="pygraph")
    args = _args()
    for _ in range(4):
        torch.testing.assert_close(ours(*args), scatter(*args), rtol=1e-3, atol=1e-2)
    assert [region.state for region in report().regions] == ["replay"], [r.why for r in report().regions]
