"""Eager calls among the nodes of a captured graph: numbers, phases and births count them, too."""

from __future__ import annotations

from typing import Any

import pytest

from pygraph.program.recording import UNKNOWN, Allocation, AllocationKind, EagerCall, Launch, LaunchKind
from pygraph.runtime.cuda.nodes import FillNode
from pygraph.runtime.cuda.spans import EagerSpan, with_eager


def span(begin: int, pieces: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> EagerSpan:
    eager = EagerCall("lib.op.default", None, (0,), (), ())
    return EagerSpan(begin, pieces, eager, (*reads, *writes), reads, writes, ("lib.op.default",), True, UNKNOWN)


def merged(count: int, phases: tuple[int, ...], calls: list[EagerSpan], births: tuple[int, ...] = ()) -> Any:
    launches = [Launch(i, LaunchKind.KERNEL, f"k{i}", (), ()) for i in range(count)]
    nodes = [FillNode(100 + i) for i in range(count)]
    pool = [Allocation(AllocationKind.POOL, i, 0x1000 * (i + 1), 64, born) for i, born in enumerate(births)]
    given = Allocation(AllocationKind.INPUT, 0, 0x100000, 64)
    return with_eager(launches, nodes, phases, [given, *pool], calls)


@pytest.mark.parametrize(
    ("phases", "begins", "names", "expected"),
    [
        ((), [], "k0 k1 k2", ()),
        ((), [1], "k0 call k1 k2", ()),
        ((0, 0, 1), [], "k0 k1 k2", (0, 0, 1)),
        # what may run side by side does not, with a call in between
        ((0, 0, 0), [1], "k0 call k1 k2", (0, 1, 2, 2)),
        ((0, 0, 1), [2], "k0 k1 call k2", (0, 0, 1, 2)),
        ((0, 0, 1), [0, 3, 3], "call k0 k1 k2 call call", (0, 1, 1, 2, 3, 4)),
    ],
)
def test_launches_and_phases(phases: tuple[int, ...], begins: list[int], names: str, expected: tuple[int, ...]) -> None:
    found = merged(3, phases, [span(begin, 0) for begin in begins])
    told = ["call" if launch.eager is not None else launch.name for launch in found.launches]
    assert " ".join(told) == names
    assert [launch.index for launch in found.launches] == list(range(len(told)))
    assert [node is None for node in found.nodes] == [name == "call" for name in told]
    assert [node.handle for node in found.nodes if node is not None] == [100, 101, 102]
    assert found.phases == expected


def test_allocations_are_born_before_the_launch_that_uses_them_first() -> None:
    """Two before the first call, which returns the third; one behind it, and the second call returns the last."""
    found = merged(2, (), [span(1, 3), span(1, 5)], births=(0, 1, 1, 1, 1))
    assert [a.born for a in found.allocations if a.kind is AllocationKind.POOL] == [0, 1, 1, 2, 2]
    assert [launch.kind for launch in found.launches] == [
        LaunchKind.KERNEL,
        LaunchKind.EAGER,
        LaunchKind.EAGER,
        LaunchKind.KERNEL,
    ]


def test_what_a_call_only_reads_is_known() -> None:
    found = merged(1, (), [span(1, 2, reads=(0x1000, 0x2000), writes=(0x2000, 0x100000))], births=(0, 0))
    call = found.launches[1]
    owners = {0: (AllocationKind.POOL, 0), 1: (AllocationKind.POOL, 1), 3: (AllocationKind.INPUT, 0)}
    assert {word: call.may_write(word, owner) for word, owner in owners.items()} == {0: False, 1: True, 3: True}
