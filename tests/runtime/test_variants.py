"""Keys, signatures, the table of variants; counts, options, and what uses tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.contract import Executable, Slot
from pygraph.runtime.nondeterminism import unrepeatable
from pygraph.runtime.recording import AllocationKind, Output, OutputKind
from pygraph.runtime.slots import written_arguments
from pygraph.runtime.variants import Variant, VariantTable, signature
from tests.runtime.captures import Capture, reads, writes


def test_signatures_hold_the_facts_of_tensors() -> None:
    base = torch.zeros(64)
    same = [base[:4], base[16:20], torch.nn.Parameter(torch.zeros(4))]
    assert len({signature([t], ()) for t in same}) == 1
    others = [base[:5], base[:8:2], base[:4].double(), base[:4].view(2, 2), None, 3]
    assert len({signature([t], ()) for t in [same[0], *others]}) == 7
    assert len({signature([t], (0,)) for t in same[:2]}) == 2
    assert signature([base[1:5]], ()) == signature([base[:4]], ())


def executable() -> Executable:
    return Executable(SimpleNamespace(replay=lambda args: None, close=lambda: None))


def _consistent(table: VariantTable) -> None:
    listed = [variant for variants in table._by_key.values() for variant in variants.values()]
    assert len(listed) == len(set(map(id, listed))) == len(table)
    assert all(table._by_key.values())
    assert {id(v) for v in listed} == {id(v) for v in [*table._captured, *table._tracked]}
    assert all(v.executable is not None for v in table._captured)
    assert all(v.executable is None for v in table._tracked)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["find", "install", "used"]), st.integers(0, 3), st.integers(0, 2))))
def test_the_table_stays_bounded_and_keeps_the_most_recent(steps: list[tuple[str, int, int]]) -> None:
    table = VariantTable(max_captures=2, wanted=1, max_tracked=3)
    recent: list[Variant] = []
    for what, key, facts in steps:
        variant = table.find(key, facts)
        assert variant in table.under(key)
        if what == "install" and variant.executable is None:
            table.install(variant, executable())
            recent.append(variant)
            for gone in recent[:-2]:
                assert (gone.executable, gone.ran, gone.wanted >= 2) == (None, 0, True)
            recent = recent[-2:]
        elif what == "used" and variant.executable is not None:
            table.used(variant)
            recent.remove(variant)
            recent.append(variant)
        assert [v.executable is not None for v in recent] == [True] * len(recent)
        assert table.captured == bool(recent)
        assert len(table) <= 2 + 3
        _consistent(table)
    table.clear()
    assert (len(table), [variant.executable for variant in recent]) == (0, [None] * len(recent))


def test_a_variant_that_was_forgotten_can_still_be_installed() -> None:
    table = VariantTable(max_captures=2, wanted=1, max_tracked=1)
    variant = table.find(1, 1)
    table.find(2, 2)
    assert table.under(1) == ()
    table.install(variant, executable())
    assert table.under(1) == (variant,)
    _consistent(table)


INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
KEYS = [(INPUT, 0), (INPUT, 0), (POOL, 0), (POOL, 1)]
"""What each launch of a chain below only reads."""


def test_written_arguments_are_exact_where_accesses_are_known() -> None:
    capture = Capture()
    capture.launch(1, 2, 3, uses=[reads(0, 8), writes(1, 8)])
    capture.launch(1, uses=[reads(0, 8)])
    slots = [Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, 0), Slot(0, 2, INPUT, 2, 0), Slot(1, 0, INPUT, 3, 0)]
    assert written_arguments(capture.recording(), slots) == {1}
    capture.launch(1)
    assert written_arguments(capture.recording(), [*slots, Slot(2, 0, INPUT, 4, 0)]) == {1, 4}
    pool = Slot(2, 0, AllocationKind.POOL, 0, 0)
    assert written_arguments(capture.recording(), [pool]) == frozenset()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("decides", [0, 1, 2])
def test_what_a_non_deterministic_launch_decides(known: bool, decides: int) -> None:
    """x ▸ first ▸ second, beside x ▸ apart; the last launch writes an argument from second."""
    capture = Capture()
    x, total = capture.input(16), capture.input(16)
    first, second, apart = (capture.pool(16) for _ in range(3))
    chain = [(x, first), (x, apart), (first, second), (second, total)]
    for index, words in enumerate(chain):
        uses = [reads(0, 16), writes(1, 16)] if known else None
        facts = {} if known else {"read_only": frozenset({KEYS[index]})}
        capture.launch(*words, uses=uses, nondeterministic=index == decides, **facts)
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
