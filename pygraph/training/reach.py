"""Everything that a step can read: walked from its arguments, its function, and the globals that its code names.

A walk gives tokens, equal for states in which a deterministic step does the same, and every tensor in a fixed order. It
can say afterwards which places have changed.
"""

from __future__ import annotations

import collections
import enum
import functools
import struct
import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import bits
from pygraph.training.tape import user_line

__all__ = ["Change", "Executed", "Walk"]

_MOST = 100_000
"""Objects that are looked at in one walk."""

_LARGE = 1 << 16
"""Bytes of an array outside of torch that is compared by its contents."""

_LEAVES = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, enum.Enum)
_TORCH_LEAVES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)

_MISSING = object()


def _is_library(module: str | None) -> bool:
    """Whether code of a module is torch's, PyGraph's or Python's own, which keeps nothing of the user's in globals."""
    root = (module or "").partition(".")[0]
    return root in ("torch", "pygraph", "numpy") or root in sys.stdlib_module_names


# -- which code runs ---------------------------------------------------------------------------------------------------


@dataclass
class Executed:
    """The user's code that ran in a step: by ``sys.setprofile``, on the thread that called it.

    ``refusal`` is the first call that a replay would leave out, or that reads a tensor's memory unseen.
    """

    names: dict[int, tuple[dict[str, Any], dict[str, None]]] = field(default_factory=dict)
    """The globals of each module, by id, and the names that its code mentions."""
    codes: dict[types.CodeType, None] = field(default_factory=dict)
    refusal: Refusal | None = None

    def add(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Note code that runs, or may."""
        if code not in self.codes:
            self.codes[code] = None
            names = self.names.setdefault(id(namespace), (namespace, {}))[1]
            for each in _nested(code):
                names.update(dict.fromkeys(each.co_names))

    def hidden(self, known: Iterable[types.CodeType]) -> types.CodeType | None:
        """Code that has a closure which no walk has reached."""
        inner = {each for code in self.codes for each in _nested(code) if each is not code}
        reached = inner.union(known)
        closed = (code for code in self.codes if set(code.co_freevars) - {"__class__"})
        return next((code for code in closed if code not in reached), None)

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if not _is_library(frame.f_globals.get("__name__")):
                self.add(frame.f_code, frame.f_globals)
        elif event == "c_call" and self.refusal is None:
            self._called(frame, argument)

    def _called(self, frame: types.FrameType, function: Any) -> None:
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if isinstance(owner, torch.Tensor):
            users = not _is_library(frame.f_globals.get("__name__"))
            if name in _HOST_READS or (users and name in _ADDRESSES):
                detail = "the host reads a tensor's memory"
                self.refusal = Refusal("host-read", detail, f"Tensor.{name}", user_line(frame))
            return
        outside = getattr(function, "__module__", None) == "time" or type(owner).__module__ == "_io"
        if outside or any(function is each for each in _EFFECTS):
            detail = "a replay would leave out what it does besides tensors, or repeat what it returned"
            self.refusal = Refusal("host-effect", detail, name, user_line(frame))


_HOST_READS = ("numpy", "tolist", "__dlpack__")
_ADDRESSES = ("data_ptr", "untyped_storage", "_typed_storage", "storage", "__array__")
_EFFECTS = (print, input, open)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


# -- the walk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Holder:
    """Something that other things can be put into: its keys with what it held under each, at the time of the walk."""

    entry: int
    owner: Any
    kind: str  # dict, list, fixed (a set or a deque), cell, globals, slots, grad
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def now(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Keys and values as they are."""
        owner = self.owner
        match self.kind:
            case "dict":
                return tuple(owner), tuple(owner.values())
            case "list" | "fixed":
                return tuple(range(len(owner))), tuple(owner)
            case "globals":
                return self.keys, tuple(owner.get(name, _MISSING) for name in self.keys)
            case "cell":
                return self.keys, (_contents(owner),)
            case _:
                return self.keys, tuple(getattr(owner, name, _MISSING) for name in self.keys)

    def put(self, key: Any, value: Any) -> None:
        """Have it hold ``value`` under ``key``."""
        match self.kind:
            case "dict" | "globals" | "list":
                self.owner[key] = value
            case "cell":
                self.owner.cell_contents = value
            case _:
                setattr(self.owner, key, value)


@dataclass(frozen=True, slots=True)
class Change:
    """``holders[holder]`` of a walk holds ``value`` under ``key`` now. ``key`` is the object itself."""

    holder: int
    key: Any
    value: Any


class Walk:
    """One look at everything that is reachable from ``roots``, which have names.

    ``tokens`` are the state; ``tensors`` and ``holders`` come in the same order where tokens are equal. ``refusal``
    names what cannot be looked into. Everything that was met is kept alive.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], executed: Executed) -> None:
        self.tokens: list[Hashable] = []
        self.tensors: list[torch.Tensor] = []
        self.holders: list[_Holder] = []
        self.codes: dict[types.CodeType, None] = {}
        self.objects: dict[int, Any] = {}
        self.refusal: Refusal | None = None
        self._from: list[tuple[int, str]] = []
        self._seen: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._waiting: list[tuple[Any, int, str]] = []
        self._executed = executed
        for name, value in roots:
            self._waiting.append((value, -1, name))
            self._run()
        done: set[int] = set()
        while any(key not in done for key in executed.names):  # functions that are met may name further globals
            for key, (namespace, names) in list(executed.names.items()):
                if key not in done:
                    done.add(key)
                    self._globals(namespace, tuple(names))
                    self._run()
        self.tokens.append(tuple(self._aliases()))

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that was met."""
        return self._numbers.get(id(tensor))

    def entry(self, value: Any) -> int | None:
        """The entry of an object that was met, other than of a plain value."""
        return self._seen.get(id(value))

    def path(self, entry: int) -> str:
        """How an entry is reached, as Python code would have it."""
        parts: list[str] = []
        while entry >= 0:
            entry, step = self._from[entry]
            parts.append(step)
        return "".join(reversed(parts))

    def differs(self, other: Walk) -> str:
        """The first place at which another walk has something else."""
        for entry, (mine, its) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != its:
                where = self.path(entry) if entry < len(self._from) else "shared memory"
                return f"{where}: {_shown(mine)} became {_shown(its)}"
        return "more or fewer objects"

    def trail(self) -> Walk:
        """This walk, for ``differs`` alone: nothing that was met is kept alive any more."""
        for kept in (self.tensors, self.holders, self.objects, self.codes, self._seen, self._numbers):
            kept.clear()
        return self

    def changes(self) -> list[Change] | Refusal:
        """What is held in another place than at the time of the walk, tensors' own values aside."""
        found: list[Change] = []
        for index, holder in enumerate(self.holders):
            keys, values = holder.now()
            same_keys = len(keys) >= len(holder.keys) and all(map(_same, holder.keys, keys))
            if not same_keys or (len(keys) > len(holder.keys) and holder.kind != "dict"):
                return Refusal("python-state", f"the step adds to or takes from {self.path(holder.entry)}")
            for position, (key, value) in enumerate(zip(keys, values, strict=True)):
                before = holder.values[position] if position < len(holder.values) else _MISSING
                if not _same(before, value):
                    if holder.kind == "fixed" or value is _MISSING:
                        return Refusal("python-state", f"the step changes {self.path(holder.entry)}")
                    found.append(Change(index, key, value))
        return found

    # -- one object ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting = self._waiting
        while waiting and self.refusal is None:
            if len(self.tokens) > _MOST:
                self.refusal = Refusal("too-much-state", f"more than {_MOST} objects are within the step's reach")
                return
            value, parent, step = waiting.pop()
            self._from.append((parent, step))
            self._visit(value, len(self.tokens))

    def _visit(self, value: Any, entry: int) -> None:
        kind = type(value)
        if isinstance(value, _LEAVES) or kind in _TORCH_LEAVES:
            self.tokens.append(bits(value))
            return
        if kind not in (tuple, frozenset):  # those may be one object or several, which makes no difference
            known = self._seen.setdefault(id(value), entry)
            if known != entry:
                self.tokens.append(("same", known))
                return
        self.objects[entry] = value
        children: list[tuple[Any, str]] = []
        token = self._token(value, kind, entry, children)
        self.tokens.append(token)
        self._waiting.extend((child, entry, name) for child, name in reversed(children))

    def _token(self, value: Any, kind: type, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        """What stands for one object, which is met for the first time; what it leads to goes to ``children``."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, entry, children)
        if isinstance(value, types.FunctionType):
            return self._function(value, children)
        if isinstance(value, types.CellType):
            contents = _contents(value)
            self.holders.append(_Holder(entry, value, "cell", (None,), (contents,)))
            children.append((None if contents is _MISSING else contents, ""))
            return ("cell", contents is _MISSING)
        if isinstance(value, types.MethodType):
            children += [(value.__self__, ".__self__"), (value.__func__, ".__func__")]
            return "method"
        if isinstance(value, functools.partial):
            children += [(value.func, ".func"), (value.args, ".args"), (value.keywords, ".keywords")]
            return "partial"
        if isinstance(value, _BUILTINS):
            owner = getattr(value, "__self__", None)
            children.append((None if isinstance(owner, (types.ModuleType, type)) else owner, ".__self__"))
            return ("builtin", value.__qualname__)
        if isinstance(value, types.ModuleType) or kind.__module__.partition(".")[0] in ("logging", "pygraph"):
            return ("opaque", id(value))
        if isinstance(value, type):
            return self._class(value, children)
        if isinstance(value, weakref.ref):
            children.append((value(), "()"))
            return "weakref"
        if isinstance(value, _DESCRIPTORS):
            return ("descriptor", id(value))
        if hasattr(kind, "__next__"):
            return self._refuse(entry, "iterator", "what it gives next cannot be seen")
        if kind.__module__.partition(".")[0] == "numpy":
            return self._array(value, entry)
        token = self._items(value, entry, children)
        return self._attributes(value, kind, entry, children, token)

    def _refuse(self, entry: int, reason: str, detail: str) -> Hashable:
        self.refusal = self.refusal or Refusal(reason, f"{self.path(entry)}: {detail}")
        return None

    def _tensor(self, tensor: torch.Tensor, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        leaf = tensor.is_leaf
        if leaf:
            gradient = tensor.grad
            self.holders.append(_Holder(entry, tensor, "grad", ("grad",), (gradient,)))
            children.append((gradient, ".grad"))
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks:
                children.append((hooks, f".{name}"))
                for hook in hooks.values():
                    self._may_run(hook)
        attributes = tensor.__dict__
        if attributes:
            children.append((attributes, ".__dict__"))
        strided = tensor.layout is torch.strided
        layout = (tensor.stride(), tensor.untyped_storage().nbytes() > 0) if strided else str(tensor.layout)
        facts = (tensor.size(), layout, tensor.dtype, tensor.device, tensor.requires_grad, leaf)
        return ("tensor", type(tensor), *facts)

    def _may_run(self, hook: Any) -> None:
        """Autograd may call ``hook`` on a thread of its own, which nobody watches."""
        function = getattr(hook, "__func__", hook)
        if isinstance(function, types.FunctionType) and not _is_library(function.__module__):
            self._executed.add(function.__code__, function.__globals__)

    def _function(self, function: types.FunctionType, children: list[tuple[Any, str]]) -> Hashable:
        if _is_library(function.__module__):
            return ("function", id(function))
        self.codes[function.__code__] = None
        names = function.__code__.co_freevars
        children += [(cell, f"<{name}>") for name, cell in zip(names, function.__closure__ or (), strict=True)]
        children.append((function.__defaults__, ".__defaults__"))
        children.append((function.__kwdefaults__, ".__kwdefaults__"))
        if function.__dict__:
            children.append((function.__dict__, ""))
        return ("function", function.__code__)

    def _class(self, cls: type, children: list[tuple[Any, str]]) -> Hashable:
        if _is_library(cls.__module__):
            return cls
        held: list[tuple[str, Any]] = []
        same: list[Hashable] = []
        for name, value in vars(cls).items():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, types.FunctionType):
                same.append((name, id(inner)))
                if inner.__closure__ or inner.__defaults__ or inner.__kwdefaults__:
                    children.append((inner, f".{name}"))
                if issubclass(cls, torch.autograd.Function):
                    self._executed.add(inner.__code__, inner.__globals__)
            elif not (name.startswith("__") and name.endswith("__")) and not hasattr(type(value), "__get__"):
                held.append((name, value))
        self.holders.append(_Holder(len(self.tokens), cls, "slots", *_columns(held)))
        children += [(value, f".{name}") for name, value in held]
        children += [(base, "") for base in cls.__bases__ if not _is_library(base.__module__)]
        return (cls, tuple(same), tuple(name for name, _ in held))

    def _array(self, array: Any, entry: int) -> Hashable:
        """An array or scalar of numpy, or what belongs to one: compared by its contents."""
        if not hasattr(array, "tobytes"):
            return ("opaque", id(array))
        if array.nbytes > _LARGE or array.dtype.hasobject:
            return self._refuse(entry, "large-array", f"an array of {array.nbytes} bytes")
        return (type(array), array.dtype.str, array.shape, array.tobytes())

    def _items(self, value: Any, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        """What a container holds."""
        if isinstance(value, dict):
            self.holders.append(_Holder(entry, value, "dict", tuple(value), tuple(value.values())))
            keys: list[Hashable] = []
            for key, item in value.items():
                plain = isinstance(key, _LEAVES)
                keys.append(bits(key) if plain else None)
                if not plain:
                    children.append((key, "<key>"))
                children.append((item, f"[{key!r}]" if plain else "[…]"))
            if isinstance(value, collections.defaultdict):
                children.append((value.default_factory, ".default_factory"))
            return tuple(keys)
        if isinstance(value, (list, tuple, collections.deque)):
            if not isinstance(value, tuple):
                how = "list" if isinstance(value, list) else "fixed"
                self.holders.append(_Holder(entry, value, how, tuple(range(len(value))), tuple(value)))
            children += [(item, f"[{index}]") for index, item in enumerate(value)]
            return len(value)
        if isinstance(value, (set, frozenset)):
            if not isinstance(value, frozenset):
                self.holders.append(_Holder(entry, value, "fixed", tuple(range(len(value))), tuple(value)))
            if all(isinstance(item, _LEAVES) for item in value):
                return frozenset(map(bits, value))
            children += [(item, "<item>") for item in value]
            return len(value)
        return None

    def _attributes(
        self, value: Any, kind: type, entry: int, children: list[tuple[Any, str]], token: Hashable
    ) -> Hashable:
        """The attributes of an object, beside what it holds."""
        attributes = getattr(value, "__dict__", None)
        names = [name for cls in kind.__mro__ for name in _slots(cls)]
        if isinstance(attributes, dict):
            self.holders.append(_Holder(entry, attributes, "dict", tuple(attributes), tuple(attributes.values())))
            children += [(item, f".{name}") for name, item in attributes.items()]
            token = (token, tuple(attributes))
        if names:
            held = [(name, getattr(value, name, _MISSING)) for name in names]
            self.holders.append(_Holder(entry, value, "slots", *_columns(held)))
            children += [(item, f".{name}") for name, item in held if item is not _MISSING]
        if not _is_library(kind.__module__):
            children.append((kind, ""))
        elif token is None and not names:
            return ("opaque", kind, self._contents_of(value))
        return (kind, token)

    def _contents_of(self, value: Any) -> Hashable:
        """What tells an object apart that cannot be looked into."""
        try:
            view = memoryview(value)
        except TypeError:
            return id(value)
        return view.tobytes() if view.nbytes <= _LARGE else id(value)

    def _globals(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """The globals that code names, and those of modules that it names the attributes of."""
        known = tuple(name for name in names if name in namespace)
        self.tokens.append(("globals", namespace.get("__name__"), known))
        self._from.append((-1, ""))
        values = tuple(namespace[name] for name in known)
        self.holders.append(_Holder(len(self.tokens) - 1, namespace, "globals", known, values))
        for name, value in reversed(list(zip(known, values, strict=True))):
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                inner = vars(value)
                kept = tuple(each for each in names if each in inner and not isinstance(inner[each], types.ModuleType))
                self.holders.append(
                    _Holder(len(self.tokens) - 1, inner, "globals", kept, tuple(inner[each] for each in kept))
                )
                self._waiting.extend((inner[each], -1, f"{name}.{each}") for each in reversed(kept))
            self._waiting.append((value, -1, name))

    def _aliases(self) -> Iterator[Hashable]:
        """Which tensors share memory, and how far apart they begin (in bytes)."""
        groups: dict[int, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            if tensor.layout is torch.strided:
                groups.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        for members in groups.values():
            if len(members) > 1:
                offsets = [self.tensors[n].storage_offset() * self.tensors[n].element_size() for n in members]
                yield tuple((n, offset - offsets[0]) for n, offset in zip(members, offsets, strict=True))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _columns(pairs: Sequence[tuple[str, Any]]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    return tuple(name for name, _ in pairs), tuple(value for _, value in pairs)


def _slots(cls: type) -> Iterable[str]:
    names = vars(cls).get("__slots__", ())
    names = (names,) if isinstance(names, str) else names
    plain = (name for name in names if name not in ("__dict__", "__weakref__"))
    return [f"_{cls.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in plain]


def _same(before: Any, now: Any) -> bool:
    """Whether a place holds what it held: the same object, or a plain value with the same bits."""
    return before is now or (type(before) is type(now) and isinstance(now, _LEAVES) and bits(before) == bits(now))


def _shown(token: Hashable) -> str:
    """A token as a reader would write it."""
    if isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], str):
        return _float(token[1]) if token[0] == "float" else repr(token[1])
    return repr(token)


def _float(packed: Any) -> str:
    return repr(struct.unpack("<d", packed)[0]) if isinstance(packed, bytes) else repr(packed)
