"""``pygraph.graph``: any callable, captured as it runs and replayed with today's tensors.

    call ─ read: arguments, what is held ─ entry ─┬─ captured:  replay, and put in place what the callable leaves
                                                  └─ else:      the callable runs; at the second call it is captured:

    for each of two captures:   tensors show stand-in memory ─ the callable runs, nothing executes ─ all is put back

What calls of one entry have in common: all of the key, the structure of what is held, and which tensors share memory.
Tensors that share memory are one argument of the entry's region, so that arguments never overlap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import os
import struct
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

import pygraph
from pygraph import compat
from pygraph.backend import driver_for
from pygraph.errors import CaptureError, first_line
from pygraph.frontend.location import GraphOrigin, location_of_code
from pygraph.program.recording import Origin
from pygraph.report.model import CALLABLE, GraphReport, RegionReport, open_report
from pygraph.runtime import live
from pygraph.runtime.calls import leaves
from pygraph.runtime.contract import Driver
from pygraph.runtime.critical import capturing, capturing_turn
from pygraph.runtime.provenance import Refusal, blame
from pygraph.runtime.reasons import reason_of
from pygraph.runtime.region import Region, RegionOptions, RegionRecord
from pygraph.runtime.tensors import bits, extent
from pygraph.runtime.variants import State
from pygraph.settings import Settings

__all__ = ["Graph", "GraphRecord", "graph"]

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE = 16
"""Calls in a row that find nothing captured before as many run the callable without a look."""

_LOOKS = 1024
"""Most of these, twice as many each time, where nothing is captured for good."""

_MOST = 64
"""Structures of what is held, and entries of each, that are known at the same time."""

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout})
_CONSTANT = 64
"""Most elements of a tensor that is made of Python numbers, on the CPU."""

_SEARCHED = 4096
"""Objects that are looked at for the name of a tensor."""


# -- what is held ------------------------------------------------------------------------------------------------------

_PLAIN_NODE, _TENSOR, _AGAIN, _MAPPING, _SEQUENCE, _OBJECT, _SEEN, _SOME, _OTHER = range(9)
"""Kinds of nodes, as ``Held`` of the native half has them."""

_OF_OPTIMIZERS = ("state", "param_groups")


class _Walk:
    """All that is held, once: modules and their attributes, optimizers' states and options, containers of these; and
    the attributes of other objects that are named themselves.

    nodes: in order, as ``Held`` reads them
    key: equal for two walks of the same structure, plain values included
    tensors: each once
    containers: objects, dictionaries and sequences
    refusal: why nothing can be captured
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
        self._add(_SEQUENCE, tuple, len(root))
        self._visit(root[0], "held", named=True)
        self.key = tuple(self._key)

    def _add(self, kind: int, value: Any, number: int = 0, key: Hashable = None) -> None:
        self.nodes.append((kind, value, number))
        self._key.append((kind, value if key is None else key, number))

    def _visit(self, value: Any, path: str, *, named: bool) -> None:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            self._add(_PLAIN_NODE, value, key=_bits(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif id(value) in self._met:
            self._add(_SEEN, None, self._met[id(value)])
        elif isinstance(value, dict):
            self._met[id(value)] = self._hold(value)
            self._add(_MAPPING, kind, len(value))
            for key, item in list(value.items()):
                self._visit(key, f"{path}.key", named=False)
                self._visit(item, _step(path, key, value), named=named)
        elif isinstance(value, (list, tuple)):
            number = self._hold(value)
            if isinstance(value, list):
                self._met[id(value)] = number
            self._add(_SEQUENCE, kind, len(value))
            for index, item in enumerate(value):
                self._visit(item, f"{path}[{index}]", named=named)
        elif isinstance(value, torch.optim.Optimizer):
            self._met[id(value)] = self._hold(value)
            self._add(_OBJECT, kind)
            self._hold(vars(value))
            self._add(_SOME, _OF_OPTIMIZERS)
            for name in _OF_OPTIMIZERS:
                self._visit(vars(value)[name], f"{path}.{name}", named=False)
        elif isinstance(value, torch.nn.Module) or (named and _has_attributes(value)):
            self._met[id(value)] = self._hold(value)
            self._add(_OBJECT, kind)
            self._visit(vars(value), path, named=False)
        else:
            self._add(_OTHER, kind)

    def _hold(self, value: Any) -> int:
        self.containers.append(value)
        return len(self.containers) - 1

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if id(tensor) in self._numbers:
            self._add(_AGAIN, None, self._numbers[id(tensor)])
            return
        if type(tensor) not in _TENSORS:
            self.refusal = Refusal("unsupported-tensor", f"{path} is a {type(tensor).__name__}")
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.paths.append(path)
        self._add(_TENSOR, type(tensor))

    def contents(self) -> list[Any]:
        """What each dictionary and list holds now."""
        return [_contents(container) for container in self.containers]

    def restore(self, contents: Sequence[Any]) -> None:
        """Have each hold what it held."""
        for container, before in zip(self.containers, contents, strict=True):
            if before is None or _are_same(_contents(container), before):
                continue
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return list(container.items())
    return list(container) if isinstance(container, list) else None


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    if len(now) != len(before):
        return False
    pairs = zip(now, before, strict=True)
    return all(a is b or (type(a) is tuple and type(b) is tuple and _entries_same(a, b)) for a, b in pairs)


def _entries_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _step(path: str, key: object, owner: Mapping[Any, Any]) -> str:
    """The path of an entry of a dictionary: those that modules keep their members in are left out."""
    if key in ("_parameters", "_buffers", "_modules") and "training" in owner:
        return path
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def _has_attributes(value: object) -> bool:
    plain = not isinstance(value, (type, types.FunctionType, types.MethodType, types.ModuleType))
    return plain and isinstance(getattr(value, "__dict__", None), dict)


def _bits(value: object) -> Hashable:
    if type(value) is complex:
        return ("complex", struct.pack("<2d", value.real, value.imag))
    return bits(value)


@dataclass(eq=False)
class _Look:
    """One structure of what is held. ``entries`` are known by all else of the key; ``containers``: one of them leaves
    something in containers."""

    held: Any
    paths: tuple[str, ...]
    count: int
    entries: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)
    containers: bool = False


# -- arguments and results ---------------------------------------------------------------------------------------------


class _OddError(Exception):
    """Something among arguments or results that is neither tensor, nor plain, nor a node of a pytree."""


def _read(value: Any, tensors: list[torch.Tensor], key: list[Hashable]) -> None:
    """Add the tensors of an argument, and all else of it to ``key``. Raises _OddError."""
    kind: Any = type(value)
    if kind in _TENSORS:
        tensors.append(value)
        key.append(kind)
    elif kind in _PLAIN:
        key.append(_bits(value) if kind in (float, complex) else (kind, value))
    elif kind is tuple or kind is list:
        key.append((kind, len(value)))
        for item in value:
            _read(item, tensors, key)
    elif kind is dict:
        key.append((kind, len(value)))
        for name, item in value.items():
            _read(name, tensors, key)
            _read(item, tensors, key)
    elif isinstance(value, enum.Enum):
        key.append(value)
    elif (children := _children(value)) is not None:
        key.append((kind, len(children[0]), _hashable(children[1])))
        for item in children[0]:
            _read(item, tensors, key)
    else:
        raise _OddError(kind.__name__)


def _children(value: Any) -> tuple[list[Any], Any] | None:
    """The children and the context of a registered node of a pytree, or of a named tuple."""
    node = compat.pytree_nodes.get(type(value))
    if node is None and isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return list(value), None
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), context


def _hashable(context: Any) -> Hashable:
    try:
        hash(context)
    except TypeError:
        return repr(context)
    return cast("Hashable", context)


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor of the call, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that the callable made: an output of the region, by its index."""

    index: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A container that is held, by its number in the walk."""

    number: int


@dataclass(frozen=True, slots=True)
class _Value:
    """A plain value. Two are equal if their types and bits are."""

    value: Any = field(compare=False)
    bits: Hashable


@dataclass(frozen=True, slots=True)
class _Built:
    """A new node of a pytree. A dictionary's ``items`` are its keys and values in turn."""

    kind: type
    items: tuple[Any, ...]
    context: Any = None


@dataclass(frozen=True, slots=True)
class _Place:
    """What a callable leaves: the gradient of a tensor, an entry of a dictionary, one that has gone, or all items of a
    list. ``where`` is the number of the tensor, or of the container."""

    kind: str
    where: int
    key: Any = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Left:
    """What a call leaves behind: its ``result``, in ``places``, and tensors ``written``, by their numbers, as far as
    autograd has noticed: under a dispatch mode, some operators do not tell."""

    result: Any
    places: tuple[_Place, ...]
    written: frozenset[int] = field(compare=False)

    @property
    def in_containers(self) -> bool:
        return any(place.kind != "grad" for place in self.places)


class _Describer:
    """Describes values that a callable returns, or leaves. ``made`` are the tensors among them that it made."""

    def __init__(self, given: Sequence[torch.Tensor], containers: Sequence[Any]) -> None:
        self._given = {id(tensor): number for number, tensor in reversed(list(enumerate(given)))}
        self._known = {id(each): number for number, each in enumerate(containers) if isinstance(each, (dict, list))}
        self.made: list[torch.Tensor] = []

    def describe(self, value: Any) -> Any:
        """Raises CaptureError for what a replay cannot make."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            return _Value(value, _bits(value))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._known:
            return _Known(self._known[id(value)])
        if kind in (list, tuple):
            return _Built(kind, tuple(map(self.describe, value)))
        if kind in (dict, OrderedDict):
            return _Built(kind, tuple(self.describe(each) for entry in value.items() for each in entry))
        children = _children(value)
        if children is None:
            raise CaptureError("unsupported-result", f"the callable makes an object of type {kind.__name__}")
        return _Built(kind, tuple(map(self.describe, children[0])), children[1])

    def _tensor(self, tensor: torch.Tensor) -> _Given | _Made:
        if id(tensor) in self._given:
            return _Given(self._given[id(tensor)])
        if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
            raise CaptureError("unsupported-result", "the callable makes a parameter, or a tensor of another type")
        if tensor.requires_grad and not _is_spent(tensor):
            said = "a result has a history that autograd could go back through: detach it, or call it under no_grad"
            raise CaptureError("open-graph", said)
        index = next((i for i, each in enumerate(self.made) if each is tensor), len(self.made))
        if index == len(self.made):
            self.made.append(tensor)
        return _Made(index)


def _is_spent(tensor: torch.Tensor) -> bool:
    """Whether going back from ``tensor`` would meet a node whose tensors are freed, and raise."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    if "freed" in str(error):
                        return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _make(made: Any, given: Sequence[torch.Tensor], containers: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """A value by its description, of today's objects. ``outputs`` begin with the number of what is left."""
    kind = type(made)
    if kind is _Made:
        return outputs[made.index + 1]
    if kind is _Value:
        return made.value
    if kind is _Given:
        return given[made.number]
    if kind is _Known:
        return containers[made.number]
    items = [_make(each, given, containers, outputs) for each in made.items]
    if made.kind in (dict, OrderedDict):
        return made.kind(zip(items[::2], items[1::2], strict=True))
    if made.kind in (list, tuple):
        return made.kind(items)
    node = compat.pytree_nodes.get(made.kind)
    return made.kind(*items) if node is None else node.unflatten_fn(items, made.context)


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A call that its entry's region answers. ``stood``: the callable ran on stand-ins meanwhile; ``answered``: it ran,
    and returned ``returned``. ``log`` are the operators of its last capture, with their numbers and the user's lines"""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    root: Any
    gradients: bool
    inference: bool
    stood: bool = False
    answered: bool = False
    returned: Any = None
    log: list[tuple[str, str | None]] | None = None


class _Current(threading.local):
    call: _Call | None = None


_current = _Current()
"""Of each thread, the call that it answers."""


class _Turns:
    """Who uses the tensors that graphs are given: any number of threads, or one that shows other memory in their
    places. Whoever would use them waits for the latter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._using: dict[int, int] = {}
        self._owner: int | None = None

    def enter(self) -> None:
        me = get_ident()
        with self._lock:
            while self._owner is not None and self._owner != me:
                self._condition.wait()
            self._using[me] = self._using.get(me, 0) + 1

    def leave(self) -> None:
        me = get_ident()
        with self._lock:
            if self._using[me] > 1:
                self._using[me] -= 1
            else:
                del self._using[me]
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self, seconds: float = 1.0) -> Iterator[None]:
        """Raises CaptureError (``capture-busy``) where another thread goes on using them for so long."""
        me = get_ident()
        with self._condition:
            mine = self._owner == me

            def free() -> bool:
                return self._owner in (None, me) and not self._using.keys() - {me}

            if not self._condition.wait_for(free, seconds):
                raise CaptureError("capture-busy", "another thread runs a graph for long")
            self._owner = me
        try:
            yield
        finally:
            if not mine:
                with self._condition:
                    self._owner = None
                    self._condition.notify_all()


_turns = _Turns()
os.register_at_fork(after_in_child=_turns.__init__)  # type: ignore[misc]


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that share memory: their numbers, how many bytes each begins behind the first byte, and bytes in all."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def _groups(shared: bytes) -> list[_Group]:
    """Read what ``Held`` says of shared memory."""
    numbers = list(struct.unpack(f"{len(shared) // 8}q", shared))
    found = []
    while numbers:
        count, nbytes = numbers[:2]
        pairs, numbers = numbers[2 : 2 + 2 * count], numbers[2 + 2 * count :]
        found.append(_Group(tuple(pairs[::2]), tuple(pairs[1::2]), nbytes))
    return found


class _Entry:
    """Calls of one key. Its region takes each tensor, or, for those that share memory, all of that memory as bytes."""

    def __init__(self, owner: Graph[Any, Any], driver: Driver, device: torch.device, paths: Sequence[str]) -> None:
        self.owner, self.driver, self.device, self.paths = owner, driver, device, paths
        self.left: list[_Left] = []
        self.pending: dict[Hashable, list[tuple[str, str | None]]] = {}
        """The operators of captures that no other call has confirmed, by the signature of theirs."""
        self.groups: list[_Group] = []
        self.plan: tuple[int | _Group, ...] = ()
        self.region: Region
        self.function: Callable[[list[Any]], list[Any]]

    # -- arguments of the region -----------------------------------------------------------------------------------

    def arguments(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The region's arguments."""
        if not self.groups and len(self.plan) == len(tensors):
            return tensors.copy()
        return [tensors[each] if isinstance(each, int) else _bytes_of(each, tensors) for each in self.plan]

    def shown(self, call: _Call, args: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """For each tensor of a call, by its number, one like it in the memory of ``args``."""
        found: dict[int, torch.Tensor] = {}
        for each, arg in zip(self.plan, args, strict=True):
            if isinstance(each, int):
                found[each] = arg.detach()
                continue
            for number, offset in zip(each.members, each.offsets, strict=True):
                found[number] = _part(arg, offset, call.tensors[number])
        return found

    # -- runs of the callable ---------------------------------------------------------------------------------------

    def answer(self, args: list[Any]) -> list[Any]:
        """Run the callable, which answers the call; what it leaves is looked at where a replay is held against it."""
        call = _current.call
        assert call is not None
        args.clear()
        watched = call.stood or self.owner.verifies
        before = _Before(call) if watched else None
        call.returned = self.owner.function(*call.args, **call.kwargs)
        call.answered = True
        if before is None:
            return []
        try:
            return self._number(*before.left(call.returned))
        except CaptureError:
            return [-1]  # as no capture leaves

    def on_stand_ins(self, args: list[Any]) -> list[Any]:
        """Run the callable with the memory of ``args`` in the places of the call's tensors, and put all back."""
        call = _current.call
        assert call is not None
        call.stood = True
        recorded = compat.dispatch_mode_depth() > 0
        with contextlib.ExitStack() as steps:
            steps.enter_context(_turns.alone())
            with _metadata():
                shown = self.shown(call, args)
                known = {tensor.untyped_storage()._cdata for tensor in shown.values()}
                before = _Before(call, shown)
            args.clear()
            torch.clear_autocast_cache()
            steps.callback(torch.clear_autocast_cache)
            steps.callback(before.put_back)
            with _metadata():
                for number, tensor in shown.items():
                    call.tensors[number].data = tensor
            steps.enter_context(torch.inference_mode(call.inference))
            steps.enter_context(torch.set_grad_enabled(call.gradients))
            steps.enter_context(torch.autograd.set_multithreading_enabled(False))
            watch = steps.enter_context(_Watch(self, call, known)) if recorded else None
            steps.enter_context(compat.compiled_code_runs())
            try:
                returned = self.owner.function(*call.args, **call.kwargs)
            except Exception as error:
                blame(self.owner.record.name, _origin(_last_frame(error)))  # unless an operator is to blame
                raise
            with _metadata():
                before.check()
                outputs = self._number(*before.left(returned))
            if watch is not None:
                watch.log.append((f"leaves({outputs[0]})", None))
                if call.log is not None:
                    _hold_against(call.log, watch.log)
                call.log = watch.log
            return outputs

    def _number(self, left: _Left, outputs: list[torch.Tensor]) -> list[Any]:
        """The outputs of the region: the number of what is left, and tensors."""
        known = next((number for number, each in enumerate(self.left) if each == left), len(self.left))
        if known == len(self.left):
            self.left.append(left)
        self.left[known] = dataclasses.replace(left, written=left.written | self.left[known].written)
        return [known, *outputs]


def _bytes_of(group: _Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All memory of a group. Raises CaptureError where it lies in several storages."""
    first = tensors[group.members[group.offsets.index(0)]]
    storage, begin = first.untyped_storage(), int(first.storage_offset()) * first.element_size()
    if begin + group.nbytes > storage.nbytes():
        raise CaptureError("unsupported-argument", "tensors overlap whose storages are not the same")
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, begin, (group.nbytes,), (1,))


def _part(memory: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor``, over bytes of a group's ``memory`` from ``begin`` on."""
    flat = memory[begin : begin + extent(tensor)].view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset())


@contextlib.contextmanager
def _metadata() -> Iterator[None]:
    """Tensors are put over other memory here; nobody is to see that."""
    with compat.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield


class _Before:
    """What a call's tensors and containers are before the callable runs; ``shown`` are the stand-ins, if it runs on
    such."""

    def __init__(self, call: _Call, shown: Mapping[int, torch.Tensor] | None = None) -> None:
        self._walk, self._tensors, self._shown = _Walk(call.root), call.tensors, shown or {}
        self._contents = self._walk.contents()
        self._gradients = [_gradient(tensor) for tensor in call.tensors]
        self._versions = [-1 if tensor.is_inference() else tensor._version for tensor in call.tensors]
        self._facts = [(tensor.requires_grad, tensor.is_leaf) for tensor in call.tensors]
        self._data = [call.tensors[number].data for number in self._shown]

    def check(self) -> None:
        """Raises CaptureError where the callable has given a tensor other memory, or has autograd follow it."""
        for number, tensor in enumerate(self._tensors):
            moved = number in self._shown and (
                tensor.untyped_storage()._cdata != self._shown[number].untyped_storage()._cdata
                or tensor.size() != self._shown[number].size()
            )
            if moved or self._facts[number] != (tensor.requires_grad, tensor.is_leaf):
                said = "the callable gives a tensor other memory, or has autograd follow it"
                raise CaptureError("metadata-mutation", said)

    def left(self, returned: Any) -> tuple[_Left, list[torch.Tensor]]:
        """What the callable leaves, and the tensors of it that it made. Raises CaptureError."""
        describer = _Describer(self._tensors, self._walk.containers)
        result = describer.describe(returned)
        places: list[_Place] = []
        for number, (tensor, before) in enumerate(zip(self._tensors, self._gradients, strict=True)):
            gradient = _gradient(tensor)
            if gradient is not before:
                places.append(_Place("grad", number, None, describer.describe(gradient)))
        for number, (container, before) in enumerate(zip(self._walk.containers, self._contents, strict=True)):
            if before is not None:
                places += _changes(number, container, before, describer)
        pairs = enumerate(zip(self._tensors, self._versions, strict=True))
        written = frozenset(number for number, (tensor, version) in pairs if 0 <= version != tensor._version)
        with _metadata():
            return _Left(result, tuple(places), written), [tensor.data for tensor in describer.made]

    def put_back(self) -> None:
        """Undo whatever the callable did to what is held."""
        with _metadata():
            for number, data in zip(self._shown, self._data, strict=True):
                self._tensors[number].data = data
            for tensor, gradient, facts in zip(self._tensors, self._gradients, self._facts, strict=True):
                if tensor.requires_grad != facts[0] and tensor.is_leaf:
                    tensor.requires_grad_(facts[0])
                if _gradient(tensor) is not gradient:
                    tensor.grad = gradient
            self._walk.restore(self._contents)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf and not tensor.is_inference() else None


def _changes(number: int, container: Any, before: list[Any], describer: _Describer) -> Iterator[_Place]:
    """How a dictionary or list differs from what it held. Objects that are not looked into do not count."""
    if isinstance(container, list):
        if not _are_same(container, before):
            yield _Place("items", number, None, _Built(list, tuple(map(describer.describe, container))))
        return
    was = dict(before)
    for key, value in container.items():
        if key in was and was[key] is value:
            continue
        if key in was and _bits_or_none(was[key]) == _bits_or_none(value) is not None:
            continue
        if _is_tracked(value) or (key in was and _is_tracked(was[key])):
            yield _Place("entry", number, describer.describe(key), describer.describe(value))
    for key in was:
        if key not in container:
            yield _Place("gone", number, describer.describe(key))


def _bits_or_none(value: object) -> Hashable:
    return _bits(value) if type(value) in _PLAIN else None


def _is_tracked(value: object) -> bool:
    return type(value) in _PLAIN or isinstance(value, (torch.Tensor, dict, list, tuple, enum.Enum))


# -- operators of a capture --------------------------------------------------------------------------------------------

_HOMES = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (torch, pygraph))
_STANDARD = os.path.dirname(os.__file__) + os.sep


def user_line(frame: types.FrameType | None = None) -> str | None:
    """The innermost line that is neither torch's, PyGraph's nor Python's own, as ``file:line``; None where there is
    none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        standard = name.startswith(_STANDARD) and "site-packages" not in name
        if not standard and not name.startswith((*_HOMES, "<")):
            return f"{os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _origin(frame: types.FrameType | None = None) -> Origin:
    line = user_line(frame)
    return Origin(locs=() if line is None else (line,))


def _last_frame(error: BaseException) -> types.FrameType | None:
    """The frame that ``error`` was raised in."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return None if step is None else step.tb_frame


class _Watch(compat.TorchDispatchMode):
    """While open, the operators of a capture are written down, before the driver records them.

    Raises CaptureError (``unknown-memory``) for a tensor that was there before, if its name is found; a driver refuses
    those without.
    """

    supports_higher_order_operators = True

    def __init__(self, entry: _Entry, call: _Call, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[str, str | None]] = []
        self._entry, self._call, self._known = entry, call, known
        self._named: dict[int, str] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "namespace", "") == "profiler":
            with compat.without_dispatch_modes():
                return func(*args, **given)
        if func is torch.ops.aten.lift_fresh.default and args[0].device.type == "cpu":
            return self._constant(args[0])
        if func is torch.ops.aten.detach_.default:  # of torch.tensor: below autograd, there is nothing to do
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default
        line = user_line()
        self.log.append((f"{func}({', '.join(_texts((args, given)))})", line))
        for tensor in _tensors_in((args, given)):
            self._check(tensor, func)
        result = func(*args, **given)
        self._note(result)
        return result

    def _constant(self, tensor: torch.Tensor) -> Any:
        """What stands for a tensor that is made of Python numbers."""
        small = tensor.numel() <= _CONSTANT
        with _metadata():
            values = tensor.flatten().tolist() if small else []
        self.log.append((f"tensor({', '.join(map(_bits_text, values))})", user_line()))
        if small and self._entry.device.type == "cpu":
            made: Any = torch.ops.aten.empty.memory_format(tensor.size(), dtype=tensor.dtype)
            flat = torch.ops.aten.view.default(made, [-1])
            for index, value in enumerate(values):
                torch.ops.aten.fill_.Scalar(torch.ops.aten.select.int(flat, 0, index), value)
        else:
            made = torch.ops.aten.lift_fresh.default(tensor)
        self._note(made)
        return made

    def _note(self, result: Any) -> None:
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._known.add(tensor.untyped_storage()._cdata)

    def _check(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()._cdata
        if storage in self._known:
            return
        if self._named is None:
            self._named = _named_storages(self._entry.owner.function)
        name = self._named.get(storage)
        if name is not None:
            blame(str(func).replace(".", "::", 1), _origin())
            raise CaptureError("unknown-memory", f"{name}: add it to held")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _texts(value: Any) -> Iterator[str]:
    """The numbers among arguments of an operator, as text."""
    if isinstance(value, torch.Tensor):
        yield "·"
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from (f"{name}={text}" for text in _texts(item))
    else:
        yield _bits_text(value) if type(value) in _PLAIN else type(value).__name__


def _bits_text(value: Any) -> str:
    return f"{value!r}" if type(value) is not float or value == value else f"nan {struct.pack('<d', value).hex()}"


def _hold_against(before: Sequence[tuple[str, str | None]], now: Sequence[tuple[str, str | None]]) -> None:
    """Raises CaptureError where the operators of two captures differ."""
    for (text, _), (other, line) in zip(before, now, strict=False):
        if text != other:
            same = text.partition("(")[0] == other.partition("(")[0]
            blame(text.partition("(")[0].replace(".", "::", 1), Origin(locs=(line,) if line else ()))
            said = f"{text} became {other}" + (f" at {line}" if line else "")
            raise CaptureError("unstable-number" if same else "unstable-launches", said)
    if len(before) != len(now):
        raise CaptureError("unstable-launches", f"{len(before)} operators in one capture, {len(now)} in the next")


def _named_storages(function: Callable[..., Any]) -> dict[int, str]:
    """Names of the tensors that a bounded search finds, by storage: in closures, defaults, globals that the code names,
    attributes of objects, and containers."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(function, "")]
    for value, path in waiting:
        if id(value) in seen or len(seen) > _SEARCHED:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found.setdefault(value.untyped_storage()._cdata, path)
        else:
            waiting += _reached(value, path)
    return found


def _reached(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """What an object leads to at once, and where that is."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        return
    if isinstance(value, functools.partial):
        yield from ((value.func, path), (value.args, path), (value.keywords, path))
    elif isinstance(value, types.MethodType):
        yield from ((value.__self__, path or "self"), (value.__func__, path))
    elif isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] in ("torch", "pygraph"):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                yield cell.cell_contents, name
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name], name
        yield value.__defaults__, f"{path}.defaults"
    elif isinstance(value, dict):
        yield from ((item, _step(path, key, value)) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((item, f"{path}[{index}]") for index, item in enumerate(value))
    elif isinstance(value, types.ModuleType):
        if value.__name__.partition(".")[0] not in sys.stdlib_module_names | {"torch", "numpy", "pygraph"}:
            yield from ((item, f"{path}.{name}") for name, item in list(vars(value).items()) if _may_name(item))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        prefix = path or type(value).__name__
        yield from ((item, _step(prefix, name, vars(value))) for name, item in list(vars(value).items()))
        if isinstance(value, torch.nn.Module):
            yield type(value).forward, prefix


def _may_name(value: object) -> bool:
    return isinstance(value, (torch.Tensor, torch.nn.Module, list, dict))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


# -- the graph ---------------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class GraphRecord:
    """What became of a graph's calls. ``reason`` says why its last call was no replay, ``refusals`` what was in the way
    of some call, one of each kind; ``regions`` are those of its entries."""

    name: str
    replays: int = 0
    uncaptured: int = 0
    reason: str | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    regions: list[RegionRecord] = field(default_factory=list)

    @property
    def state(self) -> State:
        """REPLAY if any of its regions is captured."""
        if any(record.state is State.REPLAY for record in self.regions):
            return State.REPLAY
        return State.UNCAPTURED if self.reason else State.WARM if self.uncaptured else State.COLD

    @property
    def captures(self) -> int:
        """Of all regions."""
        return sum(record.captures for record in self.regions)

    def __repr__(self) -> str:
        counts = f"captures: {self.captures}, replays: {self.replays}, uncaptured calls: {self.uncaptured}"
        why = f"; {first_line(self.reason)}" if self.reason else ""
        return f"<GraphRecord {self.name}: {self.state.value}; {counts}{why}>"


class Graph(Generic[P, R]):
    """A callable that is captured as it runs (see ``graph``). ``record`` tells what became of its calls.

    Calls under a dispatch mode, a function transform or hooks of saved tensors, in a capture of another graph, and
    while Dynamo traces, run ``function``.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        held: Any = (),
        key: Callable[..., Any] | None = None,
        compare: Callable[[str, torch.Tensor], bool] | None = None,
        eager: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.record = GraphRecord(getattr(function, "__qualname__", type(function).__name__))
        self._root, self._key, self._compare, self._eager = (held,), key, compare, tuple(eager)
        self._settings, self._owner = Settings.make(options), live.owner()
        self.verifies = self._settings.verify_every > 0
        self._looks: OrderedDict[Hashable, _Look] = OrderedDict()
        self._look: _Look | None = None
        self._report: GraphReport | None = None
        self._patience, self._skip, self._skips = _PATIENCE, 0, 0
        self._waits_for: Region | None = None
        self._native: Any = None
        if self._settings.disable:
            self.record.reason, self._call = "the option disable is set", self._run  # type: ignore[method-assign]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a function in a class: bound to ``instance``, which is an argument then."""
        return self if instance is None else functools.partial(cast("Any", self), instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the callable returns; raises what it raises. With the option ``strict``, raises CaptureError where it
        cannot be captured."""
        _turns.enter()
        try:
            if (self._skip and self._still_skips()) or _is_watched():
                return self._run(args, kwargs)
            return cast("R", self._call(args, kwargs))
        finally:
            _turns.leave()

    def _run(self, args: Any, kwargs: Any) -> R:
        self.record.uncaptured += 1
        return self.function(*args, **kwargs)

    def _still_skips(self) -> bool:
        region = self._waits_for
        if region is not None and region.record.state is not State.UNCAPTURED:  # it is to be tried again
            self._skip = 0
            return False
        self._skip -= 1
        return True

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[torch.Tensor] = []
        key: list[Hashable] = [mode.device for mode in compat.function_modes()] if compat.function_depth() else []
        try:
            _read(args, tensors, key)
            if kwargs:
                _read(kwargs, tensors, key)
            if self._key is not None:
                decided: list[torch.Tensor] = []
                _read(self._key(*args, **kwargs), decided, key)
        except _OddError as odd:
            return self._refused(Refusal("argument-type", f"an argument is a {odd}"), args, kwargs)
        if self._native is None:
            refusal = self._begin(tensors)
            if refusal is not None:
                return self._refused(refusal, args, kwargs)
        look, read = self._look, None
        if look is not None:
            read = look.held.read(self._root, tensors, look.containers)
        if look is None or read is None:
            walked = self._walked()
            if isinstance(walked, Refusal):
                return self._refused(walked, args, kwargs)
            look = walked
            read = look.held.read(self._root, tensors, look.containers)
            if read is None:  # another thread changes it
                return self._refused(Refusal("capture-busy", "what is held changes meanwhile"), args, kwargs)
        every, facts, shared, containers = read
        if shared:
            key.append(_layouts(shared, every))
        whole = (tuple(key), facts, shared, torch.get_float32_matmul_precision())
        found = look.entries.get(whole)
        if found is None:
            made = self._entry(look, whole, every, facts, shared)
            if isinstance(made, Refusal):
                return self._refused(made, args, kwargs)
            found = made
        if not found.pending:
            outputs = found.region.try_replay(found.arguments(every))
            if outputs is not None:
                return self._leave(found, outputs, every, containers)
        call = _Call(args, kwargs, every, self._root, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return self._look_up(found, call, look, containers)

    # -- entries -----------------------------------------------------------------------------------------------------

    def _begin(self, tensors: Sequence[torch.Tensor]) -> Refusal | None:
        """Find the driver at the first call."""
        if self._report is None:
            code = getattr(inspect.unwrap(self.function), "__code__", None)
            origin = GraphOrigin(self.record.name, None if code is None else location_of_code(code))
            self._report = open_report(CALLABLE, origin)
        kinds = {tensor.device.type for tensor in (*tensors, *_Walk(self._root).tensors)}
        kind = next(iter(sorted(kinds - {"cpu"})), "cpu")
        try:
            driver = driver_for(kind)
        except CaptureError as error:
            return Refusal.of(error)
        if driver is None:
            return Refusal("no-driver", f"no driver captures on {kind}")
        self._driver, self._report.device = driver, kind
        refusal = driver.unready()
        if refusal is None:
            self._native = driver.held()
        return refusal

    def _walked(self) -> _Look | Refusal:
        """The structure of what is held now."""
        walk = _Walk(self._root)
        if walk.refusal is not None:
            return walk.refusal
        look = self._looks.get(walk.key)
        if look is None:
            look = _Look(self._native(walk.nodes), tuple(walk.paths), len(walk.tensors))
            self._looks[walk.key] = look
            while len(self._looks) > _MOST:
                self._drop(self._looks.popitem(last=False)[1])
        self._looks.move_to_end(walk.key)
        self._look = look
        return look

    def _drop(self, look: _Look) -> None:
        for entry in look.entries.values():
            entry.region.close()

    def _entry(
        self, look: _Look, key: Hashable, tensors: list[torch.Tensor], facts: bytes, shared: bytes
    ) -> _Entry | Refusal:
        """A new entry; or why calls like this cannot be captured."""
        gradients = torch.is_grad_enabled()
        for fact in facts[: -self._native.MODES]:
            if not fact & 16:
                return Refusal("unsupported-tensor", "an argument, or what is held, is no plain strided tensor")
            if gradients and fact & 3 == 1:
                return Refusal("outer-graph", "a tensor has a history that autograd follows: detach it")
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            named = " and ".join(sorted(map(str, devices)))
            here = self._driver.current_device().type
            path = next((path for path, each in zip(look.paths, tensors, strict=False) if each.device.type != here), "")
            said = f": {path} is not on the device that the others are on" if path else ""
            return Refusal("several-devices", f"arguments, and what is held, are on {named}{said}")
        device = next(iter(devices), self._driver.current_device())
        entry = _Entry(self, self._driver, device, look.paths)
        entry.groups = _groups(shared)
        first = {group.members[0]: group for group in entry.groups}
        others = {number for group in entry.groups for number in group.members[1:]}
        entry.plan = tuple(first.get(number, number) for number in range(len(tensors)) if number not in others)
        settings = self._settings
        spared = {
            number
            for number, path in enumerate(look.paths)
            if self._compare is not None and not self._compare(path, tensors[number])
        }
        exempt = frozenset(
            position
            for position, each in enumerate(entry.plan)
            if not spared.isdisjoint((each,) if isinstance(each, int) else each.members)
        )

        def function(args: list[Any]) -> list[Any]:
            return entry.on_stand_ins(args)

        name = f"{self.record.name}.{len(self.record.regions)}"
        entry.function = function
        with live.owned_by(self._owner):
            entry.region = Region(
                function,
                self._driver,
                name=name,
                label=f"captured callable {name}",
                options=RegionOptions(
                    capture_after=settings.capture_after,
                    memory_limit=settings.memory_limit,
                    verify_every=settings.verify_every,
                    order=settings.order,
                    launch_passes=settings.launches(),
                    exempt=exempt,
                ),
                held=range(len(entry.plan)),
                origins=_origin,
                eager=self._eager,
                uncaptured=entry.answer,
            )
        look.entries[key] = entry
        while len(look.entries) > _MOST:
            look.entries.popitem(last=False)[1].region.close()
        self.record.regions.append(entry.region.record)
        if self._report is not None:
            self._report.regions.append(
                RegionReport(len(self._report.regions), (), (), (), True, "", entry.region.record)
            )
        return entry

    # -- calls that are no mere replays --------------------------------------------------------------------------------

    def _look_up(self, entry: _Entry, call: _Call, look: _Look, containers: Sequence[Any]) -> Any:
        """A call that was not replayed at once."""
        region, record = entry.region, entry.region.record
        signature = _signature(call.tensors) if entry.pending or not record.replays else None
        captures = record.captures
        outer, _current.call = _current.call, call
        try:
            if signature in entry.pending and not self._confirm(entry, call, signature):
                return self._run(call.args, call.kwargs)
            outputs = region(entry.arguments(call.tensors))
        finally:
            _current.call = outer
        if record.captures > captures and call.log is not None:
            entry.pending[_signature(call.tensors)] = call.log
        if not call.answered:
            return self._leave(entry, outputs, call.tensors, containers)
        self.record.uncaptured += 1
        if record.captures > captures:
            look.containers = look.containers or any(each.in_containers for each in entry.left)
            self._patience, self._skip, self._skips, self.record.reason = _PATIENCE, 0, 0, None
        elif record.reason is not None and record.state is not State.REPLAY:
            refusal = next(reversed(record.refusals.values()), Refusal("uncaptured", record.reason))
            self._note(refusal, record.reason)
            lasts = record.state is State.UNCAPTURED and not reason_of(refusal.reason).may_pass
            self._waste(4 if lasts else 1, region if lasts else None)
        elif not capturing:  # or another thread's turn is over soon
            self._waste(1, None)
        return call.returned

    def _confirm(self, entry: _Entry, call: _Call, signature: Hashable) -> bool:
        """Whether the callable does in this call, too, what it did when it was captured: nothing executes. If not, it
        is never replayed; or this call is not, where something passing was in the way."""
        call.log = entry.pending[signature]
        with capturing_turn() as mine:
            if not mine:
                return False
            refusal = entry.region.rehearse(entry.arguments(call.tensors))
        call.stood, call.log = False, None
        if refusal is None:
            del entry.pending[signature]
            return True
        if not reason_of(refusal.reason).may_pass:
            entry.pending.pop(signature, None)
            entry.region.refuse(refusal)
        self._note(refusal)
        return False

    def _leave(self, entry: _Entry, outputs: Sequence[Any], tensors: Sequence[Any], containers: Sequence[Any]) -> Any:
        """Put what a replay made where the callable would have put it. Returns what that would have returned."""
        self.record.replays += 1
        self.record.reason, self._patience, self._skips = None, _PATIENCE, 0
        left = entry.left[outputs[0]]
        if left.written:
            torch.autograd.graph.increment_version([tensors[number] for number in left.written])
        for place in left.places:
            value = None if place.value is None else _make(place.value, tensors, containers, outputs)
            if place.kind == "grad":
                tensors[place.where].grad = value
            elif place.kind == "items":
                containers[place.where][:] = value
            else:
                key = _make(place.key, tensors, containers, outputs)
                if place.kind == "gone":
                    del containers[place.where][key]
                else:
                    containers[place.where][key] = value
        return _make(left.result, tensors, containers, outputs)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refused(self, refusal: Refusal, args: Any, kwargs: Any) -> Any:
        self._note(refusal)
        self._waste(1, None)
        return self._run(args, kwargs)

    def _note(self, refusal: Refusal, reason: str | None = None) -> None:
        self.record.reason = reason or str(refusal)
        if refusal.reason not in self.record.refusals:
            self.record.refusals[refusal.reason] = refusal
            if self._report is not None:
                self._report.notes.append(str(refusal))
        if self._settings.strict:
            raise CaptureError("strict", f"{self.record.name} cannot be captured: {self.record.reason}")

    def _waste(self, calls: int, region: Region | None) -> None:
        """A call was looked at in vain: after some in a row, so many run without a look. ``region``: one that captures
        nothing any more."""
        self._patience -= calls
        if self._patience <= 0:
            self._skips = min(2 * self._skips or _PATIENCE, _LOOKS if region is not None else _PATIENCE)
            self._skip, self._patience, self._waits_for = self._skips, 4, region


def _signature(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Sizes and types, by which calls of an entry differ."""
    return tuple([(tensor.size(), tensor.stride(), tensor.dtype) for tensor in tensors])


def _layouts(shared: bytes, tensors: Sequence[torch.Tensor]) -> Hashable:
    """What tensors that share memory look like, and which are the same object."""
    members = [number for group in _groups(shared) for number in group.members]
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(tensors[number]), number) for number in members)
    return same, _signature([tensors[number] for number in members])


def _is_watched() -> bool:
    """Whether something has to see each operator of this call, or captures it already."""
    return bool(
        get_ident() in capturing
        or compat.dispatch_mode_depth()
        or compat.functorch_level() is not None
        or torch.compiler.is_compiling()
        or compat.saved_tensor_hooks(True) is not None
        or (compat.function_depth() and {type(mode) for mode in compat.function_modes()} != {compat.DeviceContext})
    )


def graph(
    function: Callable[P, R] | None = None,
    *,
    held: Any = (),
    key: Callable[..., Any] | None = None,
    compare: Callable[[str, torch.Tensor], bool] | None = None,
    eager: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Capture ``function``, any callable, at its second call, and replay it with the tensors of each later one. Without
    ``function``, a decorator.

    Arguments are pytrees: their tensors are patched, their plain values tell calls apart, by bits. What ``function``
    leaves in what is held (gradients, buffers, states of optimizers, attributes) is put there by a replay. A call runs
    uncaptured, and ``record.reason`` says why, where a replay might do something else.

    Args:
        function: its Python code runs when it is captured, and never in a replay
        held: modules, optimizers, tensors, and containers of them, that it reads or writes: looked up at every call
        key: called with the arguments; what else the Python code decides by
        compare: called with the path and the tensor of what is held; where it is false, a comparison neither copies the
            tensor nor looks at it, and the replay writes it in place, right before ``function`` writes it again
        eager: operators (without overloads, such as ``aten.sort``) that replays call between segments
        options: those of the backend
    """
    make = functools.partial(Graph, held=held, key=key, compare=compare, eager=eager, options=options)
    return make if function is None else make(function)
