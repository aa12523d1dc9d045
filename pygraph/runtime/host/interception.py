"""How the calls of a region reach the recorder: what stands for its globals, and a mode that watches one thread."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pygraph.compat import DispatchKey, OpOverload, TorchDispatchMode, dynamo_guards
from pygraph.errors import CaptureError
from pygraph.runtime.host.kernels import Kernel, find_kernel, is_native_function
from pygraph.runtime.host.operators import is_built_in, record_operator
from pygraph.runtime.host.recorder import Recorder
from pygraph.runtime.provenance import blame
from pygraph.runtime.tensors import rebound

__all__ = ["decomposed", "rebind", "recording"]

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
