"""Launches with branches, and what holds of them by definition: who comes before whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
from hypothesis import strategies as st

__all__ = ["Branched", "branched", "closure"]


@dataclass(frozen=True)
class Branched:
    """``count`` nodes in order of capture, and edges (earlier, later) between them."""

    count: int
    edges: frozenset[tuple[int, int]]

    def before(self) -> set[tuple[int, int]]:
        """All pairs of which the first comes before the second."""
        return closure(self.edges)


def closure(edges: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Pairs (a, b) with a path from a to b."""
    return set(nx.transitive_closure(nx.DiGraph(edges)).edges)


@st.composite
def branched(draw: st.DrawFn, most: int = 14) -> Branched:
    """Launches on streams that fork and join, with up to three edges besides.

    Every launch is given to one of a few streams, and comes after the last one on it; before, the stream may wait for
    others.
    """
    count = draw(st.integers(0, most))
    streams = draw(st.integers(1, 4))
    last: list[set[int]] = [set() for _ in range(streams)]
    edges: set[tuple[int, int]] = set()
    for node in range(count):
        stream = draw(st.integers(0, streams - 1))
        for other in draw(st.sets(st.integers(0, streams - 1), max_size=streams)):
            last[stream] = last[stream] | last[other]
        edges |= {(earlier, node) for earlier in last[stream]}
        last[stream] = {node}
    if count > 1:
        places = st.integers(0, count - 1)
        edges |= {(a, b) for a, b in draw(st.sets(st.tuples(places, places), max_size=3)) if a < b}
    return Branched(count, frozenset(edges))
