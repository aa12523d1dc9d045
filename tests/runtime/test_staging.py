"""Which inputs copies may stand for, and which of those are copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pygraph.runtime import staging
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import CopyCost, Layout, Program, Slot
from pygraph.runtime.recording import AllocationKind, Output, OutputKind
from pygraph.runtime.staging import WATCHED, Copies, Stageable, stageable
from tests.runtime.captures import Capture

COST = CopyCost(patch_us=0.25, copy_us=2.0, most_bytes=1 << 20)
ENOUGH = 9
"""Launches from which a copy takes less of the host's time than the patches."""


def program(*inputs: tuple[int, int], **facts: Any) -> Program:
    """A program whose arguments have so many bytes, and are used by so many launches; by two words of each."""
    capture = Capture()
    words = [capture.input(nbytes) for nbytes, _ in inputs]
    slots = []
    for launch in range(max(count for _, count in inputs)):
        capture.launch(*words, *words)
        used = [i for i, (_, count) in enumerate(inputs) if launch < count]
        slots += [Slot(launch, word, AllocationKind.INPUT, i, 0) for i in used for word in (i, i + len(words))]
    aligned = dict.fromkeys(range(len(inputs)), 16)
    return Program(capture.recording(**facts), tuple(slots), Layout(0, {}, ()), (), aligned)


def positions(found: Sequence[Stageable]) -> list[int]:
    return [each.argument for each in found]


def test_a_copy_has_to_save_more_than_it_costs() -> None:
    made = program((64, ENOUGH), (64, ENOUGH - 1), (64, 4 * ENOUGH))
    found = stageable(made, (), COST)
    assert positions(found) == [2, 0]
    assert found[1] == Stageable(0, 64 + 16, 2.0 / (0.25 * ENOUGH))
    assert stageable(made, (), None) == ()


def test_large_and_empty_inputs_are_left_where_they_are() -> None:
    assert positions(stageable(program((1 << 20, 20), ((1 << 20) + 1, 20), (0, 20)), (), COST)) == [0]


def test_what_a_caller_could_see_is_not_copied() -> None:
    outputs = (Output(OutputKind.ARGUMENT, argument=0), Output(OutputKind.VIEW, argument=1))
    made = program(*[(64, 20)] * 5, outputs=outputs, offset_sensitive=frozenset([2]))
    assert positions(stageable(made, {3}, COST)) == [4]


def test_a_fresh_output_names_no_argument() -> None:
    made = program((64, 20))
    fresh = replace(made, recording=replace(made.recording, outputs=(Output(OutputKind.FRESH, allocation=0),)))
    assert positions(stageable(fresh, (), COST)) == [0]


def test_there_is_a_limit_to_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HELD_LIMIT", 1000)
    made = program((600, 30), (500, 20), (384, 10))
    assert positions(stageable(made, (), COST)) == [0]
    assert positions(stageable(program((600, 30), (500, 20), (368, 10)), (), COST)) == [0, 2]


class _Executable:
    """Counts moves, and says what is staged."""

    def __init__(self, arguments: int) -> None:
        self.counts = [0] * arguments
        self.staged: list[int] = []
        self.available = True

    def moves(self) -> list[int]:
        return list(self.counts)

    def stage(self, arguments: Sequence[int]) -> int | None:
        if not self.available:
            return None
        self.staged = list(arguments)
        return 100 * len(self.staged)


def copies_after(moved: Sequence[int], often: Sequence[float], record: RegionRecord) -> tuple[Copies, _Executable]:
    """Copies that may stand for arguments, which moved so many times in the replays that are watched."""
    executable = _Executable(len(moved))
    copies = Copies(executable, [Stageable(i, 100, part) for i, part in enumerate(often)], record)
    executable.counts = list(moved)
    return copies, executable


def test_an_input_is_copied_if_it_moves_often_enough() -> None:
    copies, executable = copies_after(
        [WATCHED, 1, 0, WATCHED // 2 + 1, WATCHED // 2 + 1], [0.9, 0, 0, 0.4, 0.6], RegionRecord("r")
    )
    assert copies.choose()
    assert copies.switch(True)
    assert executable.staged == [0, 3]


def test_it_is_decided_once() -> None:
    copies, executable = copies_after([1], [0.5], RegionRecord("r"))
    assert not copies.choose()
    executable.counts = [1000]
    assert not copies.choose()
    assert copies.switch(True)
    assert executable.staged == []


def test_what_is_held_is_in_the_record() -> None:
    record = RegionRecord("r")
    first, one = copies_after([WATCHED, WATCHED], [0.5, 0.5], record)
    second, two = copies_after([WATCHED], [0.5], record)
    for each in (first, second):
        assert each.choose()
        assert each.switch(True)
    assert (record.staged_bytes, one.staged, two.staged) == (300, [0, 1], [0])
    assert first.switch(False)
    assert (record.staged_bytes, one.staged) == (100, [])
    second.close()
    assert record.staged_bytes == 0


def test_a_switch_that_is_refused_changes_nothing() -> None:
    record = RegionRecord("r")
    copies, executable = copies_after([WATCHED], [0.5], record)
    assert copies.choose()
    executable.available = False
    assert not copies.switch(True)
    assert (copies.on, record.staged_bytes) == (False, 0)
    executable.available = True
    assert copies.switch(True)
    executable.available = False
    assert not copies.switch(False)
    assert (copies.on, record.staged_bytes) == (True, 100)


def test_beyond_the_limit_nothing_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    record = RegionRecord("r")
    copies, executable = copies_after([WATCHED], [0.5], record)
    assert copies.choose()
    record.staged_bytes = staging.HELD_LIMIT - 99
    assert not copies.switch(True)
    record.staged_bytes = staging.HELD_LIMIT - 100
    assert copies.switch(True)
    assert executable.staged == [0]
