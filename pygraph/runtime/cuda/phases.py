"""Phases of a captured graph: groups of launches that may run in parallel, by the edges between its nodes.

A phase is a run of consecutive launches. All of them have completed before the first one of the next phase starts::

    0 ─┬─ 1 ─┬─ 3 ─ 4        phases (0, 1, 1, 2, 3)
       └─ 2 ─┘

Memory that a launch uses is needed for all of its phase. Edges stay as captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from pygraph.errors import CaptureError

__all__ = ["Edge", "phases", "phases_of", "without"]

Edge: TypeAlias = tuple[int, int, bytes]
"""Earlier node, later node, and the edge's data: port of each node, and type."""

_COMPLETE = bytes((0, 0, 0))
"""Data of an ordinary edge: the later node waits until the earlier one has completed."""

_PROGRAMMATIC = bytes((1, 0, 1))
"""Data of a programmatic dependent launch: the later kernel starts when the earlier one allows it, or ends. It waits
itself (``griddepcontrol.wait``) until the earlier one has completed, before it touches memory that others use, too."""


def phases_of(edges: Collection[Edge], nodes: Sequence[Any], idle: Collection[int] = ()) -> tuple[int, ...]:
    """The phase of each of ``nodes``, all nodes of a graph in the order of capture, as in ``Recording.phases``.
    ``idle`` are positions of nodes that use no memory: their own phase is irrelevant, but not what they order.

    An edge that waits for less than a kernel's completion orders nothing, except that of a programmatic launch. Raises
    CaptureError (``unordered-nodes``) if an edge contradicts the order of ``nodes``.
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
    """Edges and nodes without the nodes at the positions ``idle``; edges replace the paths through these."""
    left = list(edges)
    for handle in (int(nodes[index]) for index in idle):
        to = [edge for edge in left if edge[1] == handle]
        onward = [edge for edge in left if edge[0] == handle]
        passed = [(first, last, data) for first, _, data in to for _, last, _ in onward]
        left = [edge for edge in left if handle not in edge[:2]] + passed
    skipped = frozenset(idle)
    return left, [node for index, node in enumerate(nodes) if index not in skipped]


def _spread(found: tuple[int, ...], count: int, idle: Collection[int]) -> tuple[int, ...]:
    """Phases of ``count`` nodes, in which each ``idle`` node is in the phase of the node before it."""
    skipped, spread, taken = frozenset(idle), list[int](), 0
    every = found or tuple(range(count - len(skipped)))
    for index in range(count):
        taken += index not in skipped
        spread.append(every[max(taken - 1, 0)] if every else 0)
    return tuple(spread)


def _between(place: Mapping[int, int], edges: Collection[Edge]) -> set[tuple[int, int]]:
    """``edges`` as positions (earlier, later). Raises CaptureError (``unordered-nodes``)."""
    pairs = {(place[earlier], place[later]) for earlier, later, _ in edges}
    for earlier, later in pairs:
        if earlier >= later:
            raise CaptureError("unordered-nodes", f"node {later} comes before one that it depends on")
    return pairs


def phases(count: int, edges: Collection[tuple[int, int]], early: Collection[tuple[int, int]] = ()) -> tuple[int, ...]:
    """The phase of each of ``count`` nodes: the maximum number of phases, each a run of consecutive nodes, such that
    all nodes of a phase have completed before any of a later one starts. Empty if each node has a phase of its own.

    ``edges`` are distinct (earlier, later), and lead forward. No phase ends between the nodes of an ``early`` edge: its
    later node may start, though not complete, before the earlier one has completed.

    A phase ends after node i if paths lead from every node up to i to every later one. That holds if each sink (a node
    up to i without an edge to another of these) has an edge to each source (a later node without an edge from another
    later one): a path from a sink to a source can have no node in between. So sinks, sources, and edges from sinks to
    sources are counted for every i; the edges must be all possible ones. One pass counts for all i: node x is a sink
    from i = x to before its first successor, and y a source from its last predecessor to before i = y.
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
    """For each of ``count`` positions, the number of ``spans`` (begin, end excluded) that contain it."""
    changes = [0] * (count + 1)
    for begin, end in spans:
        if begin < end:
            changes[begin] += 1
            changes[end] -= 1
    return list(accumulate(changes))[:-1]
