"""Counts, options, refusals and effects."""

from __future__ import annotations

import threading

import pytest

from pygraph.errors import CaptureError, OptionError
from pygraph.runtime import counters
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.discover import outside, written_arguments
from pygraph.runtime.driver import Slot
from pygraph.runtime.nondeterminism import unrepeatable
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import AllocationKind, Output, OutputKind
from pygraph.runtime.region import RegionOptions
from tests.runtime.captures import Capture, reads, writes

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
KEYS = [(INPUT, 0), (INPUT, 0), (POOL, 0), (POOL, 1)]
"""What each launch of a chain below only reads."""


def test_counts_from_many_threads_add_up() -> None:
    counters.reset()
    record = RegionRecord("toy")

    def work() -> None:
        for _ in range(500):
            record.tally("replays").hit()
            counters.REPLAYS.hit()
            counters.add("captures")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.counters() == {"captures": 2000, "replays": 2000}
    assert (record.replays, record.uncaptured) == (2000, 0)
    counters.reset()
    assert counters.counters() == {}
    assert record.replays == 2000


def test_records_are_plain_data() -> None:
    record = RegionRecord("toy", replays=7)
    assert record.replays == 7
    record.tally("replays").hit()
    record.uncaptured = 3
    assert (record.replays, record.uncaptured) == (8, 3)
    assert "replays=8, uncaptured=3" in repr(record)
    assert RegionRecord("toy") == RegionRecord("toy") != record


@pytest.mark.parametrize("values", [{"capture_after": 1}, {"max_captures": 0}])
def test_options_out_of_range(values: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        RegionOptions(**values)  # type: ignore[arg-type]


def test_refusals_keep_text_only() -> None:
    assert str(Refusal.of(CaptureError("host-read", "item"))) == "host-read: item"
    assert Refusal.of(ValueError("x")) == Refusal("capture-raised", "ValueError: x")
    assert str(Refusal("a", "b", "mm", "m.py:3")) == "a: b [mm at m.py:3]"
    assert str(Refusal("a")) == "a"


def test_written_arguments_are_exact_where_accesses_are_known() -> None:
    capture = Capture()
    capture.launch(1, 2, 3, accesses=[reads(0, 8), writes(1, 8)])
    capture.launch(1, accesses=[reads(0, 8)])
    slots = [Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, 0), Slot(0, 2, INPUT, 2, 0), Slot(1, 0, INPUT, 3, 0)]
    assert written_arguments(capture.recording(), slots) == {1}
    capture.launch(1)
    assert written_arguments(capture.recording(), [*slots, Slot(2, 0, INPUT, 4, 0)]) == {1, 4}
    pool = Slot(2, 0, AllocationKind.POOL, 0, 0)
    assert written_arguments(capture.recording(), [pool]) == frozenset()


@pytest.mark.parametrize(
    ("offset", "start", "nbytes", "inside"),
    [(0, 0, 64, True), (8, 0, 56, True), (8, 0, 57, False), (8, -8, 8, True), (0, -1, 1, False), (64, 0, 0, True)],
)
def test_accesses_outside_of_their_allocation(offset: int, start: int, nbytes: int, inside: bool) -> None:
    capture = Capture()
    capture.input(64)
    capture.launch(0, name="mm", accesses=[reads(0, nbytes, start)])
    refusal = outside(capture.recording(), [Slot(0, 0, INPUT, 0, offset)])
    assert (refusal is None) is inside
    assert refusal is None or (refusal.reason, refusal.launch) == ("outside-allocation", "mm")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("decides", [0, 1, 2])
def test_what_a_non_deterministic_launch_decides(known: bool, decides: int) -> None:
    """x ▸ first ▸ second, beside x ▸ apart; the last launch writes an argument from second."""
    capture = Capture()
    x, total = capture.input(16), capture.input(16)
    first, second, apart = (capture.pool(16) for _ in range(3))
    chain = [(x, first), (x, apart), (first, second), (second, total)]
    for index, words in enumerate(chain):
        accesses = [reads(0, 16), writes(1, 16)] if known else None
        facts = {} if known else {"read_only": frozenset({KEYS[index]})}
        capture.launch(*words, accesses=accesses, nondeterministic=index == decides, **facts)
    recording = capture.recording()
    keys = {x: (INPUT, 0), total: (INPUT, 1), first: (POOL, 0), second: (POOL, 1), apart: (POOL, 2)}
    slots = [Slot(i, w, *keys[word], 0) for i, words in enumerate(chain) for w, word in enumerate(words)]
    decided = unrepeatable(recording, slots)
    found = [decided(Output(OutputKind.FRESH, allocation=index)) for index in range(3)]
    expected = {0: [True, True, False], 1: [False, False, True], 2: [False, True, False]}
    assert found == expected[decides]
    assert [decided(0), decided(1)] == [False, decides != 1]
    assert decided(Output(OutputKind.VIEW, argument=1)) == (decides != 1)
    assert not decided(Output(OutputKind.SCALAR, value=3))


def test_without_such_a_launch_everything_repeats_itself() -> None:
    capture = Capture()
    capture.launch(capture.input(16), capture.pool(16))
    decided = unrepeatable(capture.recording(), [Slot(0, 0, INPUT, 0, 0), Slot(0, 1, POOL, 0, 0)])
    assert not decided(0)
    assert not decided(Output(OutputKind.FRESH, allocation=0))
