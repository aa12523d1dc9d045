"""Selection: which regions are worth a graph, and what it says of them."""

from __future__ import annotations

import pytest

from pygraph.ir import DETAIL, H200, REASON, SELECTED, Graph
from pygraph.passes import PassContext, PassManager
from tests.passes.build import build

CTX = PassContext("cuda", H200)


def select(graph: Graph, options: str = "") -> list[tuple[bool | None, str | None, str | None]]:
    """(selected, reason, detail) of each region."""
    PassManager(f"partitioning,indirection,selection{options}", check="full").run(graph, CTX)
    metas = [region.meta for region in graph.regions.values()]
    return [(meta.get(SELECTED), meta.get(REASON), meta.get(DETAIL)) for meta in metas]


def chain(launches: int) -> Graph:
    """One region of so many launches, one input, one result."""
    rows = [f"n{i}: launch {f'n{i - 1}' if i else 'x'}" for i in range(launches)]
    return build(*rows, returns=f"n{launches - 1}")


@pytest.mark.parametrize(("launches", "found"), [(1, (False, "too-small")), (2, (True, "gain")), (40, (True, "gain"))])
def test_two_launches_pay(launches: int, found: tuple[bool, str]) -> None:
    assert select(chain(launches)) == [(*found, f"launches before fusion: {launches}, replayed as 1")]


def test_unknown_launches_are_selected() -> None:
    (found,) = select(build("a: unknown x"))
    assert found == (True, "gain", "launches before fusion: an unknown number, replayed as 1")


def test_each_segment_is_a_launch_of_the_replay() -> None:
    assert [row[2] for row in select(build("a: many x", "b: many a", returns="b"))] == [
        "launches before fusion: 80, replayed as 1"
    ]
    assert [row[2] for row in select(build("a: many x", "c: call a", "b: many c", returns="b"))] == [
        "launches before fusion: 80, replayed as 2"
    ]
    assert [row[:2] for row in select(build("a: launch x", "c: call a", "b: launch c", returns="b"))] == [
        (False, "too-small")
    ]
