"""Questions asked of a document of results: which ratios there are, means, losses, and what went wrong.

How the answers look is the business of ``markdown`` and ``plots``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pygraph.bench.sides import BASELINES, SIDES
from pygraph.bench.statistics import geometric_mean

__all__ = [
    "LOSS",
    "Trouble",
    "best_ratio",
    "by_domain",
    "geometric",
    "left_out_of_means",
    "losses",
    "sides_in",
    "troubles",
    "wall_ratio",
]

LOSS = 1 / 1.02
"""A ratio below this is a loss: PyGraph takes over 2 % longer."""

Row = Mapping[str, Any]


class Trouble(NamedTuple):
    """A side without figures that may be compared, and why."""

    workload: str
    side: str
    status: str
    error: str


def wall_ratio(row: Row, side: str) -> float | None:
    """A workload's ratio of wall time over ``side``; None where none may be shown."""
    found = row["ratios"].get(side, {}).get("wall_us")
    return None if found is None else float(found["ratio"])


def best_ratio(row: Row) -> float | None:
    """The ratio over the better of the baselines: the smallest there is, None without any."""
    found = [ratio for side in BASELINES if (ratio := wall_ratio(row, side)) is not None]
    return min(found, default=None)


def geometric(document: Row, side: str) -> tuple[float | None, int]:
    """The geometric mean of the ratios over ``side``, and of how many workloads it is."""
    found = [ratio for row in document["workloads"].values() if (ratio := wall_ratio(row, side)) is not None]
    return geometric_mean(found), len(found)


def left_out_of_means(document: Row, side: str) -> list[str]:
    """The workloads that the mean over ``side`` is without: left out, skipped, failed or wrong ones."""
    without = [name for name, row in document["workloads"].items() if wall_ratio(row, side) is None]
    return [*without, *document["left_out"], *document["skipped"]]


def losses(document: Row) -> list[tuple[str, float]]:
    """Workloads on which PyGraph is slower than the better of the baselines by over 2 %, worst first."""
    found = [(name, best_ratio(row)) for name, row in document["workloads"].items()]
    return sorted(((name, ratio) for name, ratio in found if ratio is not None and ratio < LOSS), key=lambda x: x[1])


def troubles(document: Row) -> Iterator[Trouble]:
    """Every side that has no figures to be compared."""
    for name, row in document["workloads"].items():
        for side, found in row["sides"].items():
            if found["status"] != "ok":
                yield Trouble(name, side, found["status"], found["error"])


def by_domain(document: Row) -> dict[str, dict[str, Row]]:
    """The workloads by domain, in the order of the document."""
    found: dict[str, dict[str, Row]] = {}
    for name, row in document["workloads"].items():
        found.setdefault(row["domain"], {})[name] = row
    return found


def sides_in(rows: Mapping[str, Row]) -> list[str]:
    """The sides of these workloads that are no ablations, in the order in which sides are shown."""
    return [name for name, side in SIDES.items() if not side.off and any(name in row["sides"] for row in rows.values())]
