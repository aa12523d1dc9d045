"""Operators that turn out to be impossible to capture only when it is tried: named, and cut by the next compilation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir import parse
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
def test_the_operator_is_named_and_the_next_compilation_cuts_there(
    fn: Callable[..., Any], op: str, mark: str, reason: str
) -> None:
    run(fn)
    (region,) = only().regions
    assert region.state == "uncaptured"
    assert region.record is not None
    refusal = region.record.refusals[reason]
    assert refusal.launch == op
    assert str(refusal.loc).endswith(place(mark))
    assert place(mark) in region.why
    assert any(place(mark) in note for note in only().notes)

    run(fn)
    report = only()
    assert states(report) == ["replay", "replay"]
    assert report.emitted is not None
    assert report.emitted.outside
    assert all("pygraphfails" in kernel for kernel in report.emitted.outside)
    (left,) = [u for u in report.uncaptured() if u.reason == "failed-capture"]
    assert str(left.loc).endswith(place(mark))
    assert reason in left.detail


def test_the_uncaptured_operator_runs_once_a_call() -> None:
    runs: list[int] = []

    @torch.library.custom_op("quantized::pygraphfails_counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + 1

    counted.register_fake(failing.compiling_only)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(counted(torch.relu(x @ w)) @ w)

    run(fn)
    again()
    ours = compiled(fn)
    for seed in range(CALLS):
        runs.clear()
        with torch.no_grad():
            ours(inputs(seed=seed), weight())
        assert len(runs) == 1
    assert states(only()) == ["replay", "replay"]


def test_explain_names_the_operator_the_reason_and_the_line() -> None:
    with torch.no_grad():
        text = " ".join(str(pygraph.explain(one, inputs(), weight())).split())
    assert "quantized.pygraphfails_double" in text
    assert "capture-failed" in text
    assert place("the line of double") in text


def test_an_operator_that_fails_in_each_layer_is_cut_in_all_at_once() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(double(torch.relu(x @ w)) @ w)
        return x

    run(layers)
    run(layers)
    assert states(only()) == ["replay"] * 4
    assert [u.reason for u in only().uncaptured()] == ["failed-capture"] * 3


def test_training_is_cut_in_forward_and_backward() -> None:
    for _ in range(2):
        again()
        ours, w, plain = compiled(one), weight(True), weight(True)
        for seed in range(CALLS):
            x = inputs(seed=seed)
            w.grad = plain.grad = None
            ours(x, w).square().mean().backward()
            one(x, plain).square().mean().backward()
            torch.testing.assert_close(w.grad, plain.grad)
    forward, backward = pygraph.reports()
    assert states(forward) == states(backward) == ["replay"] * 2
    assert "double_backward" in next(u.op for u in backward.uncaptured())


def test_a_recompilation_for_other_sizes_is_cut() -> None:
    ours, w = compiled(one), weight()
    for rows in (8, 8, 8, 12, 12, 12, 5, 5, 5):
        check(ours, one, inputs(rows), w)
    first, second = pygraph.reports()
    assert states(first) == ["uncaptured"]
    assert states(second) == ["replay", "replay"]
    assert {region.record.captures for region in second.regions if region.record} == {2}


def test_operators_that_fail_one_after_the_other_are_all_remembered() -> None:
    for _ in range(3):
        run(two)
    left = [(u.op, u.reason) for u in only().uncaptured()]
    assert left == [(f"quantized.pygraphfails_{name}.default", "failed-capture") for name in ("double", "triple")]
    assert states(only()) == ["replay"] * 3


def test_strict_raises_each_time() -> None:
    for _ in range(2):
        again()
        ours, w = compiled(one, options={"strict": True}), weight()
        with torch.no_grad():
            ours(inputs(), w)
            with pytest.raises(Exception, match=r"capture-failed.*pygraphfails_double"):
                ours(inputs(), w)


def test_a_call_that_raises_uncaptured_too_is_no_operators_fault() -> None:
    @torch.library.custom_op("quantized::pygraphfails_picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x * 2

    picky.register_fake(failing.compiling_only)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(picky(x)) + 1

    good = inputs().abs()
    again()
    ours = compiled(fn)
    with torch.no_grad():
        ours(good)
        with pytest.raises(ValueError, match="negative"):
            ours(-good)
    again()
    ours = compiled(fn)
    with torch.no_grad():
        ours(good)
    assert list(only().uncaptured()) == []


def test_other_lines_are_another_program() -> None:
    run(one)
    run(lambda x, w: one(x, w) * 1.0)
    assert states(only()) == ["uncaptured"]


@pytest.mark.parametrize("folder", [None, "unwritable"])
def test_without_files_the_process_remembers(folder: str | None, tmp_path: Path) -> None:
    if folder is not None:
        (tmp_path / folder).write_text("a file, not a folder")
        folder = str(tmp_path / folder)
    run(one, options={"cache_dir": folder})
    run(one, options={"cache_dir": folder})
    assert states(only()) == ["replay", "replay"]


@pytest.mark.parametrize("damage", ["[]", "{", '{"inference": 1}', '{"inference": {"relu": 1}}'])
def test_a_damaged_file_is_nothing_known(damage: str, tmp_path: Path) -> None:
    run(one, options={"cache_dir": str(tmp_path)})
    (file,) = (tmp_path / "failures").iterdir()
    kept = file.read_text()
    file.write_text(damage)
    run(one, options={"cache_dir": str(tmp_path)})
    assert states(only()) == ["uncaptured"]
    assert only().error is None
    assert file.read_text() == kept


def test_dumps_show_what_was_tried_and_parse(tmp_path: Path) -> None:
    run(one)
    run(one, options={"dump_dir": str(tmp_path)})
    folder = tmp_path / only().name
    text = (folder / "01-legality.pgir").read_text()
    assert 'reason = "failed-capture"' in text
    assert "only while compiling" in text
    assert str(parse(text)) == text
    assert Path(failing.__file__).name in (folder / "region0.launches.txt").read_text(), (
        "a launch names the user's line"
    )
