"""One capture of one region, from the arguments of a call to a Recording.

The region runs on stand-ins, over a copy of its globals in which whatever runs kernels or allocates is recorded
instead, and under a mode that records the operators of this thread.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import DispatchKey, OpOverload, TorchDispatchMode, dynamo_guards
from pygraph.errors import CaptureError
from pygraph.runtime.critical import only_capture
from pygraph.runtime.host.kernels import Kernel, find_kernel, is_native_function
from pygraph.runtime.host.operators import is_built_in, record_operator
from pygraph.runtime.host.recorder import Arena, HostCapture, Recorder
from pygraph.runtime.provenance import blame, is_out_of_memory, reset_blame
from pygraph.runtime.recording import AllocationKind, Output, OutputKind, Recording
from pygraph.runtime.tensors import module_constants, rebound, repeated

__all__ = ["capture_region", "decomposed", "rebind", "recording"]

_guards: Any = dynamo_guards

_FOREIGN_CODE = ("ctypes", "_ctypes", "torch._inductor.codecache", "torch._inductor.runtime", "triton")
"""Modules whose callables run compiled code that is not bound as the known kernels are."""

_OTHER_DEVICES = ("_empty_strided_cuda", "_empty_strided_xpu", "_empty_strided_mtia")


def rebind(recorder: Recorder, fn: types.FunctionType) -> AbstractContextManager[Callable[..., Any]]:
    """``fn`` over a copy of its globals in which whatever runs kernels or allocates is recorded instead."""
    known = _allocators(recorder)

    def substitute(name: str, value: Any) -> Any:
        if isinstance(value, types.BuiltinFunctionType):
            return _builtin(recorder, fn, name, value, known)
        return _refusal("unknown-kernel", name) if _is_foreign_code(value) else value

    return rebound(fn, substitute)


def recording(recorder: Recorder) -> AbstractContextManager[Any]:
    """While open, operators of this thread are recorded. What does not ask the dispatcher finds no memory."""
    return _Operators(recorder)


# -- globals ------------------------------------------------------------------------------------------------------


def _builtin(
    recorder: Recorder,
    fn: types.FunctionType,
    name: str,
    value: types.BuiltinFunctionType,
    known: Mapping[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """What stands for a function written in C."""
    if is_native_function(value):
        return _kernel_stub(recorder, name, value, fn.__code__.co_filename)
    return known.get(value, value)


def _is_foreign_code(value: object) -> bool:
    """Whether calling ``value`` could touch memory without any mode seeing it."""
    return callable(value) and type(value).__module__.startswith(_FOREIGN_CODE)


def _kernel_stub(recorder: Recorder, name: str, value: types.BuiltinFunctionType, source: str) -> Callable[..., None]:
    found: list[Kernel] = []

    def stub(*args: Any) -> None:
        if not found:
            found.append(find_kernel(name, value, source))
        recorder.kernel(found[0], args)

    return _watched(name, stub)


def _refusal(reason: str, detail: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise CaptureError(reason, detail)

    return _watched(detail, refuse)


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, blamed as ``name`` for whatever it raises."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            blame(name)
            raise

    return run


def _allocators(recorder: Recorder) -> Mapping[Any, Callable[..., Any]]:
    """Inductor's own ways around the dispatcher, and what stands for each."""

    def reinterpret(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        view: torch.Tensor = _guards._reinterpret_tensor(tensor, *args, **kwargs)
        recorder.owner(view)
        return view

    known: dict[Any, Callable[..., Any]] = {
        _guards._empty_strided_cpu: recorder.allocate,
        _guards._reinterpret_tensor: reinterpret,
        _guards._empty_strided_cpu_pinned: _refusal("pinned-memory", "empty_strided_cpu_pinned"),
    }
    for name in _OTHER_DEVICES:
        function = getattr(_guards, name, None)
        if function is not None:
            known[function] = _refusal("foreign-device", name)
    return known


# -- operators --------------------------------------------------------------------------------------------------------


class _Operators(TorchDispatchMode):
    """Records every operator that reaches the dispatcher."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = decomposed(self, func, args, named)
        if result is not NotImplemented:
            return result
        try:
            return record_operator(self._recorder, func, args, named)
        except Exception:
            blame(str(func))
            raise


def decomposed(mode: TorchDispatchMode, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What an operator that is defined by others alone returns, each seen by ``mode``; NotImplemented for the rest."""
    if not isinstance(func, OpOverload) or not is_built_in(func) or not _is_composite(func):
        return NotImplemented
    with mode:
        return func.decompose(*args, **named)


def _is_composite(op: OpOverload) -> bool:
    """Whether ``op`` is defined by other operators alone; it only gets here where autograd keys are switched off."""
    defined = op.has_kernel_for_dispatch_key
    return defined(DispatchKey.CompositeImplicitAutograd) and not defined(DispatchKey.CPU)


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
