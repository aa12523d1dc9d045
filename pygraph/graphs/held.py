"""Held state of a graph: a walk over all of it, which the native half repeats at every call; and names of tensors
that are not held."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import struct
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import bits

TENSORS = (torch.Tensor, torch.nn.Parameter)
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout})
"""Types of plain values, in addition to enumerations."""

WRITTEN = (list, set, deque)
"""Types of containers, in addition to dictionaries, that a callable may write to."""

_SEARCHED = 4096
"""Maximum number of objects that a search visits."""


PLAIN_NODE, TENSOR, _AGAIN, MAPPING, SEQUENCE, _OBJECT, _SEEN, _OTHER = range(8)
"""Kinds of nodes, as in ``Held`` of the native half."""


class Walk:
    """A walk over held state, each object once: modules and their attributes, optimizers' states and options,
    containers of these; and the attributes of other objects that are named directly.

    nodes: in order, as ``Held`` reads them
    key: equal for walks of the same structure, plain values included
    tensors: each tensor once
    containers: objects, dictionaries and sequences
    refusal: why nothing can be captured, or None
    """

    def __init__(self, root: tuple[object]) -> None:
        self.nodes: list[tuple[int, Any, int]] = []
        self.tensors: list[torch.Tensor] = []
        self.containers: list[Any] = []
        self.paths: list[str] = []
        self.refusal: Refusal | None = None
        self._key: list[Hashable] = []
        self._numbers: dict[int, int] = {}
        self._met: dict[int, int] = {}
        self._hold(root)
        self._add(SEQUENCE, tuple, len(root))
        self._visit(root[0], "held", named=True)
        self.key = tuple(self._key)

    def _add(self, kind: int, value: Any, number: int = 0, key: Hashable = None) -> None:
        self.nodes.append((kind, value, number))
        self._key.append((kind, value if key is None else key, number))

    def _visit(self, value: Any, path: str, *, named: bool) -> None:
        kind = type(value)
        if kind in PLAIN or isinstance(value, enum.Enum):
            self._add(PLAIN_NODE, value, key=bits_of(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif id(value) in self._met:
            self._add(_SEEN, None, self._met[id(value)])
        elif isinstance(value, dict):
            self._met[id(value)] = self._hold(value)
            self._add(MAPPING, kind, len(value))
            for key, item in list(value.items()):
                self._visit(key, f"{path}.key", named=False)
                self._visit(item, step_of(path, key, value), named=named)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            number = self._hold(value)
            if isinstance(value, WRITTEN):
                self._met[id(value)] = number
            self._add(SEQUENCE, kind, len(value))
            for index, item in enumerate(value):
                self._visit(item, f"{path}[{index}]", named=named)
        elif isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or (named and _is_open(value)):
            self._met[id(value)] = self._hold(value)
            self._add(_OBJECT, kind)
            self._visit(vars(value), path, named=False)
        else:
            if named and not _is_whole(value):
                said = f"{path} is a {kind.__name__}, which is not looked into: name what it holds"
                self.refusal = Refusal("unsupported-held", said)
            self._add(_OTHER, value, key=id(value))

    def _hold(self, value: Any) -> int:
        self.containers.append(value)
        return len(self.containers) - 1

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if id(tensor) in self._numbers:
            self._add(_AGAIN, None, self._numbers[id(tensor)])
            return
        if type(tensor) not in TENSORS:
            self.refusal = Refusal("unsupported-tensor", f"{path} is a {type(tensor).__name__}")
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.paths.append(path)
        self._add(TENSOR, type(tensor))

    def contents(self) -> list[Any]:
        """Current items of each dictionary, list, set and queue; None for other containers."""
        return [contents_of(container) for container in self.containers]

    def restore(self, contents: Sequence[Any]) -> None:
        """Restore the items of each container to ``contents``."""
        for container, before in zip(self.containers, contents, strict=True):
            if before is None or are_same(contents_of(container), before):
                continue
            refill(container, before)


def refill(container: Any, items: Any) -> None:
    """Replace the items of a dictionary, list, set or queue by ``items``."""
    container.clear()
    container.extend(items) if isinstance(container, (list, deque)) else container.update(items)


def contents_of(container: Any) -> Any:
    if isinstance(container, dict):
        return list(container.items())
    return list(container) if isinstance(container, WRITTEN) else None


def are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    if len(now) != len(before):
        return False
    pairs = zip(now, before, strict=True)
    return all(a is b or (type(a) is tuple and type(b) is tuple and _entries_same(a, b)) for a, b in pairs)


def _entries_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def step_of(path: str, key: object, owner: Mapping[Any, Any]) -> str:
    """The path of an entry of a dictionary; the dictionaries in which modules keep their members are left out."""
    if isinstance(key, str) and key.isidentifier():
        return path if key in ("_parameters", "_buffers", "_modules") and "training" in owner else f"{path}.{key}"
    return f"{path}[{key!r}]" if type(key) in PLAIN else f"{path}[…]"


_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)


def _is_open(value: object) -> bool:
    """True if an object has no state besides its attributes."""
    others = set(type(value).__mro__) - {object, types.SimpleNamespace}
    native = any(isinstance(vars(base).get("__new__"), types.BuiltinFunctionType) for base in others)
    plain = not (native or _has_slots(value) or isinstance(value, _FUNCTIONS))
    return plain and isinstance(getattr(value, "__dict__", None), dict)


def _is_whole(value: object) -> bool:
    """True if identity suffices for an object that is not walked into: it has no state of its own that may change."""
    if isinstance(value, (types.MethodType, functools.partial)) or gives_items(value):
        return False
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    if isinstance(value, types.FunctionType):
        return not value.__closure__
    return isinstance(value, _FUNCTIONS) or (type(value).__hash__ is not None and not _has_slots(value))


def gives_items(value: object) -> bool:
    """True for an iterator. Files do not count, though they have its methods: searches reach them through loggers."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _has_slots(value: object) -> bool:
    return any(vars(base).get("__slots__") for base in type(value).__mro__)


def bits_of(value: object) -> Hashable:
    """A key that is equal for plain values of the same type and bits, and for the same member of an enumeration."""
    if isinstance(value, enum.Enum):
        return (type(value), id(value))
    if type(value) is complex:
        return ("complex", struct.pack("<2d", value.real, value.imag))
    return bits(value)


# -- names of other tensors --------------------------------------------------------------------------------------------


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, valid while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def named_storages(function: Callable[..., Any]) -> dict[int, str]:
    """Names of tensors by storage, found by a bounded search through closures, defaults, globals that the code names,
    attributes of objects, and containers."""
    found: dict[int, str] = {}
    for value, path in reachable(function):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            found.setdefault(storage_of(value), path)
    return found


def reachable(*roots: Any) -> Iterator[tuple[Any, str]]:
    """Objects that a bounded search finds from ``roots``, each with its path."""
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(root, "") for root in roots]
    for value, path in waiting:
        if id(value) in seen or len(seen) > _SEARCHED:
            continue
        seen.add(id(value))
        yield value, path
        if not isinstance(value, torch.Tensor):
            waiting += _reached(value, path)


def tables_of(value: Any) -> Any:
    """The dictionary, list, set or queue that an object is, or that has its attributes or global variables; None if
    there is none."""
    if isinstance(value, (dict, *WRITTEN)):
        return value
    if isinstance(value, types.FunctionType):
        return None if _is_of_libraries(value) else value.__globals__
    attributes = None if isinstance(value, (type, types.ModuleType)) else getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _is_of_libraries(function: types.FunctionType) -> bool:
    """True for a function of torch or PyGraph. Functions made by FX have no module."""
    return (function.__module__ or "").partition(".")[0] in ("torch", "pygraph")


def _reached(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Objects that an object refers to directly, each with its path."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        return
    if isinstance(value, functools.partial):
        yield from ((value.func, path), (value.args, path), (value.keywords, path))
    elif isinstance(value, types.MethodType):
        yield from ((value.__self__, path or "self"), (value.__func__, path))
    elif isinstance(value, types.FunctionType):
        if _is_of_libraries(value):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                yield cell.cell_contents, name
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name], name
        yield value.__defaults__, f"{path}.defaults"
    elif isinstance(value, dict):
        yield from ((item, step_of(path, key, value)) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((item, f"{path}[{index}]") for index, item in enumerate(list(value)))
    elif isinstance(value, types.ModuleType):
        if value.__name__.partition(".")[0] not in sys.stdlib_module_names | {"torch", "numpy", "pygraph"}:
            yield from ((item, f"{path}.{name}") for name, item in list(vars(value).items()) if _may_name(item))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        prefix = path or type(value).__name__
        yield from ((item, step_of(prefix, name, vars(value))) for name, item in list(vars(value).items()))
        if isinstance(value, torch.nn.Module):
            yield type(value).forward, prefix


def _may_name(value: object) -> bool:
    return isinstance(value, (torch.Tensor, torch.nn.Module, list, dict))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
