"""Everything that a step can read: walked from its arguments, its function, and the globals that its code names.

A walk gives tokens, equal for states in which a deterministic step does the same, and every tensor in a fixed order. It
can say afterwards which places have changed.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import datetime
import enum
import functools
import pickle
import random
import struct
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import bits
from pygraph.training.tape import user_line

__all__ = ["Change", "Executed", "Unchanged", "Walk"]

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

_OF_CLASSES = frozenset(
    {
        "__doc__",
        "__module__",
        "__qualname__",
        "__annotations__",
        "__slots__",
        "__firstlineno__",
        "__static_attributes__",
    }
    | {"__parameters__", "__orig_bases__", "__match_args__", "__dataclass_fields__", "__dataclass_params__", "__hash__"}
)
"""What classes hold that says nothing of what they do."""

_MISSING = object()


class _Is:
    """A token for an object that is not looked into: equal for the same one. It is kept alive, so that no other ever
    has its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return type(self.value).__name__


@functools.lru_cache(maxsize=4096)
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
    version: int = 0
    """Counts up with the code that is known."""
    refusal: Refusal | None = None

    def add(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Note code that runs, or may."""
        if code not in self.codes:
            self.codes[code] = None
            self.version += 1
            names = self.names.setdefault(id(namespace), (namespace, {}))[1]
            for each in _nested(code):
                names.update(dict.fromkeys(each.co_names))

    def may_run(self, function: Any) -> None:
        """Note a function of the user's that threads of autograd may call, which nobody watches, and what it names."""
        waiting = [function]
        while waiting:
            each = waiting.pop()
            each = getattr(each, "__func__", each)
            if isinstance(each, types.FunctionType) and each.__code__ not in self.codes:
                if not _is_library(each.__globals__.get("__name__")):
                    self.add(each.__code__, each.__globals__)
                    waiting += [each.__globals__.get(name) for code in _nested(each.__code__) for name in code.co_names]
                waiting += [_contents(cell) for cell in each.__closure__ or ()]

    def runs(self, function: types.FunctionType) -> bool:
        """Whether a function is known to run, or what it wraps is; True for wrappers of which that is not known."""
        inner: Any = function
        while isinstance(getattr(inner, "__wrapped__", None), types.FunctionType):
            inner = inner.__wrapped__
        return inner.__code__ in self.codes or _is_library(inner.__globals__.get("__name__"))

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
            elif frame.f_code.co_name == _COMPILED[1] and frame.f_globals.get("__name__") == _COMPILED[0]:
                detail = "torch.compile does not run its own program while operators are written down"
                self.refusal = self.refusal or Refusal("compiled-function", detail, None, user_line(frame))
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
        outside = getattr(function, "__module__", None) in _OUTSIDE or type(owner).__module__ == "_io"
        if outside or any(owner is each for each in _CLOCKS) or any(function is each for each in _EFFECTS):
            detail = "a replay would leave out what it does besides tensors, or repeat what it returned"
            self.refusal = Refusal("host-effect", detail, name, user_line(frame))


_COMPILED = ("torch._dynamo.eval_frame", "compile_wrapper")
"""Module and name of the function that stands for a compiled one."""
_HOST_READS = ("numpy", "tolist", "__dlpack__")
_ADDRESSES = ("data_ptr", "untyped_storage", "_typed_storage", "storage", "__array__")
_EFFECTS = (print, input, open, globals, eval, exec)
_OUTSIDE = ("time", "posix", "nt", "_socket")
_CLOCKS = (datetime.datetime, datetime.date)


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
    """One look at everything that is reachable from ``roots``, which have names, and from the globals that are named.

    ``tokens`` are the state; ``tensors`` and ``holders`` come in the same order where tokens are equal. ``refusal``
    names what cannot be looked into. Everything that was met is kept alive. With a ``base``, an earlier walk that still
    holds, this one goes on from it.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], executed: Executed, base: Walk | None = None) -> None:
        self.base = base
        self.version = executed.version
        self.tokens: list[Hashable] = []
        self.tensors: list[torch.Tensor] = [] if base is None else base.tensors.copy()
        self.holders: list[_Holder] = [] if base is None else base.holders.copy()
        self.codes: dict[types.CodeType, None] = {} if base is None else base.codes
        self.refusal: Refusal | None = None
        self._first = 0 if base is None else len(base.tokens)
        self._objects: dict[int, Any] = {}
        self._from: list[tuple[int, str]] = []
        self._seen: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}
        self._gradients: dict[int, int] = {}
        """The holder of the gradient of each tensor, by its number."""
        self._again: set[int] = set()
        """Entries that were met more than once."""
        self._waiting: list[tuple[Any, int, str]] = []
        self._instances: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._classes: list[type] = []
        self._referents: list[tuple[Callable[[], Any], Any]] = []
        """How an object is asked for, and what it was."""
        self._contents: list[tuple[Callable[[], Hashable], Hashable]] = []
        """How something is read that is compared by its contents, and what it was."""
        self._executed = executed
        for name, value in roots:
            self._waiting.append((value, -1, name))
            self._run()
        done: set[int] = set()
        while base is None and any(key not in done for key in executed.names):  # functions that are met may name more
            for key, (namespace, names) in list(executed.names.items()):
                if key not in done:
                    done.add(key)
                    self._globals(namespace, tuple(names))
                    self._run()
        self.tokens.append(tuple(self._aliases()))

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that was met."""
        found = self._numbers.get(id(tensor))
        return found if found is not None or self.base is None else self.base.number(tensor)

    def entry(self, value: Any) -> int | None:
        """The entry of an object that was met, other than of a plain value."""
        found = self._seen.get(id(value))
        return found if found is not None or self.base is None else self.base.entry(value)

    def object(self, entry: int) -> Any:
        """The object of an entry."""
        return self._objects[entry] if self.base is None or entry >= self._first else self.base.object(entry)

    def path(self, entry: int) -> str:
        """How an entry is reached, as Python code would have it."""
        parts: list[str] = []
        while entry >= 0:
            walk = self if self.base is None or entry >= self._first else self.base
            entry, step = walk._from[entry - walk._first]
            parts.append(step)
        return "".join(reversed(parts))

    def differs(self, other: Walk) -> str:
        """The first place at which another walk has something else."""
        for entry, (mine, its) in enumerate(zip(self._every(), other._every(), strict=False)):
            if mine != its:
                return f"{self._place(entry)}: {_shown(mine)} became {_shown(its)}"
        return "more or fewer objects"

    def _every(self) -> list[Hashable]:
        return self.tokens if self.base is None else self.base.tokens + self.tokens

    def _place(self, entry: int) -> str:
        walk = self if self.base is None or entry >= self._first else self.base
        return self.path(entry) if entry - walk._first < len(walk._from) else "shared memory"

    def trail(self) -> Walk:
        """This walk, for ``differs`` alone: nothing that was met is kept alive any more."""
        trail = copy.copy(self)
        trail.base = None if self.base is None else self.base.trail()
        trail.tensors, trail.holders, trail.codes = [], [], {}
        trail._objects, trail._seen, trail._numbers, trail._storages = {}, {}, {}, {}
        trail._instances, trail._functions, trail._classes = [], [], []
        trail._referents, trail._contents, trail._executed = [], [], Executed()
        return trail

    def changes(self) -> list[Change]:
        """What is held in another place than at the time of the walk, tensors' own values aside. Raises CaptureError
        for what cannot be done again."""
        found: list[Change] = []
        for index, holder in enumerate(self.holders):
            keys, values = holder.now()
            same_keys = len(keys) >= len(holder.keys) and all(map(_same, holder.keys, keys))
            if not same_keys or (len(keys) > len(holder.keys) and holder.kind != "dict"):
                raise CaptureError("python-state", f"the step adds to or takes from {self.path(holder.entry)}")
            for position, (key, value) in enumerate(zip(keys, values, strict=True)):
                before = holder.values[position] if position < len(holder.values) else _MISSING
                if not _same(before, value):
                    if holder.kind == "fixed" or value is _MISSING:
                        raise CaptureError("python-state", f"the step changes {self.path(holder.entry)}")
                    found.append(Change(index, key, value))
        return found

    def replace_gradient(self, index: int, now: Any) -> bool:
        """Have this walk hold ``now`` for what holder ``index`` held, as if it had met that instead. False, with
        nothing done, unless both are gradients that nothing else refers to, and are alike."""
        holder = self.holders[index] if index < len(self.holders) else None
        before = holder.values[0] if holder is not None and holder.kind == "grad" else None
        if before is None or type(now) is not torch.Tensor or _LIKE(before) != _LIKE(now):
            return False
        number, entry, storage = self._numbers[id(before)], self._seen[id(before)], before.untyped_storage()._cdata
        own = self._gradients[number]
        if entry in self._again or len(self._storages[storage]) > 1 or self.holders[own].values[0] is not None:
            return False
        if before.stride() != now.stride() or now.untyped_storage()._cdata in self._storages:
            return False
        self.holders[index] = replace(self.holders[index], values=(now,))
        self.holders[own] = replace(self.holders[own], owner=now)
        self.tensors[number] = self._objects[entry] = now
        self._numbers[id(now)] = self._numbers.pop(id(before))
        self._seen[id(now)] = self._seen.pop(id(before))
        self._storages[now.untyped_storage()._cdata] = self._storages.pop(storage)
        return True

    # -- one object ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting = self._waiting
        while waiting and self.refusal is None:
            if len(self.tokens) > _MOST:
                self.refusal = Refusal("too-much-state", f"more than {_MOST} objects are within the step's reach")
                return
            value, parent, step = waiting.pop()
            self._from.append((parent, step))
            self._visit(value, self._first + len(self.tokens))

    def _visit(self, value: Any, entry: int) -> None:
        kind = type(value)
        if isinstance(value, _LEAVES) or kind in _TORCH_LEAVES:
            self.tokens.append(bits(value))
            return
        if kind not in (tuple, frozenset):  # those may be one object or several, which makes no difference
            known = self.entry(value)
            if known is not None:
                self.tokens.append(("same", known))
                self._again.add(known)
                return
            self._seen[id(value)] = entry
        self._objects[entry] = value
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
        if kind.__name__ == "cython_function_or_method":
            children.append((getattr(value, "__self__", None), ".__self__"))
            return "method"
        home = kind.__module__.partition(".")[0]
        if isinstance(value, types.ModuleType) or home in ("logging", "pygraph"):
            return _Is(value)
        if isinstance(value, type):
            return self._class(value, entry, children)
        if isinstance(value, (weakref.ref, contextvars.ContextVar)):
            read = value if isinstance(value, weakref.ref) else functools.partial(value.get, None)
            self._referents.append((read, read()))
            children.append((read(), "()"))
            return "reference"
        if isinstance(value, random.Random):
            return self._read(value.getstate)
        if isinstance(value, _DESCRIPTORS):
            return _Is(value)
        if hasattr(kind, "__next__"):
            return self._refuse(entry, "iterator", "what it gives next cannot be seen")
        if home == "numpy":
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
            self._gradients[self._numbers[id(tensor)]] = len(self.holders)
            self.holders.append(_Holder(entry, tensor, "grad", ("grad",), (gradient,)))
            children.append((gradient, ".grad"))
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks:
                children.append((hooks, f".{name}"))
                for hook in hooks.values():
                    self._executed.may_run(hook)
        attributes = tensor.__dict__
        if attributes:
            children.append((attributes, ".__dict__"))
        strided = tensor.layout is torch.strided
        layout = (tensor.stride(), tensor.untyped_storage().nbytes() > 0) if strided else str(tensor.layout)
        facts = (tensor.size(), layout, tensor.dtype, tensor.device, tensor.requires_grad, leaf)
        return ("tensor", type(tensor), *facts)

    def _function(self, function: types.FunctionType, children: list[tuple[Any, str]]) -> Hashable:
        if _is_library(function.__module__):
            return _Is(function)
        self._functions.append(function)
        if self._executed.runs(function):
            self.codes[function.__code__] = None
            names = function.__code__.co_freevars
            children += [(cell, f"<{name}>") for name, cell in zip(names, function.__closure__ or (), strict=True)]
            children.append((function.__defaults__, ".__defaults__"))
            children.append((function.__kwdefaults__, ".__kwdefaults__"))
        if function.__dict__:
            children.append((function.__dict__, ""))
        return ("function", function.__code__)

    def _class(self, cls: type, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        if _is_library(cls.__module__):
            return cls
        self._classes.append(cls)
        held: list[tuple[str, Any]] = []
        same: list[Hashable] = []
        for name, value in vars(cls).items():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, types.FunctionType):
                same.append((name, _Is(inner)))
                if issubclass(cls, torch.autograd.Function):
                    self._executed.may_run(inner)
                if self._executed.runs(inner):
                    children.append((inner, f".{name}"))
            elif hasattr(type(value), "__get__"):
                children.append((value, f".{name}"))  # to ask the class for it would call it
            elif name not in _OF_CLASSES:
                held.append((name, value))
        self.holders.append(_Holder(entry, cls, "slots", *_columns(held)))
        children += [(value, f".{name}") for name, value in held]
        children += [(base, "") for base in cls.__bases__ if not _is_library(base.__module__)]
        return (cls, tuple(same), tuple(name for name, _ in held))

    def _array(self, value: Any, entry: int) -> Hashable:
        """An array, scalar or generator of numpy, compared by its contents, or whatever else it has."""
        if hasattr(value, "bit_generator"):
            return self._read(lambda: pickle.dumps(value.bit_generator.state))
        if hasattr(value, "get_state"):
            return self._read(lambda: pickle.dumps(value.get_state()))
        if not hasattr(value, "tobytes"):
            return _Is(value)
        if value.nbytes > _LARGE or value.dtype.hasobject:
            return self._refuse(entry, "large-array", f"an array of {value.nbytes} bytes")
        return (type(value), value.dtype.str, value.shape, self._read(value.tobytes))

    def _read(self, read: Callable[[], Hashable]) -> Hashable:
        """What is compared by its contents."""
        self._contents.append((read, read()))
        return self._contents[-1][1]

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
        names = _slots(kind)
        if isinstance(attributes, dict):
            self.holders.append(_Holder(entry, attributes, "dict", tuple(attributes), tuple(attributes.values())))
            children += [(item, f".{name}") for name, item in attributes.items()]
            self._instances.append(value)
            if isinstance(value, torch.nn.Module):
                for name in ("_backward_hooks", "_backward_pre_hooks"):
                    for hook in attributes[name].values():
                        self._executed.may_run(hook)
            token = (token, tuple(attributes))
        if names:
            held = [(name, getattr(value, name, _MISSING)) for name in names]
            self.holders.append(_Holder(entry, value, "slots", *_columns(held)))
            children += [(item, f".{name}") for name, item in held if item is not _MISSING]
        if not _is_library(kind.__module__):
            children.append((kind, ""))
        elif token is None and not names and not _has_buffer(kind, value):
            return _Is(value)
        if not _has_buffer(kind, value):
            return (kind, token)
        if memoryview(value).nbytes > _LARGE:
            return self._refuse(entry, "large-array", f"a buffer of {memoryview(value).nbytes} bytes")
        return (kind, token, self._read(lambda: memoryview(value).tobytes()))

    def _globals(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """The globals that code names, and those of modules that it names the attributes of."""
        known = tuple(name for name in names if name in namespace)
        self.tokens.append(("globals", namespace.get("__name__"), known))
        self._from.append((-1, ""))
        values = tuple(namespace[name] for name in known)
        entry = self._first + len(self.tokens) - 1
        self.holders.append(_Holder(entry, namespace, "globals", known, values))
        found = dict(zip(known, values, strict=True))
        modules = dict(found)
        while modules:
            path, module = modules.popitem()
            if not isinstance(module, types.ModuleType) or _is_library(module.__name__):
                continue
            inner = {name: vars(module)[name] for name in names if name in vars(module)}
            self.holders.append(_Holder(entry, vars(module), "globals", tuple(inner), tuple(inner.values())))
            for name, value in inner.items():
                if not any(value is each for each in found.values()):
                    found[f"{path}.{name}"] = modules[f"{path}.{name}"] = value
        self._waiting.extend((value, -1, path) for path, value in reversed(found.items()))

    def _aliases(self) -> Iterator[Hashable]:
        """Which tensors share memory, and how far apart they begin (in bytes)."""
        first = 0 if self.base is None else len(self.base.tensors)
        for number, tensor in enumerate(self.tensors[first:], first):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()._cdata
                earlier = [] if self.base is None else self.base._storages.get(storage, [])
                self._storages.setdefault(storage, earlier.copy()).append(number)
        for members in self._storages.values():
            if len(members) > 1:
                offsets = [self.tensors[n].storage_offset() * self.tensors[n].element_size() for n in members]
                yield tuple((n, offset - offsets[0]) for n, offset in zip(members, offsets, strict=True))


# -- whether a walk still holds ----------------------------------------------------------------------------------------


_FACTS = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "dtype", "device")
_LIKE = attrgetter("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "__dict__", "_backward_hooks")
_SIZE = attrgetter("shape")
_GRADIENT = attrgetter("grad")
_ATTRIBUTES = attrgetter("__dict__")
_CONTENTS = attrgetter("cell_contents")
_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_VALUES = methodcaller("values")


class Unchanged:
    """Tells whether everything that a walk met holds the very same objects as then: asked by ``holds()``.

    No Python code runs for a single object. A plain value that is equal but another object counts as a change.
    """

    def __init__(self, walk: Walk) -> None:
        self._tensors = walk.tensors
        self._facts = list(map(_FACTS, self._tensors))
        self._sizes = list(map(_SIZE, self._tensors))
        self._extended = list(map(bool, map(_ATTRIBUTES, self._tensors)))
        holders: dict[str, list[_Holder]] = {}
        for holder in walk.holders:
            holders.setdefault(holder.kind, []).append(holder)
        self._leaves = [holder.owner for holder in holders.get("grad", ())]
        self._gradients = [holder.values[0] for holder in holders.get("grad", ())]
        dicts = holders.get("dict", [])
        self._empty = [holder.owner for holder in dicts if not holder.keys]
        self._dicts = [holder.owner for holder in dicts if holder.keys] + list(map(vars, walk._classes))
        self._lengths = list(map(len, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(_VALUES, self._dicts)))
        self._lists = [holder.owner for holder in holders.get("list", []) + holders.get("fixed", [])]
        self._counts = list(map(len, self._lists))
        self._items = list(chain.from_iterable(self._lists))
        self._cells = [holder.owner for holder in holders.get("cell", ())]
        self._contents = list(map(_contents, self._cells))
        self._slots = [each for each in holders.get("slots", ()) if each.keys]
        self._globals = [each for each in holders.get("globals", ()) if each.keys]
        self._instances, self._types = walk._instances, list(map(type, walk._instances))
        self._attributes = list(map(_ATTRIBUTES, self._instances))
        self._functions = walk._functions
        self._parts = list(chain.from_iterable(map(_PARTS, self._functions)))
        self._referents, self._read = walk._referents, walk._contents
        self._groups = [members for members in walk._storages.values() if len(members) > 1]
        self._distances = self._apart()

    def holds(self) -> bool:
        """Whether nothing changed."""
        try:
            return (
                all(map(is_, self._gradients, map(_GRADIENT, self._leaves)))
                and not any(self._empty)
                and self._lengths == list(map(len, self._dicts))
                and all(map(is_, self._keys, chain.from_iterable(self._dicts)))
                and all(map(is_, self._values, chain.from_iterable(map(_VALUES, self._dicts))))
                and self._counts == list(map(len, self._lists))
                and all(map(is_, self._items, chain.from_iterable(self._lists)))
                and all(map(is_, self._contents, map(_CONTENTS, self._cells)))
                and all(map(is_, self._types, map(type, self._instances)))
                and all(map(is_, self._attributes, map(_ATTRIBUTES, self._instances)))
                and all(map(is_, self._parts, chain.from_iterable(map(_PARTS, self._functions))))
                and self._facts == list(map(_FACTS, self._tensors))
                and self._sizes == list(map(_SIZE, self._tensors))
                and self._extended == list(map(bool, map(_ATTRIBUTES, self._tensors)))
                and all(all(map(is_, each.values, each.now()[1])) for each in self._slots)
                and all(all(map(is_, each.values, map(each.owner.get, each.keys))) for each in self._globals)
                and all(read() is value for read, value in self._referents)
                and all(read() == value for read, value in self._read)
                and self._distances == self._apart()
            )
        except ValueError:  # a cell that was emptied
            return False

    def replace_gradient(self, before: torch.Tensor, now: torch.Tensor) -> None:
        """What the walk was told by its ``replace_gradient``."""
        for kept in (self._leaves, self._gradients):
            at = next(index for index, each in enumerate(kept) if each is before)
            kept[at] = now

    def _apart(self) -> list[int]:
        """How far apart tensors begin that share memory (in bytes)."""
        groups = ([self._tensors[number].data_ptr() for number in members] for members in self._groups)
        return [address - group[0] for group in groups for address in group]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _columns(pairs: Sequence[tuple[str, Any]]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    return tuple(name for name, _ in pairs), tuple(value for _, value in pairs)


_buffers: dict[type, bool] = {}
"""Whether objects of a type show their memory."""


def _has_buffer(kind: type, value: Any) -> bool:
    if kind not in _buffers:
        try:
            memoryview(value)
            _buffers[kind] = True
        except TypeError:
            _buffers[kind] = False
    return _buffers[kind]


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    """The attributes of a type's instances that are in no dictionary."""
    found: list[str] = []
    for cls in kind.__mro__:
        names = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return tuple(found)


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
