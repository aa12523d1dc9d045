"""Everything that a step can read: walked from its arguments, its function, and the globals that its code names.

A walk gives tokens, equal for states in which a deterministic step does the same, and every tensor in a fixed order. It
can say afterwards which places have changed. What an object refers to is what Python's garbage collector finds in it.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import datetime
import functools
import gc
import pickle
import struct
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import attrgetter, is_
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import bits
from pygraph.training.tape import user_line

__all__ = ["Change", "Executed", "Walk"]

_MOST = 100_000
"""Objects that are looked at in one walk."""

_LARGE = 1 << 16
"""Bytes of an array outside of torch that is compared by its contents."""

_PLAIN = (int, float, complex, str, bytes)
_LEAVES = frozenset(
    {*_PLAIN, bool, type(None), type(...), type(NotImplemented), range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_INERT = (types.ModuleType, types.CodeType, types.FrameType, types.TracebackType)
"""Objects that are compared by identity alone."""
_TRANSPARENT = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial, slice)
"""Objects that are what they refer to."""
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_CACHED = type(functools.lru_cache(lambda: None))
_READ = ("getstate", "locked", "initial_seed")
"""Methods that tell what an object outside of Python's memory holds."""

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
    | {"_abc_impl"}
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
    refusal: Refusal | None = None

    def add(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Note code that runs, or may."""
        if code not in self.codes:
            self.codes[code] = None
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
                waiting += [_attribute(cell, "cell_contents") for cell in each.__closure__ or ()]

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
        outside = getattr(function, "__module__", None) in _OUTSIDE or type(owner).__module__ in ("_io", "_hashlib")
        outside = outside or (name == "initial_seed" and any(owner is each for each in _default_generators()))
        if outside or any(owner is each for each in _CLOCKS) or any(function is each for each in _EFFECTS):
            detail = "a replay would leave out what it does besides tensors, or repeat what it returned"
            self.refusal = Refusal("host-effect", detail, name, user_line(frame))


def _default_generators() -> tuple[torch.Generator, ...]:
    """Those that no walk reaches."""
    return torch.default_generator, *torch.cuda.default_generators


_COMPILED = ("torch._dynamo.eval_frame", "compile_wrapper")
"""Module and name of the function that stands for a compiled one."""
_HOST_READS = ("numpy", "tolist", "__dlpack__")
_ADDRESSES = ("data_ptr", "storage_offset", "untyped_storage", "_typed_storage", "storage", "__array__")
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
    kind: str  # dict, list, fixed (a set or a deque), names (some of a dictionary), attributes, grads (of tensors)
    keys: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()

    def now(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Keys and values as they are."""
        owner = self.owner
        match self.kind:
            case "dict":
                return tuple(owner), tuple(owner.values())
            case "list" | "fixed":
                return tuple(range(len(owner))), tuple(owner)
            case "grads":
                return tuple(range(len(owner))), tuple(map(_GRAD, owner))
            case "names":
                return self.keys, tuple(owner.get(name, _MISSING) for name in self.keys)
            case _:
                return self.keys, tuple(_attribute(owner, name) for name in self.keys)

    def put(self, key: Any, value: Any) -> None:
        """Have it hold ``value`` under ``key``."""
        if self.kind == "attributes":
            setattr(self.owner, key, value)
        elif self.kind == "grads":
            self.owner[key].grad = value
        else:
            self.owner[key] = value


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
    holds, this one goes on from it, with the gradients of the tensors there.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], executed: Executed, base: Walk | None = None) -> None:
        self.base = base
        self.tokens: list[Hashable] = []
        self.tensors: list[torch.Tensor] = [] if base is None else base.tensors.copy()
        self.holders: list[_Holder] = [] if base is None else base.holders.copy()
        self.codes: dict[types.CodeType, None] = {} if base is None else base.codes
        self.refusal: Refusal | None = None
        self.weak = False
        """Whether weak references alone lead to something that was met: to keep this walk would keep it alive."""
        self._references: list[tuple[Any, int]] = []
        """Weak references that are not followed yet, and their entries: all others come first."""
        self._first = 0 if base is None else len(base.tokens)
        self._objects: dict[int, Any] = {}
        self._from: list[tuple[int, str]] = []
        self._seen: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}
        self._leaves: list[tuple[torch.Tensor, int]] = []
        """Tensors with gradients that are not walked yet, and their entries."""
        self._waiting: list[tuple[Any, int, str]] = []
        self._instances: list[Any] = []
        self._fixed: list[tuple[Any, list[Any], int]] = [] if base is None else base._fixed.copy()
        """Objects that nothing can be put into here, what they refer to, and their entries."""
        self._referents: list[Callable[[], Any]] = []
        """How objects are asked for that nothing here refers to."""
        self._contents: list[tuple[Callable[[], Hashable], Hashable, int]] = (
            [] if base is None else base._contents.copy()
        )
        """How something is read that is compared by its contents, what it was, and the entry."""
        self._executed = executed
        self._version = len(executed.codes)
        self._kept: tuple[list[Any], list[Any]] | None = None
        for name, value in roots:
            self._waiting.append((value, -1, name))
            self._run()
        if base is not None:
            self._leaves = base._leaves + self._leaves
            while self._leaves:
                self._gradients()
                self._run()
        done: set[int] = set()
        self._named_globals(done)
        while self._references:
            reference, entry = self._references.pop(0)
            target = reference()
            self.weak = self.weak or (target is not None and self.entry(target) is None)
            self._waiting.append((target, entry, "()"))
            self._run()
            self._named_globals(done)
        self.tokens.append(tuple(self._aliases()))

    def _named_globals(self, done: set[int]) -> None:
        """Walk the globals that code names, but those that are ``done``: functions that are met may name more."""
        executed = self._executed
        while self.base is None and any(key not in done for key in executed.names):
            for key, (namespace, names) in list(executed.names.items()):
                if key not in done:
                    done.add(key)
                    self._globals(namespace, tuple(names))
                    self._run()

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

    def every(self) -> list[Hashable]:
        """The tokens, with those of the base."""
        return self.tokens if self.base is None else self.base.tokens + self.tokens

    def differs(self, earlier: Sequence[Hashable]) -> str:
        """The first place at which an earlier walk, with these tokens, had something else."""
        for entry, (its, mine) in enumerate(zip(earlier, self.every(), strict=False)):
            if mine != its:
                return f"{self._place(entry)}: {_shown(its)} became {_shown(mine)}"
        return "more or fewer objects"

    def _place(self, entry: int) -> str:
        walk = self if self.base is None or entry >= self._first else self.base
        return self.path(entry) if entry - walk._first < len(walk._from) else "shared memory"

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
        changed = [entry for read, contents, entry in self._contents if read() != contents]
        changed += [entry for value, before, entry in self._fixed if not _are(gc.get_referents(value), before)]
        if changed:
            raise CaptureError("python-state", f"the step changes {self.path(changed[0])}")
        return found

    # -- whether it still holds ----------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Note what everything that was met refers to, for ``holds``."""
        if self._kept is None:
            self._dicts = [holder.owner for holder in self.holders if holder.kind == "dict"]
            fixed = [value for value, _, _ in self._fixed]
            self._dicts += [gc.get_referents(vars(each))[0] for each in fixed if isinstance(each, type)]
            held = [holder.owner for holder in self.holders if holder.kind in ("list", "fixed")]
            mark = (_MISSING,)  # between two objects, so that nothing moves from one to the next unseen
            self._watched = [each for one in (*self._dicts, *held, *fixed) for each in (one, mark)]
            self._named = [each for each in self.holders if each.kind in ("names", "attributes")]
            self._strided = [each for each in self.tensors if each.layout is torch.strided]
            self._kept = self._now()

    def holds(self) -> bool:
        """Whether everything that was met, gradients aside, refers to the very same objects as when it was kept.

        A plain value that is equal but another object counts as a change.
        """
        if self._kept is None or self._version != len(self._executed.codes):
            return False
        (same, equal), (was, before) = self._now(), self._kept
        return _are(same, was) and equal == before

    def _now(self) -> tuple[list[Any], list[Any]]:
        """What is compared by identity, and what by value. Python code runs for few single objects."""
        same = gc.get_referents(*self._watched)
        same += chain.from_iterable(self._dicts)
        same += map(type, self._instances)
        same += map(_ATTRIBUTES, self._instances)
        same += chain.from_iterable(each.now()[1] for each in self._named)
        same += [read() for read in self._referents]
        equal: list[Any] = [*map(_FACTS, self.tensors), *map(torch.Tensor.stride, self._strided)]
        equal += map(bool, map(_ATTRIBUTES, self.tensors))
        equal += [read() for read, _, _ in self._contents]
        for members in self._storages.values():
            if len(members) > 1:
                addresses = [self.tensors[number].data_ptr() for number in members]
                equal += [address - addresses[0] for address in addresses]
        return same, equal

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
        if kind in _LEAVES:
            self.tokens.append(bits(value))
            return
        if kind not in (tuple, frozenset):  # those may be one object or several, which makes no difference
            known = self.entry(value)
            if known is not None:
                self.tokens.append(("same", known))
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
        if isinstance(value, (types.FunctionType, _CACHED)) and _is_library(value.__module__):
            return _Is(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, entry, children)
        if isinstance(value, types.CellType):
            (contents,) = self._hold(entry, value, "attributes", "cell_contents")
            children.append((None if contents is _MISSING else contents, ""))
            return ("cell", contents is _MISSING)
        home = kind.__module__.partition(".")[0]
        if isinstance(value, _INERT) or home in ("logging", "pygraph"):
            return _Is(value)
        if isinstance(value, type):
            return self._class(value, entry, children)
        if kind.__name__ == "cython_function_or_method":
            children.append((getattr(value, "__self__", None), ".__self__"))
            return "method"
        if isinstance(value, weakref.ref):
            self._references.append((value, entry))
            return "reference"
        if isinstance(value, contextvars.ContextVar):
            self._referents.append(functools.partial(value.get, None))
            children.append((value.get(None), ".get()"))
            return "variable"
        if hasattr(kind, "__next__"):
            return self._refuse(entry, "iterator", "what it gives next cannot be seen")
        if home == "numpy":
            return self._array(value, entry)
        if kind in _TRANSPARENT:
            self._refers(value, entry, children)
            return (kind, getattr(value, "__qualname__", None))
        token = self._items(value, entry, children)
        return self._attributes(value, kind, entry, children, token)

    def _hold(self, entry: int, owner: Any, kind: str, *keys: Any) -> tuple[Any, ...]:
        """Note a holder. Returns what it holds."""
        keys, values = _Holder(entry, owner, kind, keys).now()
        self.holders.append(_Holder(entry, owner, kind, keys, values))
        return values

    def _refers(self, value: Any, entry: int, children: list[tuple[Any, str]]) -> None:
        """Go on to what an object refers to, besides its children."""
        known = {id(child) for child, _ in children} | {id(type(value)), id(getattr(value, "__dict__", None))}
        referents = gc.get_referents(value)
        more = [(each, "") for each in referents if id(each) not in known]
        if more:
            self._fixed.append((value, referents, entry))
            children += more

    def _refuse(self, entry: int, reason: str, detail: str) -> Hashable:
        self.refusal = self.refusal or Refusal(reason, f"{self.path(entry)}: {detail}")
        return None

    def _tensor(self, tensor: torch.Tensor, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        self.tensors.append(tensor)
        if tensor.is_leaf:
            self._leaves.append((tensor, entry))
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
        facts = (tensor.size(), layout, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf)
        return ("tensor", type(tensor), *facts)

    def _gradients(self) -> None:
        leaves, self._leaves = self._leaves, []
        self._from.append((-1, ""))
        gradients = self._hold(self._first + len(self.tokens), [tensor for tensor, _ in leaves], "grads")
        self.tokens.append(("gradients", tuple(each is None for each in gradients)))
        met = [(each, entry, ".grad") for each, (_, entry) in zip(gradients, leaves, strict=True) if each is not None]
        self._waiting.extend(reversed(met))

    def _function(self, function: types.FunctionType, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        if self._executed.runs(function):
            self.codes[function.__code__] = None
            names = function.__code__.co_freevars
            children += [(cell, f"<{name}>") for name, cell in zip(names, function.__closure__ or (), strict=True)]
            children.append((function.__defaults__, ".__defaults__"))
            children.append((function.__kwdefaults__, ".__kwdefaults__"))
        children.append((function.__dict__, ""))
        self._fixed.append((function, gc.get_referents(function), entry))
        return ("function", function.__code__)

    def _class(self, cls: type, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        if _is_library(cls.__module__):
            return cls
        self._fixed.append((cls, gc.get_referents(cls), entry))
        held: list[str] = []
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
                held.append(name)
        children += zip(self._hold(entry, cls, "attributes", *held), (f".{name}" for name in held), strict=True)
        children += [(each, "") for each in (type(cls), *cls.__bases__) if not _is_library(each.__module__)]
        return (cls, tuple(same), tuple(held))

    def _array(self, value: Any, entry: int) -> Hashable:
        """An array, scalar or generator of numpy, compared by its contents, or whatever else it has."""
        if hasattr(value, "bit_generator"):
            return self._read(lambda: pickle.dumps(value.bit_generator.state), entry)
        if hasattr(value, "get_state"):
            return self._read(lambda: pickle.dumps(value.get_state()), entry)
        if not hasattr(value, "tobytes"):
            return _Is(value)
        if value.nbytes > _LARGE or value.dtype.hasobject:
            return self._refuse(entry, "large-array", f"an array of {value.nbytes} bytes")
        return (type(value), value.dtype.str, value.shape, self._read(value.tobytes, entry))

    def _read(self, read: Callable[[], Hashable], entry: int) -> Hashable:
        """What is compared by its contents."""
        contents = read()
        self._contents.append((read, contents, entry))
        return contents

    def _items(self, value: Any, entry: int, children: list[tuple[Any, str]]) -> Hashable:
        """What a container holds."""
        if isinstance(value, dict):
            self._hold(entry, value, "dict")
            keys: list[Hashable] = []
            for key, item in value.items():
                plain = type(key) in _LEAVES
                keys.append(bits(key) if plain else None)
                if not plain:
                    children.append((key, "<key>"))
                children.append((item, f"[{key!r}]" if plain else "[…]"))
            if isinstance(value, collections.defaultdict):
                children.append((value.default_factory, ".default_factory"))
            return tuple(keys)
        if isinstance(value, (list, tuple, collections.deque)):
            if not isinstance(value, tuple):
                self._hold(entry, value, "list" if isinstance(value, list) else "fixed")
            children += [(item, f"[{index}]") for index, item in enumerate(value)]
            return len(value)
        if isinstance(value, (set, frozenset)):
            if not isinstance(value, frozenset):
                self._hold(entry, value, "fixed")
            if all(type(item) in _LEAVES for item in value):
                return frozenset(map(bits, value))
            children += [(item, "<item>") for item in value]
            return len(value)
        return next((each.__repr__(value) for each in _PLAIN if isinstance(value, each)), None)

    def _attributes(
        self, value: Any, kind: type, entry: int, children: list[tuple[Any, str]], token: Hashable
    ) -> Hashable:
        """The attributes of an object, beside what it holds."""
        attributes = getattr(value, "__dict__", None)
        names = _slots(kind)
        if isinstance(attributes, dict):
            items = self._hold(entry, attributes, "dict")
            children += [(item, f".{name}") for name, item in zip(attributes, items, strict=True)]
            self._instances.append(value)
            if isinstance(value, torch.nn.Module):
                for name in ("_backward_hooks", "_backward_pre_hooks"):
                    for hook in attributes[name].values():
                        self._executed.may_run(hook)
            token = (token, tuple(attributes))
        if names:
            held = self._hold(entry, value, "attributes", *names)
            children += [(item, f".{name}") for name, item in zip(names, held, strict=True) if item is not _MISSING]
        if not isinstance(value, _CONTAINERS):
            self._refers(value, entry, children)
        contents = tuple(self._read(getattr(value, name), entry) for name in _readers(kind))
        if _has_buffer(kind, value):
            if memoryview(value).nbytes > _LARGE:
                return self._refuse(entry, "large-array", f"a buffer of {memoryview(value).nbytes} bytes")
            contents += (self._read(lambda: memoryview(value).tobytes(), entry),)
        if not _is_library(kind.__module__):
            children.append((kind, ""))
        if token is None and not names and not contents:
            return _Is(value)
        return (kind, token, contents)

    def _globals(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """The globals, builtins and modules that code names, and those of modules that it names the attributes of."""
        entry = self._first + len(self.tokens)
        self._from.append((-1, ""))
        known: list[str] = []
        packages = accumulate((namespace.get("__package__") or "").split("."), "{}.{}".format)
        homes = ["", *(f"{package}." for package in packages)]
        imported = [name for home in homes for each in names if (name := home + each) in sys.modules]
        spaces = [("", sys.modules, imported), ("", vars(builtins), names), ("", namespace, names)]
        met: set[int] = set()
        while spaces:
            path, space, those = spaces.pop()
            values = self._hold(entry, space, "names", *those)
            for name, value in zip(those, values, strict=True):
                if value is not _MISSING:
                    known.append(path + name)
                    self._waiting.append((value, -1, path + name))
                if isinstance(value, types.ModuleType) and not _is_library(value.__name__) and id(value) not in met:
                    met.add(id(value))
                    spaces.append((f"{path}{name}.", vars(value), names))
        self.tokens.append(("globals", namespace.get("__name__"), tuple(known)))

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


_FACTS = attrgetter("requires_grad", "shape", "_backward_hooks", "_post_accumulate_grad_hooks", "dtype", "device")
_ATTRIBUTES = attrgetter("__dict__")
_GRAD = attrgetter("grad")


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # of a cell that is empty
        return _MISSING


@functools.lru_cache(maxsize=4096)
def _readers(kind: type) -> tuple[str, ...]:
    """The methods in ``_READ`` that a type has of a library."""
    homes = {name: cls.__module__ for cls in reversed(kind.__mro__) for name in _READ if name in vars(cls)}
    return tuple(name for name, home in homes.items() if _is_library(home))


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


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def _same(before: Any, now: Any) -> bool:
    """Whether a place holds what it held: the same object, or a plain value with the same bits."""
    return before is now or (type(before) is type(now) and type(now) in _LEAVES and bits(before) == bits(now))


def _shown(token: Hashable) -> str:
    """A token as a reader would write it."""
    if isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], str):
        return _float(token[1]) if token[0] == "float" else repr(token[1])
    return repr(token)


def _float(packed: Any) -> str:
    return repr(struct.unpack("<d", packed)[0]) if isinstance(packed, bytes) else repr(packed)
