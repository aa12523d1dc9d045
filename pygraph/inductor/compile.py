"""Has Inductor compile a whole graph under a decision, and holds what came out against it.

Wrapping regions for replay is ``wrap``'s; deciding is the passes'.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pygraph import compat, version
from pygraph.inductor.decision import Decision
from pygraph.inductor.record import ProgramRecord
from pygraph.inductor.steering import Steering
from pygraph.ir import CONSTANT
from pygraph.passes.base import Pass

__all__ = ["compare", "compile_steered", "program_key"]

Judge = Callable[[Any], Mapping[str, str | None]]


def compile_steered(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    decision: Decision,
    judge: Judge,
    tag: str,
) -> Any:
    """Inductor's compiled graph for ``gm``, cut where ``decision`` says.

    Inductor's configuration stays the user's but for the partition itself. Its cache key gets ``tag``: the user's with
    ``program_key``; plain compilations of the same graph have another key.
    """
    steering = Steering(decision, judge)
    with (
        steering.active(),
        compat.compiler_config.patch(cache_key_tag=tag),
        compat.inductor_config.patch(graph_partition=True),
    ):
        return compat.compile_fx_inner(gm, inputs, **kwargs)


def program_key(decision: Decision, passes: Sequence[Pass], failed: str = "") -> str:
    """A hash of all that shapes a program besides its graph and Inductor's configuration, which Inductor hashes.

    That is the decision with its pipeline, what captures failed for (a digest), the source of this package and of
    passes from elsewhere, the version of torch, and the device.
    """
    sources = (
        version.package_digest(version.PACKAGE),
        *(_source(cls) for item in passes for cls in type(item).__mro__),
    )
    device = torch.cuda.get_device_name() if decision.device == "cuda" else decision.device
    parts = (version.__version__, torch.__version__, device, decision.digest(), failed, *sources)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _source(cls: type) -> str:
    """A hash of the module of a class from outside of this package, whose helpers count too. A class without a file
    (from a notebook) is another one in each process."""
    if cls is object or cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    path = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    return version.digest(path) if path.is_file() else secrets.token_hex()


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
        for one in (one for step in steps for one in step.made if one.reason is not None):
            notes.append(f"region {index} holds {one.name} ({one.op}), which has to stay outside: {one.reason}")
            forbidden.add(index)
    if len(record.regions) > len(decision.regions):
        notes.append(f"{len(record.regions)} regions were emitted where {len(decision.regions)} were decided")
    inside = {name for steps in record.regions for step in steps for name in step.origins}
    lost = [s.reason or "" for s in record.outside for o in s.origins if o not in inside and _was_inside(decision, o)]
    made = {one.name: one for step in record.outside for one in step.made if one.reason is not None}
    for one in made.values():
        sources = ", ".join(one.sources) or "nodes that are not known"
        notes.append(f"{one.name} ({one.op}), made from {sources}, was left outside: {one.reason}")
    for reason in dict.fromkeys(lost):
        notes.append(f"{lost.count(reason)} operators decided into a region were left outside: {reason}")
    return notes, forbidden


def _was_inside(decision: Decision, name: str) -> bool:
    placed = decision.nodes.get(name)
    return placed is not None and placed.region is not None
