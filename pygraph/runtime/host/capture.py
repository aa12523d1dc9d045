"""One capture of one region, from the arguments of a call to a Recording.

The region runs on stand-ins, under a mode that records the operators of this thread. In a copy of its globals,
kernels and allocators are replaced by functions that record their calls.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import dynamo_guards
from pygraph.errors import CaptureError, first_line
from pygraph.program.recording import AllocationKind, Recording
from pygraph.runtime.control import Bodies
from pygraph.runtime.critical import only_capture
from pygraph.runtime.host.kernels import find_kernel, is_native_function
from pygraph.runtime.host.operators import RecordOperators
from pygraph.runtime.host.recorder import Arena, Recorder
from pygraph.runtime.observe import SCALARS, describe_outputs, run_region
from pygraph.runtime.provenance import blaming
from pygraph.runtime.tensors import extent, module_constants, rebound

_recorders: list[Recorder] = []
"""The recorder of the capture under way, while its function runs."""

_FOREIGN_CODE = ("ctypes", "_ctypes", "torch._inductor.codecache", "torch._inductor.runtime", "triton")
"""Modules whose callables run compiled code with other bindings than the known kernels."""


def capture_region(
    native: ModuleType, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any], eager: Collection[str] = ()
) -> Recording:
    """Record ``fn`` on stand-ins for ``args``; replays call the operators ``eager``. Raises CaptureError; errors for
    lack of memory pass through. After any exception, nothing of the capture is left."""
    if not isinstance(fn, types.FunctionType):
        raise CaptureError("unsupported-region", f"{type(fn).__name__} is no plain Python function")
    if native.modes_active():
        raise CaptureError("dispatch-mode", "a mode or transform watches the operators of this thread")
    arena = Arena(native)
    try:
        with only_capture():
            recorder = Recorder(native, arena, module_constants(fn), eager)
            recorder.arguments = tuple(_argument(recorder, index, value) for index, value in enumerate(args))
            bodies = Bodies(lambda: len(recorder.launches), run_inside, native.element_address, native.storage_base)
            returned = _run(recorder, bodies, fn)
            outputs = describe_outputs(returned, recorder)
            allocations = (*arena.allocations, *recorder.constant_allocations)
            sensitive = frozenset(recorder.offset_sensitive)
            nests = tuple(bodies.nests)
            return Recording(tuple(recorder.launches), allocations, outputs, recorder, sensitive, nests=nests)
    except BaseException:
        arena.close()
        raise


def _argument(recorder: Recorder, index: int, value: Any) -> Any:
    """The stand-in for a tensor; any other value is returned unchanged."""
    if isinstance(value, torch.Tensor):
        recorder.check_plain(value)
        if value.storage_offset() * value.itemsize + extent(value) > value.untyped_storage().nbytes():
            raise CaptureError("unsupported-tensor", f"argument {index} has no memory for its elements")
        key, offset = (AllocationKind.INPUT, index), int(value.storage_offset())
        return recorder.arena.tensor(key, value.size(), value.stride(), value.dtype, offset=offset)
    if type(value) in SCALARS:
        return value
    raise CaptureError("unsupported-argument", f"argument {index} is {type(value).__name__}")


def run_inside(fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
    """Run the function of another region; during a capture, it is recorded."""
    if not _recorders or not isinstance(fn, types.FunctionType):
        return fn(args)
    with rebound(fn, functools.partial(_recorded, _recorders[-1], fn.__code__.co_filename)) as region:
        outputs: Sequence[Any] = region(args)
        return outputs


def _run(recorder: Recorder, bodies: Bodies, fn: types.FunctionType) -> Sequence[Any]:
    def run() -> Any:
        _recorders.append(recorder)
        try:
            with torch.no_grad(), RecordOperators(recorder), bodies.noted():
                return run_inside(fn, list(recorder.arguments))
        finally:
            _recorders.clear()

    def explain(error: Exception) -> tuple[str, str]:
        reason = "host-read" if recorder.native.NO_MEMORY in str(error) else "capture-failed"
        return reason, f"{type(error).__name__}: {first_line(str(error))}"

    return run_region(run, explain)


def _recorded(recorder: Recorder, source: str, name: str, value: Any) -> Any:
    """The stand-in for a global of the region: ``value``, unless a call of it could touch memory unseen by any
    dispatch mode. Errors that a stand-in raises are blamed on ``name``."""
    function = _recording(recorder, source, name, value)
    if function is None:
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        with blaming(name):
            return function(*args, **kwargs)

    return run


def _recording(recorder: Recorder, source: str, name: str, value: Any) -> Callable[..., Any] | None:
    if is_native_function(value):
        kernel = functools.cache(lambda: find_kernel(name, value, source))
        return lambda *args: recorder.kernel(kernel(), args)
    if value is dynamo_guards._empty_strided_cpu:
        return recorder.allocate
    if isinstance(value, types.BuiltinFunctionType) and value.__name__.startswith("_empty_strided_"):
        reason = "pinned-memory" if value.__name__.endswith("_pinned") else "foreign-device"
        return functools.partial(_refuse, reason, value.__name__)
    if callable(value) and type(value).__module__.startswith(_FOREIGN_CODE):
        return functools.partial(_refuse, "unknown-kernel", name)
    return None


def _refuse(reason: str, detail: str, *_args: Any, **_kwargs: Any) -> None:
    raise CaptureError(reason, detail)
