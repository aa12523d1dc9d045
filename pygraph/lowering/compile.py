"""Has Inductor compile a whole graph under a decision, and holds what came out against it.

Wrapping regions for replay is ``wrap``'s; deciding is the passes'.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pygraph import compat
from pygraph.ir import CONSTANT
from pygraph.lowering.decision import Decision
from pygraph.lowering.record import ProgramRecord
from pygraph.lowering.steering import Steering

__all__ = ["compare", "compile_steered", "program_record"]

Judge = Callable[[Any], Mapping[str, str | None]]


def compile_steered(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    decision: Decision,
    judge: Judge,
    failed: str = "",
) -> Any:
    """Inductor's compiled graph for ``gm``, cut where ``decision`` says.

    Inductor's configuration stays the user's but for the partition itself. Its cache key gets the decision, what
    ``judge`` knows to have failed (a digest) and this package's source, since all of them shape the program; plain
    compilations of the same graph have another key.
    """
    steering = Steering(decision, judge)
    tag = f"{compat.compiler_config.cache_key_tag}|pygraph {_source_digest()} {decision.digest()} {failed}".rstrip()
    with (
        steering.active(),
        compat.compiler_config.patch(cache_key_tag=tag),
        compat.inductor_config.patch(graph_partition=True),
    ):
        return compat.compile_fx_inner(gm, inputs, **kwargs)


@functools.cache
def _source_digest() -> str:
    """A hash of the modules that decide how a decision becomes a program."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def program_record(compiled: Any) -> ProgramRecord | None:
    """What steering noted while ``compiled`` was made, also when it came from a cache; None when it was not cut."""
    maps = getattr(compiled, "partition_maps", None)  # a graph without operators becomes a plain function
    return getattr(maps, "record", None)


def compare(decision: Decision, record: ProgramRecord) -> tuple[list[str], set[int]]:
    """Differences between the program and the decision: notes for the report, and regions that must not be captured."""
    notes, forbidden = [], set()
    for index, steps in enumerate(record.regions):
        for name in dict.fromkeys(origin for step in steps for origin in step.origins):
            placed = decision.nodes.get(name)
            # A constant launches nothing: where a kernel names one, Inductor has folded it or put it on the device.
            if placed is not None and not placed.capturable and placed.op != CONSTANT:
                notes.append(f"region {index} holds {name} ({placed.op}), judged not capturable: {placed.reason}")
                forbidden.add(index)
    if len(record.regions) > len(decision.regions):
        notes.append(f"{len(record.regions)} regions were emitted where {len(decision.regions)} were decided")
    inside = {name for steps in record.regions for step in steps for name in step.origins}
    lost = [s.reason or "" for s in record.outside for o in s.origins if o not in inside and _was_inside(decision, o)]
    for reason in dict.fromkeys(lost):
        notes.append(f"{lost.count(reason)} operators decided into a region were left outside: {reason}")
    return notes, forbidden


def _was_inside(decision: Decision, name: str) -> bool:
    placed = decision.nodes.get(name)
    return placed is not None and placed.region is not None
