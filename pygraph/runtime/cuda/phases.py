"""Phases of a captured graph: which of its launches may run side by side, by the edges between its nodes.

A phase is a run of consecutive launches. All of them have completed before the first one of the next phase starts::

    0 ─┬─ 1 ─┬─ 3 ─ 4        phases (0, 1, 1, 2, 3)
       └─ 2 ─┘

Memory that a launch uses is needed all along its phase. Edges stay as captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from pygraph.errors import CaptureError

__all__ = ["Edge", "phases", "phases_of", "without"]

Edge: TypeAlias = tuple[int, int, bytes]
"""The earlier node, the later one, and data of the edge: port, port and type."""

_COMPLETE = bytes((0, 0, 0))
"""Data of an ordinary edge: the later node waits until the earlier one has completed."""

_PROGRAMMATIC = bytes((1, 0, 1))
"""Data of a programmatic dependent launch: the later kernel starts when the earlier one lets it, or ends. It waits by
itself (``griddepcontrol.wait``) until the earlier one has completed, before it touches what others touch as well."""


def phases_of(edges: Collection[Edge], nodes: Sequence[Any], idle: Collection[int] = ()) -> tuple[int, ...]:
    """The phase of each of ``nodes``, which are those of a graph in the order of capture, as in ``Recording.phases``.
    The places ``idle`` are of nodes that use no memory: it does not matter what they run beside, but what they order.

    An edge that waits for less than a kernel's completion, in any other way than a programmatic launch does, orders
    nothing. Raises CaptureError (``unordered-nodes``) when nodes are not listed in an order that their edges allow.
    """
    if idle:
        return _spread(phases_of(*without(edges, nodes, idle)), len(nodes), idle)
    place = {int(handle): index for index, handle in enumerate(nodes)}
    _between(place, edges)
    complete = _between(place, [edge for edge in edges if edge[2][:3] == _COMPLETE])
    early = _between(place, [edge for edge in edges if edge[2][:3] == _PROGRAMMATIC]) - complete
    apart = {(earlier, later) for earlier, later in early if later != earlier + 1}
    return phases(len(place), complete | early, apart)


def without(edges: Collection[Edge], nodes: Sequence[Any], idle: Collection[int]) -> tuple[list[Edge], list[Any]]:
    """The other nodes, and edges in the place of paths by way of those at the places ``idle``."""
    left = list(edges)
    for handle in (int(nodes[index]) for index in idle):
        to = [edge for edge in left if edge[1] == handle]
        onward = [edge for edge in left if edge[0] == handle]
        passed = [(first, last, data) for first, _, data in to for _, last, _ in onward]
        left = [edge for edge in left if handle not in edge[:2]] + passed
    skipped = frozenset(idle)
    return left, [node for index, node in enumerate(nodes) if index not in skipped]


def _spread(found: tuple[int, ...], count: int, idle: Collection[int]) -> tuple[int, ...]:
    """Phases of ``count`` nodes, in which those that are ``idle`` run in that of the one before them."""
    skipped, spread, taken = frozenset(idle), list[int](), 0
    every = found or tuple(range(count - len(skipped)))
    for index in range(count):
        taken += index not in skipped
        spread.append(every[max(taken - 1, 0)] if every else 0)
    return tuple(spread)


def _between(place: Mapping[int, int], edges: Collection[Edge]) -> set[tuple[int, int]]:
    """The (earlier, later) nodes of ``edges``, by their places."""
    pairs = {(place[earlier], place[later]) for earlier, later, _ in edges}
    for earlier, later in pairs:
        if earlier >= later:
            raise CaptureError("unordered-nodes", f"node {later} comes before one that it depends on")
    return pairs


def phases(count: int, edges: Collection[tuple[int, int]], early: Collection[tuple[int, int]] = ()) -> tuple[int, ...]:
    """The phase of each of ``count`` nodes: as many phases as there can be, each a run of consecutive nodes, such that
    every node of one has completed before any of a later one starts. Empty where each node has a phase of its own.

    ``edges`` are distinct (earlier, later), and lead forward. No phase ends between the nodes of an ``early`` edge, of
    which the later one may start, though not complete, before the earlier one has completed.

    A phase ends behind node i when all nodes up to i lie on paths to all behind it. That is so when each of the
    former that leads to none of them (a sink) has an edge to each of the latter that none of them leads to (a source):
    a path from a sink to a source can have no node in between. So three numbers are counted for every i: sinks,
    sources, and edges between the two, which have to be all that there can be. One pass does for all i, as node x is a
    sink from i = x to before its first successor, and y a source from its last predecessor to before i = y.
    """
    successor, predecessor = [count] * count, [-1] * count
    for earlier, later in edges:
        successor[earlier] = min(successor[earlier], later)
        predecessor[later] = max(predecessor[later], earlier)
    sinks = _counts(count, enumerate(successor))
    sources = _counts(count, ((max(before, 0), node) for node, before in enumerate(predecessor)))
    joined = _counts(count, ((predecessor[later], successor[earlier]) for earlier, later in edges))
    counts = zip(sinks, sources, joined, _counts(count, early), strict=True)
    ends = [a * b == both and not waiting for a, b, both, waiting in counts]
    if all(ends[:-1]):
        return ()
    return tuple(accumulate([0, *ends[:-1]]))


def _counts(count: int, spans: Iterable[tuple[int, int]]) -> list[int]:
    """For each of ``count`` places, the number of ``spans`` (begin, end excluded) that it lies in."""
    changes = [0] * (count + 1)
    for begin, end in spans:
        if begin < end:
            changes[begin] += 1
            changes[end] -= 1
    return list(accumulate(changes))[:-1]
