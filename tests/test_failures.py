"""Operators that turn out to be impossible to capture only when it is tried: named, and called by each replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir import parse_graph
from tests import failing
from tests.failing import (
    CALLS,
    again,
    check,
    compiled,
    double,
    in_place,
    inputs,
    one,
    only,
    place,
    shared,
    states,
    two,
    weight,
)

pytestmark = pytest.mark.usefixtures("fresh")


def run(fn: Callable[..., Any], **settings: Any) -> None:
    """Compile ``fn`` anew, and hold some calls of it against eager."""
    again()
    ours, w = compiled(fn, **settings), weight()
    for seed in range(CALLS):
        check(ours, fn, inputs(seed=seed), w)


@pytest.mark.parametrize(
    ("fn", "op", "mark", "reason"),
    [
        (one, "quantized.pygraphfails_double.default", "the line of double", "capture-failed"),
        (in_place, "quantized.pygraphfails_add_into.default", "the line of add_into", "capture-failed"),
        (shared, "quantized.pygraphfails_spread.default", "the line of spread", "aliasing-operator"),
    ],
)
def test_the_operator_is_named_and_called_by_the_same_capture(
    fn: Callable[..., Any], op: str, mark: str, reason: str
) -> None:
    run(fn)
    (region,) = only().regions
    assert region.state == "replay"
    assert region.record is not None
    assert (region.record.captures, region.record.uncaptured) == (1, 2), "no call more runs uncaptured than else"
    refusal = region.record.refusals[reason]
    assert refusal.launch == op
    assert str(refusal.loc).endswith(place(mark))
    (called,) = region.record.eager
    assert (called.operator, called.count, region.record.segments) == (op, 1, 2)
    assert str(called.loc).endswith(place(mark))
    assert only().emitted is not None
    assert only().emitted.outside == ()


def test_the_operator_runs_once_a_call() -> None:
    runs: list[int] = []

    @torch.library.custom_op("quantized::pygraphfails_counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + 1

    counted.register_fake(lambda x: failing.fails_once(x, "counted"))

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(counted(torch.relu(x @ w)) @ w)

    again()
    ours = compiled(fn)
    for seed in range(CALLS):
        runs.clear()
        with torch.no_grad():
            ours(inputs(seed=seed), weight())
        assert len(runs) == 1
    assert states(only()) == ["replay"]


def test_explain_names_the_operator_the_reason_and_the_line() -> None:
    again()
    with torch.no_grad():
        text = " ".join(str(pygraph.explain(one, inputs(), weight())).split())
    assert "eager call: quantized.pygraphfails_double.default" in text
    assert "capture-failed" in text
    assert place("the line of double") in text


def test_an_operator_that_fails_in_each_layer_is_called_in_all_at_once() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(double(torch.relu(x @ w)) @ w)
        return x

    run(layers)
    assert states(only()) == ["replay"]
    record = only().regions[0].record
    assert record is not None
    assert ([call.count for call in record.eager], record.segments) == ([3], 4)


def test_training_calls_it_in_forward_and_backward() -> None:
    again()
    ours, w, plain = compiled(one), weight(True), weight(True)
    for seed in range(CALLS):
        x = inputs(seed=seed)
        w.grad = plain.grad = None
        ours(x, w).square().mean().backward()
        one(x, plain).square().mean().backward()
        torch.testing.assert_close(w.grad, plain.grad)
    for report in pygraph.reports():
        assert states(report) == ["replay"]
    found = [call.operator for report in pygraph.reports() for region in report.regions for call in region.record.eager]
    assert found == [f"quantized.pygraphfails_double{name}.default" for name in ("", "_backward")]


def test_other_sizes_are_captured_with_what_is_known() -> None:
    again()
    ours, w = compiled(one), weight()
    for rows in (8, 8, 8, 12, 12, 12, 5, 5, 5):
        check(ours, one, inputs(rows), w)
    first, second = pygraph.reports()
    assert states(first) == states(second) == ["replay"]
    assert {region.record.captures for region in second.regions if region.record} == {2}


def test_operators_that_fail_one_after_the_other_are_all_called() -> None:
    run(two)
    record = only().regions[0].record
    assert record is not None
    names = [f"quantized.pygraphfails_{name}" for name in ("double", "triple")]
    assert list(record.eager_since) == names
    assert [call.operator for call in record.eager] == [f"{name}.default" for name in names]
    assert states(only()) == ["replay"]


def test_an_operator_that_fails_as_an_eager_call_too_leaves_the_region_uncaptured() -> None:
    @torch.library.custom_op("quantized::pygraphfails_unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(unknown(torch.relu(x @ w)) @ w)

    def never(x: torch.Tensor) -> torch.Tensor:
        if failing.compat.TracingContext.try_get() is None:
            raise RuntimeError("never while capturing")
        return torch.empty_like(x)

    unknown.register_fake(never)
    run(fn)
    assert states(only()) == ["uncaptured"]
    assert "never while capturing" in only().regions[0].why


def test_strict_raises_each_time() -> None:
    for _ in range(2):
        again()
        ours, w = compiled(one, options={"strict": True}), weight()
        calls = (ours(inputs(), w) for _ in range(2))  # the first one is captured, too, where its program is known
        with torch.no_grad(), pytest.raises(Exception, match=r"capture-failed.*pygraphfails_double"):
            list(calls)


def test_what_the_operator_raises_reaches_the_caller_and_later_calls_are_replayed() -> None:
    @torch.library.custom_op("quantized::pygraphfails_picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x * 2

    picky.register_fake(lambda x: failing.fails_once(x, "picky"))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(picky(torch.tanh(x))) + 1

    good = inputs().abs()
    again()
    ours = compiled(fn)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(CALLS):
                torch.testing.assert_close(ours(good), fn(good))
            with pytest.raises(ValueError, match="negative"):
                ours(-good)
    assert states(only()) == ["replay"]


def test_dumps_show_what_is_called(tmp_path: Path) -> None:
    run(one, options={"dump_dir": str(tmp_path)})
    folder = tmp_path / only().name
    text = (folder / "01-legality.pgir").read_text()
    assert str(parse_graph(text)) == text
    launches = (folder / "region0" / "04-segments.pgir").read_text()
    assert 'eager "quantized.pygraphfails_double.default"' in launches
    assert Path(failing.__file__).name in launches, "a launch names the user's line"
