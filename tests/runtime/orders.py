"""What any order of launches is held to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["keeps"]


def keeps(order: Sequence[int], edges: Iterable[tuple[int, int]]) -> bool:
    """Whether ``order`` is a permutation of the launches that respects ``edges``."""
    rank = {launch: position for position, launch in enumerate(order)}
    permutation = sorted(order) == list(range(len(order)))
    return permutation and all(rank[earlier] < rank[later] for earlier, later in edges)
