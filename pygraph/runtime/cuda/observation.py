"""What a region's operators and Triton kernels say of the tensors that they are given, while the region is captured.

Each call is noted with the nodes that it added to the graph, the addresses that it only reads, and those that it may
write. Nodes that nobody explains are taken to write whatever they are given.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph.compat import OpOverload, TorchDispatchMode
from pygraph.errors import CaptureError
from pygraph.runtime.cuda.stack import wipe_stack

__all__ = ["Observer", "Span", "module_constants", "observing"]

_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")
"""Operators whose result is a Python value that depends on device memory."""

_READ_ONLY_NAMES = ("in_ptr", "arg_")
"""How Inductor names the pointers of its own Triton kernels that it only loads from."""


@dataclass(frozen=True, slots=True)
class Span:
    """The nodes ``begin`` to ``end`` (excluded) came from the call ``name``; addresses of elements, as captured."""

    begin: int
    end: int
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass
class Observer:
    """Collects spans. ``nodes`` tells how many nodes the graph has by now."""

    nodes: Callable[[], int]
    spans: list[Span] = field(default_factory=list)
    absolute: list[int] = field(default_factory=list)
    """Addresses of tensors that were given an offset from the start of their storage."""
    failed: str | None = None
    """The call that an error came out of."""

    def call(self, name: str, reads: Sequence[int], writes: Sequence[int], run: Callable[[], Any]) -> Any:
        """Run one call and note the nodes that it added."""
        begin = self.nodes()
        wipe_stack()
        try:
            result = run()
        except Exception:
            self.failed = self.failed or name
            raise
        end = self.nodes()
        if end > begin:
            self.spans.append(Span(begin, end, name, tuple(reads), tuple(writes)))
        return result

    def owner_of(self, index: int) -> Span | None:
        """The span that node ``index`` lies in."""
        return next((span for span in self.spans if span.begin <= index < span.end), None)


def module_constants(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The tensors among the globals of ``fn``, by name."""
    return {name: value for name, value in getattr(fn, "__globals__", {}).items() if isinstance(value, torch.Tensor)}


@contextlib.contextmanager
def observing(observer: Observer, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """``fn`` as it is to be called while it is captured: its operators and Triton kernels are noted."""
    with _Operators(observer):
        yield _rebind(observer, fn)


# -- operators ----------------------------------------------------------------------------------------------------


class _Operators(TorchDispatchMode):
    """Notes every operator that reaches the dispatcher, and refuses those that involve the host."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        schema = func._schema
        if schema.name in _HOST_READS:
            raise CaptureError("host-read", f"{func} reads device memory while capturing")
        reads: list[int] = []
        writes: list[int] = []
        absolute = False
        for argument, value in _operands(schema, args, named):
            _refuse_host(func, value)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(t.data_ptr() for t in _tensors(value))
            if argument.name == "storage_offset" and value is not None:
                absolute = True
        if absolute:
            self._observer.absolute += reads + writes
        return self._observer.call(str(func), reads, writes, lambda: func(*args, **named))


def _operands(schema: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each argument of a schema with the value given for it."""
    for position, argument in enumerate(schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            yield argument, args[position]
        elif argument.name in named:
            yield argument, named[argument.name]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _refuse_host(func: Any, value: Any) -> None:
    """A capture bakes what lies in host memory, and cannot wait for a copy to it."""
    if any(tensor.device.type == "cpu" for tensor in _tensors(value)):
        raise CaptureError("host-memory", f"{func} is given a tensor on the CPU")
    if isinstance(value, torch.device) and value.type == "cpu":
        raise CaptureError("host-memory", f"{func} makes a tensor on the CPU")


# -- Triton kernels -----------------------------------------------------------------------------------------------


class _Kernel:
    """Stands for one of Inductor's Triton kernels while it is captured."""

    def __init__(self, observer: Observer, kernel: Any) -> None:
        self._observer, self._kernel = observer, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel, and note what its parameters' names say."""
        reads, writes = _triton_operands(self._kernel, args, kwargs)
        name = str(getattr(getattr(self._kernel, "fn", None), "__name__", "triton"))
        return self._observer.call(name, reads, writes, lambda: self._kernel.run(*args, **kwargs))


def _triton_operands(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Addresses that a kernel only reads, and all others that it is given."""
    mutated = getattr(kernel, "mutated_arg_names", None)
    signature = (getattr(kernel, "triton_meta", None) or {}).get("signature")
    names = list(signature) if isinstance(signature, dict) and mutated is not None else []
    reads: list[int] = []
    writes: list[int] = []
    for position, value in enumerate(args):
        name = names[position] if position < len(names) else ""
        read_only = name.startswith(_READ_ONLY_NAMES) and name not in (mutated or ())
        (reads if read_only else writes).extend(t.data_ptr() for t in _tensors(value))
    writes.extend(t.data_ptr() for value in kwargs.values() for t in _tensors(value))
    return reads, writes


def _rebind(observer: Observer, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` over a copy of its globals in which Triton kernels are observed: other threads go on unobserved."""
    if not isinstance(fn, types.FunctionType):
        return fn
    copied: dict[str, Any] = {}
    for name, value in fn.__globals__.items():
        copied[name] = _substitute(observer, fn, value, copied)
    return _over(fn, copied)


def _substitute(observer: Observer, fn: types.FunctionType, value: Any, copied: dict[str, Any]) -> Any:
    if isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__:
        return _over(value, copied)
    kind = type(value)
    if kind.__module__.startswith("torch._inductor.runtime.triton_heuristics") and hasattr(kind, "run"):
        return _Kernel(observer, value)
    return value


def _over(fn: types.FunctionType, module: dict[str, Any]) -> types.FunctionType:
    copy = types.FunctionType(fn.__code__, module, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
