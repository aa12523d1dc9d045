"""Slots known from one size, found again in the single capture of another."""

from __future__ import annotations

from dataclasses import replace

from pygraph.runtime.contract import Slot
from pygraph.runtime.recording import Allocation, AllocationKind
from pygraph.runtime.slots import SlotTable, discover, resolve
from tests.runtime.captures import Capture

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
WEIGHTS = 0x5500_0000_0000
ELSEWHERE = 0x6600_0000_0000


def _sized(base: int, n: int, *extra: int) -> Capture:
    capture = Capture(base)
    x = capture.input(8 * n)
    y = capture.pool(8 * n)
    capture.launch(x + 4 * n, y, n, *extra)
    return capture


def _table(*extra: int) -> SlotTable:
    table = discover(_sized(ELSEWHERE, 8, *extra).recording(), _sized(WEIGHTS, 8, *extra).recording())
    assert isinstance(table, SlotTable)
    return table


def test_slots_are_found_again_at_another_size() -> None:
    again = resolve(_sized(0x7F00_0000_0000, 32).recording(), _table())
    assert again is not None
    assert again.slots == (Slot(0, 0, INPUT, 0, 128), Slot(0, 1, POOL, 0, 0))


def test_another_launch_sequence_is_not_resolved() -> None:
    other = _sized(0x7F00_0000_0000, 32)
    other.launch(1)
    assert resolve(other.recording(), _table()) is None
    renamed = _sized(0x7F00_0000_0000, 32)
    renamed.launches[0] = replace(renamed.launches[0], name="other")
    assert resolve(renamed.recording(), _table()) is None


def test_other_phasesare_not_resolved() -> None:
    again = _sized(0x7F00_0000_0000, 32).recording()
    table = replace(_table(), phases=(0,))
    assert resolve(again, table) is None
    found = resolve(replace(again, phases=(0,)), table)
    assert found is not None
    assert found.phases == (0,)


def test_a_number_that_became_an_address_is_not_resolved() -> None:
    capture = _sized(0x7F00_0000_0000, 32, 0x7F00_0000_0000 + 4)
    assert resolve(capture.recording(), _table(0)) is None
    real = [Allocation(INPUT, 0, 0x3000, 64)]
    number = _sized(0x7F00_0000_0000, 32, 0x3004).recording()
    assert resolve(number, _table(0)) is not None
    assert resolve(number, _table(0), real) is None


def test_an_address_that_became_a_number_or_anothers_is_not_resolved() -> None:
    for word in (5, 0x7F00_0000_0000):
        capture = _sized(0x7F00_0000_0000, 32)
        first, _, *rest = capture.launches[0].words
        capture.launches[0] = replace(capture.launches[0], words=(first, word, *rest))
        assert resolve(capture.recording(), _table()) is None
