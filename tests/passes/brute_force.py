"""Brute force over every partition of a small DAG, to hold partitioning against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from pygraph.passes.region_order import Kind

__all__ = ["fewer_regions"]

Lists = Sequence[Sequence[int]]
"""For each position, the positions that it depends on."""


def acyclic(units: Sequence[int], before: Lists) -> bool:
    edges = ((units[p], units[v]) for v, sources in enumerate(before) for p in sources if units[p] != units[v])
    return nx.is_directed_acyclic_graph(nx.DiGraph(edges))


def partitions(kinds: Sequence[Kind], most: int) -> Iterator[list[int]]:
    """Every choice of at most ``most`` regions (0, 1, …) for LAUNCHES and FREE nodes; others get negative numbers."""

    def extend(chosen: list[int], used: int) -> Iterator[list[int]]:
        v = len(chosen)
        if v == len(kinds):
            yield chosen
            return
        choices = [] if kinds[v] is Kind.OUTSIDE else list(range(min(used + 1, most)))
        choices += [] if kinds[v] is Kind.LAUNCHES else [-1 - v]
        for choice in choices:
            yield from extend([*chosen, choice], max(used, choice + 1))

    return extend([], 0)


def fewer_regions(kinds: Sequence[Kind], before: Lists, than: int) -> list[int] | None:
    """A valid partition of fewer regions ``than`` so many that covers all LAUNCHES nodes, or None."""
    if than == 0:
        return None
    return next((p for p in partitions(kinds, than - 1) if acyclic(p, before)), None)
