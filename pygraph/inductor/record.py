"""What Inductor made of a decision: its program's steps, region by region, as plain picklable data.

Written while Inductor schedules and kept with its compiled graph, so that a graph from its cache brings it along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["PatternNode", "ProgramRecord", "RecordedMaps", "Step", "program_record"]


@dataclass(frozen=True, slots=True)
class PatternNode:
    """An FX node that Inductor's own passes made, so that no decision names it: its operator, and the nodes of the
    decision that it was made from. Without any, nobody knows. ``reason`` says why it has to be outside, if it has."""

    name: str
    op: str
    sources: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled (fused) node: its buffers, the FX nodes that it computes, and why it is outside, if it is.

    ``made`` describes those of them that Inductor made.
    """

    buffers: tuple[str, ...]
    origins: tuple[str, ...]
    launches: bool
    reason: str | None
    made: tuple[PatternNode, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """The program as cut: runs of steps in order. Run ``i`` is a region when ``inside[i]``."""

    runs: tuple[tuple[Step, ...], ...]
    inside: tuple[bool, ...]

    @property
    def regions(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each region, in the order of Inductor's partition functions."""
        return tuple(run for run, inside in zip(self.runs, self.inside, strict=True) if inside)

    @property
    def outside(self) -> tuple[Step, ...]:
        """The steps that stay outside."""
        return tuple(s for run, inside in zip(self.runs, self.inside, strict=True) if not inside for s in run)


class RecordedMaps(list[object]):
    """Inductor's list of partition maps, carrying the record through its caches."""

    def __init__(self, maps: Iterable[object], record: ProgramRecord) -> None:
        super().__init__(maps)
        self.record = record

    def __reduce__(self) -> tuple[object, ...]:
        return (RecordedMaps, (list(self), self.record))


def program_record(compiled: Any) -> ProgramRecord | None:
    """What was noted while ``compiled`` was made, also when it came from a cache; None when it was not cut."""
    maps = getattr(compiled, "partition_maps", None)  # a graph without operators becomes a plain function
    return getattr(maps, "record", None)
