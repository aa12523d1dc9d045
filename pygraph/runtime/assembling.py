"""What both drivers tell the object that replays a program: its arguments and outputs; and what a layout has to be.

How launches are added and addresses are patched is each driver's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.contract import Program
from pygraph.runtime.recording import AllocationKind, Output, OutputKind

__all__ = ["NativeExecutable", "add_arguments", "add_outputs", "check_program"]


class NativeExecutable:
    """A region ready for replay. ``replay`` is the native region's own method: there is no Python on the way.

    A replay that finds another one of the same executable under way (of another thread, or around it) returns None.
    ``kept`` is what the native region points into.
    """

    __slots__ = ("__weakref__", "_kept", "_region", "replay")

    replay: Callable[[list[Any]], list[Any] | None]

    def __init__(self, region: Any, kept: Sequence[object]) -> None:
        self._region = region
        self._kept = tuple(kept)
        self.replay = region.replay

    def close(self) -> None:
        """Give back everything that the executable holds; replaying afterwards returns None."""
        self._region.close()
        self._kept = ()


def check_program(program: Program, alignment: int) -> None:
    """Raise CaptureError (``invalid-program``) unless intermediates lie in the workspace, at multiples of ``alignment``
    bytes, the fresh allocations are those of the outputs, and the steps cover all launches in their order."""
    bounds = [bound for step in program.steps for bound in (step.begin, step.end)]
    if bounds[1:-1:2] != bounds[2::2] or [*bounds[:1], *bounds[-1:]] != [0, len(program.recording.launches)]:
        raise CaptureError("invalid-program", "the steps do not cover the launches in their order")
    layout, recording = program.layout, program.recording
    pool = {a.index: a for a in recording.allocations if a.kind is AllocationKind.POOL}
    for index, offset in layout.offsets.items():
        if index not in pool or offset < 0 or offset % alignment or offset + pool[index].nbytes > layout.nbytes:
            raise CaptureError("invalid-program", f"allocation {index} at byte {offset} of {layout.nbytes}")
    outputs = {o.allocation for o in recording.outputs if o.kind is OutputKind.FRESH}
    if not outputs <= set(layout.fresh) or not set(layout.fresh) <= set(pool):
        raise CaptureError("invalid-program", "the fresh allocations are not those of the outputs")


def add_arguments(region: Any, program: Program, arguments: Sequence[Any], written: Collection[int]) -> dict[int, int]:
    """Tell ``region`` what each argument has to be. Returns argument ▸ number of the source of its address.

    ``arguments`` are the stand-ins that were captured, ``written`` positions of those that a launch may write.
    """
    recording = program.recording
    allocations = {a.index: a for a in recording.allocations if a.kind is AllocationKind.INPUT}
    sources: dict[int, int] = {}
    for index, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor):
            sources[index] = region.add_value_argument(argument)
            continue
        offset = argument.storage_offset() if index in recording.offset_sensitive else -1
        allocation, alignment = allocations[index], max(1, program.alignment.get(index, 1))
        sources[index] = region.add_tensor_argument(
            argument, index in written, offset, allocation.nbytes, alignment, allocation.address
        )
    return sources


def add_outputs(region: Any, kinds: Any, program: Program, same: Mapping[int, int]) -> None:
    """Tell ``region`` what it returns. ``kinds`` is its enumeration of kinds of outputs; ``same`` maps the position of
    an output to that of an earlier one which is the same object."""
    for position, output in enumerate(program.recording.outputs):
        if position in same:
            region.add_output(kinds.SAME, same[position], 0, [], [], None, None)
        else:
            _add_output(region, kinds, program, output)


def _add_output(region: Any, kinds: Any, program: Program, output: Output) -> None:
    if output.kind is OutputKind.ARGUMENT:
        region.add_output(kinds.ARGUMENT, output.argument, 0, [], [], None, None)
        return
    if output.kind in (OutputKind.SCALAR, OutputKind.CONSTANT_TENSOR):
        region.add_output(kinds.OBJECT, 0, 0, [], [], None, output.value)
        return
    is_view = output.kind is OutputKind.VIEW
    kind = kinds.VIEW if is_view else kinds.FRESH
    index = output.argument if is_view else program.layout.fresh.index(output.allocation)
    region.add_output(kind, index, output.offset, list(output.size), list(output.stride), output.dtype, None)
