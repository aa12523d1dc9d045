"""Calls of one key: the region that answers them, and runs on stand-ins, after which all is put back."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from pygraph import compat
from pygraph.errors import CaptureError
from pygraph.graphs.held import PLAIN, Walk, are_same, bits_of, contents_of
from pygraph.graphs.values import Built, Describer, Left, Place
from pygraph.graphs.watch import Step, Watch, hold_against, last_frame, metadata, origin_of_line
from pygraph.runtime.provenance import blame, blamed
from pygraph.runtime.region import Region
from pygraph.runtime.tensors import extent

# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
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
    log: list[Step] | None = None


class _Current(threading.local):
    call: Call | None = None


current = _Current()
"""Of each thread, the call that it answers."""


class Turns:
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


turns = Turns()
os.register_at_fork(after_in_child=turns.__init__)  # type: ignore[misc]


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that share memory: their numbers, how many bytes each begins behind the first byte, and bytes in all."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def groups_of(shared: bytes) -> list[Group]:
    """Read what ``Held`` says of shared memory."""
    numbers = list(struct.unpack(f"{len(shared) // 8}q", shared))
    found = []
    while numbers:
        count, nbytes = numbers[:2]
        pairs, numbers = numbers[2 : 2 + 2 * count], numbers[2 + 2 * count :]
        found.append(Group(tuple(pairs[::2]), tuple(pairs[1::2]), nbytes))
    return found


class Entry:
    """Calls of one key. Its region takes each tensor, or, for those that share memory, all of that memory as bytes."""

    def __init__(self, function: Callable[..., Any], device: torch.device, *, verifies: bool) -> None:
        self.function, self.device, self.verifies = function, device, verifies
        self.left: list[Left] = []
        self.pending: dict[Hashable, list[Step]] = {}
        """The operators of captures that no other call has confirmed, by the signature of theirs."""
        self.groups: list[Group] = []
        self.plan: tuple[int | Group, ...] = ()
        self.region: Region

    # -- arguments of the region -----------------------------------------------------------------------------------

    def arguments(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The region's arguments."""
        if not self.groups and len(self.plan) == len(tensors):
            return tensors.copy()
        return [tensors[each] if isinstance(each, int) else _bytes_of(each, tensors) for each in self.plan]

    def shown(self, call: Call, args: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
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
        call = current.call
        assert call is not None
        args.clear()
        watched = call.stood or self.verifies
        before = Before(call) if watched else None
        call.returned = self.function(*call.args, **call.kwargs)
        call.answered = True
        if before is None:
            return []
        try:
            return self._number(*before.left(call.returned))
        except CaptureError:
            return [-1]  # as no capture leaves

    def on_stand_ins(self, args: list[Any]) -> list[Any]:
        """Run the callable with the memory of ``args`` in the places of the call's tensors, and put all back."""
        call = current.call
        assert call is not None
        call.stood = True
        recorded = compat.dispatch_mode_depth() > 0
        with contextlib.ExitStack() as steps:
            steps.enter_context(turns.alone())
            with metadata():
                shown = self.shown(call, args)
                before = Before(call, shown)
            args.clear()
            torch.clear_autocast_cache()
            steps.callback(torch.clear_autocast_cache)
            steps.callback(before.put_back)
            with metadata():
                for number, tensor in shown.items():
                    call.tensors[number].data = tensor
            steps.enter_context(torch.inference_mode(call.inference))
            steps.enter_context(torch.set_grad_enabled(call.gradients))
            steps.enter_context(torch.autograd.set_multithreading_enabled(False))
            watch = steps.enter_context(Watch(self.function, self.device, shown.values())) if recorded else None
            steps.enter_context(compat.compiled_code_runs())
            random = torch.default_generator.get_state() if recorded else None
            try:
                returned = self.function(*call.args, **call.kwargs)
            except Exception as error:
                name = getattr(self.function, "__qualname__", type(self.function).__name__)
                blame(name, origin_of_line(last_frame(error)))  # unless an operator is to blame
                raise
            if recorded and (failed := blamed()) is not None:
                raise CaptureError("capture-failed", f"{failed} failed, and the callable went on")
            with metadata():
                before.check()
                if random is not None and not torch.equal(random, torch.default_generator.get_state()):
                    raise CaptureError("host-random", "the callable seeds torch's generator, or sets its state")
                outputs = self._number(*before.left(returned))
            if watch is not None:
                watch.log.append((f"leaves({outputs[0]})", watch.memory(outputs[1:]), None))
                if call.log is not None:
                    hold_against(call.log, watch.log)
                call.log = watch.log
            return outputs

    def _number(self, left: Left, outputs: list[torch.Tensor]) -> list[Any]:
        """The outputs of the region: the number of what is left, and tensors."""
        known = next((number for number, each in enumerate(self.left) if each == left), len(self.left))
        if known == len(self.left):
            self.left.append(left)
        self.left[known] = dataclasses.replace(left, written=left.written | self.left[known].written)
        return [known, *outputs]


def _bytes_of(group: Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
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


class Before:
    """What a call's tensors and containers are before the callable runs; ``shown`` are the stand-ins, if it runs on
    such."""

    def __init__(self, call: Call, shown: Mapping[int, torch.Tensor] | None = None) -> None:
        self._walk, self._tensors, self._shown = Walk(call.root), call.tensors, shown or {}
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

    def left(self, returned: Any) -> tuple[Left, list[torch.Tensor]]:
        """What the callable leaves, and the tensors of it that it made. Raises CaptureError."""
        describer = Describer(self._tensors, self._walk.containers)
        result = describer.describe(returned)
        places: list[Place] = []
        for number, (tensor, before) in enumerate(zip(self._tensors, self._gradients, strict=True)):
            gradient = _gradient(tensor)
            if gradient is not before:
                places.append(Place("grad", number, None, describer.describe(gradient)))
        for number, (container, before) in enumerate(zip(self._walk.containers, self._contents, strict=True)):
            if before is not None:
                places += _changes(number, container, before, describer)
        pairs = enumerate(zip(self._tensors, self._versions, strict=True))
        written = frozenset(number for number, (tensor, version) in pairs if 0 <= version != tensor._version)
        with metadata():
            return Left(result, tuple(places), written), [tensor.data for tensor in describer.made]

    def put_back(self) -> None:
        """Undo whatever the callable did to what is held."""
        with metadata():
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


def _changes(number: int, container: Any, before: list[Any], describer: Describer) -> Iterator[Place]:
    """How a container differs from what it held. Objects that are not looked into do not count."""
    if not isinstance(container, dict):
        if not are_same(contents_of(container), before):
            yield Place("items", number, None, Built(list, tuple(map(describer.describe, container))))
        return
    was = dict(before)
    if list(container) != [key for key in was if key in container] + [key for key in container if key not in was]:
        items = tuple(describer.describe(each) for entry in container.items() for each in entry)
        yield Place("items", number, None, Built(dict, items))
        return
    for key, value in container.items():
        if key in was and was[key] is value:
            continue
        if key in was and _bits_or_none(was[key]) == _bits_or_none(value) is not None:
            continue
        if _is_tracked(value) or (key in was and _is_tracked(was[key])):
            yield Place("entry", number, describer.describe(key), describer.describe(value))
    for key in was:
        if key not in container:
            yield Place("gone", number, describer.describe(key))


def _bits_or_none(value: object) -> Hashable:
    return bits_of(value) if type(value) in PLAIN else None


def _is_tracked(value: object) -> bool:
    return type(value) in PLAIN or isinstance(value, (torch.Tensor, dict, list, tuple, set, enum.Enum))


@dataclass(eq=False)
class Look:
    """One structure of what is held. ``entries`` are known by all else of the key; ``containers``: one of them leaves
    something in containers."""

    held: Any
    paths: tuple[str, ...]
    entries: OrderedDict[Hashable, Entry] = field(default_factory=OrderedDict)
    containers: bool = False


def signature_of(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Sizes and types, by which calls of an entry differ."""
    return tuple([(tensor.size(), tensor.stride(), tensor.dtype) for tensor in tensors])


def layouts_of(shared: bytes, tensors: Sequence[torch.Tensor]) -> Hashable:
    """What tensors that share memory look like, and which are the same object."""
    members = [number for group in groups_of(shared) for number in group.members]
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(tensors[number]), number) for number in members)
    return same, signature_of([tensors[number] for number in members])
