"""One capture of one region, from the arguments of a call to a Recording."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.critical import only_capture
from pygraph.runtime.host.arena import Arena
from pygraph.runtime.host.interception import rebind, recording
from pygraph.runtime.host.launches import HostCapture
from pygraph.runtime.host.recorder import Recorder
from pygraph.runtime.provenance import is_out_of_memory, reset_blame
from pygraph.runtime.recording import AllocationKind, Output, OutputKind, Recording
from pygraph.runtime.tensors import module_constants, repeated

__all__ = ["capture_region"]

_SCALARS = (bool, int, float)


def capture_region(native: ModuleType, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Recording:
    """Record ``fn`` on stand-ins for ``args``. Whatever is raised, nothing of the capture is left. Raises CaptureError;
    memory that is short raises what it raises."""
    if not isinstance(fn, types.FunctionType):
        raise CaptureError("unsupported-region", f"{type(fn).__name__} is no plain Python function")
    if native.modes_active():
        raise CaptureError("dispatch-mode", "a mode or transform watches the operators of this thread")
    arena = Arena(native)
    with only_capture(), contextlib.ExitStack() as cleanup:
        cleanup.callback(arena.close)
        recorder = Recorder(native, arena, module_constants(fn))
        arguments = tuple(_argument(recorder, index, value) for index, value in enumerate(args))
        returned = _run(recorder, fn, arguments)
        result = _finish(recorder, arguments, returned)
        cleanup.pop_all()
    return result


def _argument(recorder: Recorder, index: int, value: Any) -> Any:
    """The stand-in for a tensor; any other value as it is."""
    if isinstance(value, torch.Tensor):
        recorder.check_plain(value)
        if not recorder.native.is_backed(value):
            raise CaptureError("unsupported-tensor", f"argument {index} has no memory for its elements")
        return recorder.stand_in(index, value)
    if value is None or type(value) in _SCALARS:
        return value
    raise CaptureError("unsupported-argument", f"argument {index} is {type(value).__name__}")


def _run(recorder: Recorder, fn: types.FunctionType, arguments: Sequence[Any]) -> Sequence[Any]:
    reset_blame()
    try:
        with torch.inference_mode(False), torch.no_grad(), rebind(recorder, fn) as run, recording(recorder):
            returned = run(list(arguments))
    except CaptureError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # A region runs code of Inductor, of operator libraries and of users: whatever any of it raises on stand-ins
        # means that the region cannot be captured, and nothing else.
        reason = "host-read" if recorder.native.NO_MEMORY in str(error) else "capture-failed"
        raise CaptureError(reason, f"{type(error).__name__}: {error}") from error
    if not isinstance(returned, (list, tuple)):
        raise CaptureError("unsupported-output", f"the region returned {type(returned).__name__}")
    return returned


def _finish(recorder: Recorder, arguments: tuple[Any, ...], returned: Sequence[Any]) -> Recording:
    outputs = tuple(_output(recorder, arguments, value) for value in returned)
    payload = HostCapture(
        recorder.arena,
        tuple(recorder.payloads),
        arguments,
        frozenset(recorder.written),
        frozenset(recorder.exclusive),
        repeated(returned),
        tuple(recorder.constants.values()),
    )
    allocations = (*recorder.arena.allocations, *recorder.constant_allocations)
    return Recording(tuple(recorder.launches), allocations, outputs, payload, frozenset(recorder.offset_sensitive))


def _output(recorder: Recorder, arguments: Sequence[Any], value: Any) -> Output:
    if value is None or type(value) in _SCALARS:
        return Output(OutputKind.SCALAR, value=value)
    if not isinstance(value, torch.Tensor):
        raise CaptureError("unsupported-output", f"the region returned {type(value).__name__}")
    for index, argument in enumerate(arguments):
        if value is argument:
            return Output(OutputKind.ARGUMENT, argument=index)
    if any(value is constant for constant in recorder.constants.values()):
        return Output(OutputKind.CONSTANT_TENSOR, value=value)
    return _memory_output(recorder, arguments, value)


def _memory_output(recorder: Recorder, arguments: Sequence[Any], value: torch.Tensor) -> Output:
    """An output that shows memory: of the region, or of an argument."""
    owner = recorder.owner(value)
    distance = recorder.native.element_address(value) - owner.address
    size, stride = tuple(value.size()), tuple(value.stride())
    if owner.kind is AllocationKind.CONSTANT or distance % value.dtype.itemsize:
        raise CaptureError("unsupported-output", "a view of a constant, or one that begins inside an element")
    place = {"offset": distance // value.dtype.itemsize, "size": size, "stride": stride, "dtype": value.dtype}
    if owner.kind is AllocationKind.POOL:
        return Output(OutputKind.FRESH, allocation=owner.index, **place)
    if arguments[owner.index].dtype.itemsize != value.dtype.itemsize:
        recorder.offset_sensitive.add(owner.index)
    return Output(OutputKind.VIEW, argument=owner.index, **place)
