"""Passes over launch programs: allocations, order, addresses of intermediates, ends of segments.

    captured launches ──► rename ──► order ──► layout ──► segments ──► what a driver replays

The decisions themselves are functions of ``pygraph.program.default``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pygraph.errors import CaptureError, PassError
from pygraph.ir import HOST, MODELS
from pygraph.passes.base import LaunchPass, PassContext, PassResult
from pygraph.passes.manager import PassManager
from pygraph.passes.pipeline import sources
from pygraph.program.default import ORDER_MEMORY, in_order, ordered, placed, renamed, segmented
from pygraph.program.program import Program

DEFAULT_LAUNCH_PIPELINE = "rename,order,layout,segments"


@dataclass(frozen=True)
class Rename(LaunchPass):
    """Split an allocation where a call overwrites all of it, if the order ``dependences`` is requested.

    before:  k0 ─ k1 ─ k2 ─ k3        after:  k0 ─ k1        before, all of them use buf0
                                              k2 ─ k3
    """

    name: ClassVar[str] = "rename"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Split allocations; the note has the number of new ones."""
        made, note = renamed(program, ctx.order)
        return _result(program, made if made is program else in_order(made, program.order), note)


@dataclass(frozen=True)
class Order(LaunchPass):
    """Make each launch wait only for launches on which it depends, if the order ``dependences`` is requested.

    before:  k0 ─ k1 ─ k2 ─ k3        after:  k0 ─ k1 ─ k3
                                              k2 ──────┘

    Args:
        memory: fraction of the uncaptured program's peak memory that the program may add; 2 MiB are
            always allowed
    """

    name: ClassVar[str] = "order"

    memory: float = ORDER_MEMORY

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Reorder ``program``; the note has the number of lanes and the longest path."""
        return _result(program, *ordered(program, ctx.order, self.memory))


@dataclass(frozen=True)
class Layout(LaunchPass):
    """Let intermediates share bytes of the workspace if they are never alive together."""

    name: ClassVar[str] = "layout"

    def run(self, program: Program, ctx: PassContext) -> PassResult:  # noqa: ARG002
        """Place intermediates; the note has their number and bytes."""
        return _result(program, *placed(program))


@dataclass(frozen=True)
class Segments(LaunchPass):
    """Cut the program into segments if a single one would hold much more memory than the uncaptured program."""

    name: ClassVar[str] = "segments"

    def run(self, program: Program, ctx: PassContext) -> PassResult:  # noqa: ARG002
        """Set the steps of ``program``; the note has the number of segments."""
        return _result(program, *segmented(program))


def _result(before: Program, made: Program, note: str) -> PassResult:
    return PassResult(made != before, (note,), made)


@dataclass(frozen=True)
class LaunchPipeline:
    """A pipeline that the runtime runs on each captured program.

    Args:
        manager: pass manager with launch passes
    """

    manager: PassManager

    @property
    def key(self) -> str:
        """Everything except the program on which the decisions of the pipeline depend."""
        return " ".join((self.manager.text, *sources(self.manager.passes)))

    def __call__(self, program: Program, order: str) -> Program:
        """The program to replay, with the passes' notes. Raises CaptureError (``pass-failed``)."""
        try:
            device = program.recording.device
            program = in_order(program, None)
            ran = self.manager.run(program, PassContext(device, MODELS.get(device, HOST), order))
        except PassError as error:
            raise CaptureError("pass-failed", str(error)) from error
        notes = (f"{record.text}: {', '.join(record.notes)}".removesuffix(": ") for record in ran.passes)
        return replace(ran.program or program, notes=tuple(notes))
