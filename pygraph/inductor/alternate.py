"""Ordering a DAG of steps in two colours into the fewest runs: the level argument that partitioning rests on.

Works on indices, so that it serves operators of the IR and Inductor's fused nodes alike.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count_runs", "fewest_runs"]


def fewest_runs(inside: Sequence[bool], predecessors: Sequence[Sequence[int]]) -> list[int]:
    """An order of the steps, which are given in a topological one, with as few runs of inside steps as there can be.

    The level of a step is the largest number of changes from inside to outside on a path that ends in it. Steps of one
    level and colour are independent of those in between, so (level, colour, position) is a topological order, and its
    number of runs equals the number of levels on the longest path, which no order can beat.
    """
    level = [0] * len(inside)
    for i, before in enumerate(predecessors):
        for p in before:
            level[i] = max(level[i], level[p] + (1 if inside[p] and not inside[i] else 0))
    return sorted(range(len(inside)), key=lambda i: (level[i], inside[i], i))


def count_runs(inside: Sequence[bool]) -> int:
    """The number of maximal runs of inside steps in an order."""
    return sum(1 for i, here in enumerate(inside) if here and not (i and inside[i - 1]))
