"""Keys, signatures and the bounded table of variants."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.provenance import Refusal
from pygraph.runtime.variants import ScalarKey, Variant, VariantTable, signature


def test_keys_hold_scalars_by_type_and_bits() -> None:
    args: list[Any] = [torch.ones(2), 3, None, True, 0.0]
    key = ScalarKey(args)
    assert not key.plain
    assert key.of(args) == key.of([None, 3, 5, True, 0.0])
    others = ([args[0], 3, None, 1, 0.0], [args[0], 3, None, True, -0.0], [args[0], 4, None, True, 0.0])
    assert key.of(args) not in [key.of(other) for other in others]
    assert ScalarKey([torch.ones(2), 3, True]).plain
    assert ScalarKey([torch.ones(2)]).of([torch.ones(2)]) == ()


def test_signatures_hold_the_facts_of_tensors() -> None:
    base = torch.zeros(64)
    same = [base[:4], base[16:20], torch.nn.Parameter(torch.zeros(4))]
    assert len({signature([t], ()) for t in same}) == 1
    others = [base[:5], base[:8:2], base[:4].double(), base[:4].view(2, 2), None, 3]
    assert len({signature([t], ()) for t in [same[0], *others]}) == 7
    assert len({signature([t], (0,)) for t in same[:2]}) == 2
    assert signature([base[1:5]], ()) == signature([base[:4]], ())


def test_signatures_refuse_what_is_no_plain_tensor() -> None:
    class Other(torch.Tensor):
        pass

    for odd in (torch.ones(2).as_subclass(Other), "text", torch.ones(2, 2).to_sparse(), torch._neg_view(torch.ones(2))):
        refusal = signature([1, odd], ())
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "argument-type"


class _Executable:
    def __init__(self, name: int) -> None:
        self.name = name

    def replay(self, args: list[Any]) -> list[Any] | None:
        return None

    def close(self) -> None:
        pass


def _consistent(table: VariantTable) -> None:
    listed = [variant for variants in table._by_key.values() for variant in variants.values()]
    assert len(listed) == len(set(map(id, listed))) == len(table)
    assert all(table._by_key.values())
    assert {id(v) for v in listed} == {id(v) for v in [*table._captured.values(), *table._tracked.values()]}
    assert all(v.executable is not None for v in table._captured.values())
    assert all(v.executable is None for v in table._tracked.values())


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["find", "install", "used"]), st.integers(0, 3), st.integers(0, 2))))
def test_the_table_stays_bounded_and_keeps_the_most_recent(steps: list[tuple[str, int, int]]) -> None:
    table = VariantTable(max_captures=2, wanted=1, max_tracked=3)
    recent: list[Variant] = []
    for number, (what, key, facts) in enumerate(steps):
        variant = table.find(key, facts)
        assert variant in table.under(key)
        if what == "install" and variant.executable is None:
            evicted = table.install(variant, _Executable(number))
            recent.append(variant)
            assert len(evicted) == max(0, len(recent) - 2)
            for gone in recent[:-2]:
                assert (gone.executable, gone.ran, gone.wanted >= 2) == (None, 0, True)
            recent = recent[-2:]
        elif what == "used" and variant.executable is not None:
            table.used(variant)
            recent.remove(variant)
            recent.append(variant)
        assert [v.executable is not None for v in recent] == [True] * len(recent)
        assert table.captured == len(recent)
        assert len(table) <= 2 + 3
        _consistent(table)
    assert len(table.clear()) == len(recent)
    assert len(table) == 0


def test_a_variant_that_was_forgotten_can_still_be_installed() -> None:
    table = VariantTable(max_captures=2, wanted=1, max_tracked=1)
    variant = table.find(1, 1)
    table.find(2, 2)
    assert table.under(1) == ()
    assert table.install(variant, _Executable(0)) == []
    assert table.under(1) == (variant,)
    _consistent(table)


def test_a_variant_is_due_after_it_ran() -> None:
    variant = VariantTable(1, wanted=2).find(1, 1)
    assert not variant.due
    variant.ran = 2
    assert variant.due
    variant.refusal = Refusal("no")
    assert not variant.due
