"""The order of steps in alternating turns of host and regions, with the fewest regions: one algorithm, on positions.

Partitioning uses it to form regions, placement to batch uploads, and the Inductor layer to order fused nodes.
Steps are positions in a topological order; dependences are lists of positions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from operator import itemgetter
from typing import TypeAlias

Lists: TypeAlias = Sequence[Sequence[int]]

Time: TypeAlias = "tuple[int, int, int | None]"
"""A turn, the part of the turn, and the region whose steps run then; None: the host."""


class Kind(Enum):
    """Place where a step has to run.

    Attributes:
        LAUNCHES: in a region: it is capturable, and launches kernels
        FREE: anywhere: it launches nothing (a view, a size), so it may be in a region, but does not justify one
        OUTSIDE: outside of every region: it is not capturable
        EAGER: anywhere: a region may call it between two segments, but it neither justifies, begins nor ends a region
        UPLOAD: at the beginning of a region: the host makes the values that it copies
    """

    LAUNCHES = "launches"
    FREE = "free"
    OUTSIDE = "outside"
    EAGER = "eager"
    UPLOAD = "upload"


def earliest(kinds: Sequence[Kind], before: Lists) -> list[int]:
    """The earliest time of each node, where even times are the host's turns and odd times are regions.

    A node runs no earlier than its dependences; OUTSIDE nodes run at even times, LAUNCHES nodes at odd times, others at
    either:

        time(v) = round(max(time(p) for p in before[v]), default 0)      round: up to even, up to odd, or not at all

    An UPLOAD rounds up to even, like host work, and then moves to the next odd time. One sweep, linear in nodes and
    dependences.

    **The LAUNCHES nodes cannot be covered by fewer regions than they have odd times.** Sort the quotient of any valid
    partition topologically; give its regions the times 1, 3, 5, … in that order, and a node outside every region twice
    the number of regions sorted before it. Along a dependence these times do not decrease; they are odd for LAUNCHES
    nodes and even for OUTSIDE ones. So, by induction over program order, none is smaller than ``time`` above. The
    greatest odd time above, 2K + 1, is hence reached in that partition too, which takes K + 1 regions.

    **That many suffice.** A LAUNCHES node at 2K + 1 > 1 is there because of an OUTSIDE node at 2K, that because of a
    LAUNCHES node at 2K - 1 (FREE and EAGER nodes in between only hand a time on), and so on down to 1: the odd times of
    LAUNCHES nodes have no gaps. Nodes of equal odd time make a region, and the quotient is acyclic: a dependence leads
    to an equal or later time, and one between equal times lies inside a region, or between nodes outside of all.
    """
    times: list[int] = []
    for kind, sources in zip(kinds, before, strict=True):
        time = max((times[p] for p in sources), default=0)
        if kind is Kind.LAUNCHES:
            time += 1 - time % 2
        elif kind is Kind.OUTSIDE:
            time += time % 2
        elif kind is Kind.UPLOAD:
            time += time % 2 + 1
        times.append(time)
    return times


def assign(kinds: Sequence[Kind], after: Lists, early: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The final time of each node; nodes whose time is in ``kept`` (odd times, ascending) are in that region.

    OUTSIDE nodes run at ``early``; others may run later, up to their first user. A LAUNCHES or EAGER node takes the
    region of its turn in program order, or the nearest that its slack allows, so that no value lives much longer than
    in program order. A FREE node takes the region of its first user: passing its operand there costs no more than
    passing its result, and a view that leaves a region would be a result that shares memory. With no region in reach,
    a node stays at ``early``, outside. One backward sweep, linear.
    """
    host = (time if kind is Kind.OUTSIDE else 0 for kind, time in zip(kinds, early, strict=True))
    turns = [latest + 1 for latest in accumulate(host, max)]  # program order has a region after the latest OUTSIDE node
    horizon = 1 + max(early, default=0)
    times = list(early)
    for v in reversed(range(len(kinds))):
        if kinds[v] is Kind.OUTSIDE:
            continue
        limit = min((times[s] for s in after[v]), default=horizon)
        first, last = bisect_left(kept, early[v]), bisect_right(kept, limit)
        if first < last:
            free = kinds[v] is Kind.FREE
            wish = turns[v] if not free else limit if after[v] else early[v]
            # the greatest kept time that is not past the wish, else the least
            times[v] = kept[max(bisect_right(kept, wish, first, last) - 1, first)]
    return times


def unit_order(units: Sequence[int], before: Lists) -> list[int]:
    """Positions, reordered so that equal ``units`` are adjacent, in program order as far as dependences allow.

    The result is the lexicographically smallest topological order of the quotient, where a unit is compared by its
    first member. ``units`` names the unit of each position by the position of its first member.
    """
    import networkx as nx  # takes a while; Inductor imports it, too

    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(units)
    quotient.add_edges_from((units[p], units[v]) for v, sources in enumerate(before) for p in sources)
    quotient.remove_edges_from(list(nx.selfloop_edges(quotient)))
    place = {unit: i for i, unit in enumerate(nx.lexicographical_topological_sort(quotient))}
    return sorted(range(len(units)), key=lambda v: (place[units[v]], v))


def fewest_runs(kinds: Sequence[Kind], before: Lists) -> list[int]:
    """A topological order of steps with the fewest possible runs of LAUNCHES steps: by their earliest times.

    Times never decrease along a dependence, so they give a topological order; its runs are as many as the odd times,
    which is the minimum.
    """
    times = earliest(kinds, before)
    return sorted(range(len(kinds)), key=lambda step: (times[step], step))


def settle(turns: Sequence[int | None], units: Sequence[int | None], before: Lists) -> list[Time]:
    """The time of each step, given its turn and its unit: the number of a region, or None for the host.

    A step runs at its turn, or at the latest turn of its dependences if that is later. Within a turn it runs after its
    dependences in other units: a region that need not wait for another unit within a turn stays in one piece, and any
    other region is cut where it waits. A step without a turn joins the latest of its dependences.

        turns  1 1 1 3    units  0 – 0 1    before  – 0 1 2    times  (1, 0, 0) (1, 1, –) (1, 2, 0) (3, 0, 1)
    """
    times: list[Time] = []
    for turn, unit, sources in zip(turns, units, before, strict=True):
        behind = [times[p] for p in sources]
        if turn is None and behind:
            unit = max(behind, key=itemgetter(0, 1))[2]
        waits = ((t, part + (other != unit)) for t, part, other in behind)
        times.append((*max([(turn or 0, 0), *waits]), unit))
    return times


def runs(kinds: Sequence[Kind]) -> list[range]:
    """The maximal runs of steps without OUTSIDE steps, each from its first LAUNCHES step to its last: a region neither
    begins nor ends with an EAGER step. Runs without LAUNCHES steps are left out."""
    found: list[range] = []
    last: int | None = None
    for step, kind in enumerate(kinds):
        if kind is Kind.OUTSIDE:
            last = None
        elif kind is Kind.LAUNCHES and last is None:
            found.append(range(step, step + 1))
            last = step
        elif kind is Kind.LAUNCHES:
            found[-1] = range(found[-1].start, step + 1)
    return found
