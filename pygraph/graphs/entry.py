"""Calls of one key: the region that answers them, and runs of the callable on stand-in memory, which are undone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import struct
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import Any, TypeAlias

import torch

from pygraph import compat
from pygraph.errors import CaptureError
from pygraph.graphs.held import PLAIN, Walk, are_same, bits_of, contents_of, reachable, refill, step_of, tables_of
from pygraph.graphs.values import Built, Describer, Left, Place, containers_in, read
from pygraph.graphs.watch import Step, Watch, attributes_refused, hold_against, last_frame, metadata, origin_of_line
from pygraph.runtime.provenance import blame, blamed
from pygraph.runtime.region import Region
from pygraph.runtime.tensors import extent

# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """A call that the region of its entry answers. ``stood``: the callable has run on stand-ins. ``answered``: it has
    run for real, and returned ``returned``. ``log``: operators of its last capture, with their numbers and lines."""

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
"""For each thread, the call that it is answering."""


Use: TypeAlias = tuple[int, Any, tuple[Any, ...], Mapping[str, Any]]
"""A call of a graph: thread, held state, and arguments."""

_MOMENT, _LONGEST = 0.05, 30.0
"""Seconds that a capture and calls of other threads wait for each other; and, at most, calls that share its tensors."""


def _tensors_of(use: Use) -> frozenset[int] | None:
    """The ids of the tensors of a call, and of their gradients; None if its arguments cannot be read."""
    tensors: list[torch.Tensor] = []
    try:
        read(use[2:], tensors, [])
        tensors += Walk((use[1],)).tensors
    except Exception:  # noqa: BLE001 - another thread may change it, and nodes of pytrees run code of the user's
        return None
    return frozenset(id(each) for tensor in tensors for each in (tensor, _gradient(tensor)))


class Turns:
    """Users of the tensors of graphs: any number of threads, and one owner, which replaces the memory of some tensors.
    Only calls with these tensors wait long for the owner."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._uses: dict[int, Use] = {}
        """Uses by identity. Most calls do not take the lock: a call adds its use here before it reads the owner, and a
        thread makes itself the owner before it reads the uses, so that at least one of them sees the other."""
        self._owner: int | None = None
        self._waiting = 0
        """Number of threads that wait for uses to end. Each counts itself before it reads the uses."""
        self._shown: frozenset[int] = frozenset()
        self._in_vain = False
        """A call has waited too long for the owner, which may wait for that call."""

    def enter(self, use: Use) -> bool:
        """Begin a call. True if it may be captured or replayed, and not only run. Raises CaptureError
        (``capture-busy``)."""
        self._uses[id(use)] = use
        return self._owner is None or self._enter_in_turn(use)

    def _enter_in_turn(self, use: Use) -> bool:
        with self._condition:
            free = self._owner is None or self._owner == use[0]
            if free:
                return True
            del self._uses[id(use)]
            if self._condition.wait_for(lambda: self._owner is None, _MOMENT):
                self._uses[id(use)] = use
                return True
        tensors = _tensors_of(use)
        with self._condition:

            def apart() -> bool:
                return self._owner is None or (tensors is not None and tensors.isdisjoint(self._shown))

            if not self._condition.wait_for(apart, _LONGEST):
                self._in_vain = True
                said = "another thread captures a call with the same tensors, and may wait for this one"
                raise CaptureError("capture-busy", said)
            self._uses[id(use)] = use
            return self._owner is None

    def leave(self, use: Use) -> None:
        """End a call, if it began."""
        self._uses.pop(id(use), None)
        if self._waiting:
            with self._condition:
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Context in which no other thread uses ``tensors``. Raises CaptureError: ``capture-busy`` if another thread
        keeps using them, ``uncaptured-work`` if another thread has waited in vain for the end of the block."""
        self._begin(frozenset(map(id, tensors)))
        try:
            yield
        finally:
            with self._condition:
                in_vain, self._in_vain = self._in_vain, False
                self._owner, self._shown = None, frozenset()
                self._condition.notify_all()
            if in_vain:
                raise CaptureError("uncaptured-work", "another thread's call waits for the capture of its tensors")

    def _begin(self, shown: frozenset[int]) -> None:
        me, until = get_ident(), perf_counter() + _MOMENT
        known: dict[int, tuple[Use, bool]] = {}
        with self._condition:
            self._waiting += 1
        try:
            while True:
                with self._condition:
                    new = self._own(me, shown, known)
                    if new is None:
                        return
                    if not new and not self._condition.wait(until - perf_counter()):
                        raise CaptureError("capture-busy", "another thread runs a graph with the same tensors")
                for use in new:
                    used = _tensors_of(use)
                    known[id(use)] = use, used is not None and used.isdisjoint(shown)
        finally:
            with self._condition:
                self._waiting -= 1

    def _own(self, me: int, shown: frozenset[int], known: dict[int, tuple[Use, bool]]) -> list[Use] | None:
        """Make this thread the owner and return None, if there is none and no other thread uses tensors in ``shown``.
        Otherwise return the uses that are not ``known`` yet."""
        free, owns = self._owner is None, False
        try:
            if free:
                self._owner = me  # first: see ``_uses``
            others = [use for use in list(self._uses.values()) if use[0] != me]
            new = [use for use in others if id(use) not in known]
            owns = free and not new and all(known[id(use)][1] for use in others)
            if owns:
                self._shown = shown
            return None if owns else new
        finally:
            if free and not owns:
                self._owner = None


turns = Turns()
os.register_at_fork(after_in_child=turns.__init__)  # type: ignore[misc]


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that share memory: their numbers, their offsets in bytes from the first byte, and total bytes."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def groups_of(shared: bytes) -> list[Group]:
    """Decode the groups of tensors that share memory, as ``Held`` encodes them."""
    numbers = list(struct.unpack(f"{len(shared) // 8}q", shared))
    found = []
    while numbers:
        count, nbytes = numbers[:2]
        pairs, numbers = numbers[2 : 2 + 2 * count], numbers[2 + 2 * count :]
        found.append(Group(tuple(pairs[::2]), tuple(pairs[1::2]), nbytes))
    return found


class Entry:
    """Calls of one key. The region takes each tensor, or, for tensors that share memory, all of it as bytes."""

    def __init__(
        self,
        function: Callable[..., Any],
        answering: Callable[..., Any],
        device: torch.device,
        keep_casts: Callable[[], bool],
        *,
        verifies: bool,
    ) -> None:
        self.function, self.answering, self.device, self.verifies = function, answering, device, verifies
        self._keep_casts = keep_casts
        self.left: list[Left] = []
        self.pending: dict[Hashable, list[Step]] = {}
        """Operators of captures that no later call has confirmed, by the signature of the captured call."""
        self.groups: list[Group] = []
        self.plan: tuple[int | Group, ...] = ()
        self.spared: frozenset[int] = frozenset()
        """Numbers of the tensors that a comparison neither copies nor checks."""
        self.region: Region
        self.layouts: Hashable = None
        """Layouts of tensors that share memory."""
        self.known: Any = None
        """Native check that recognises its calls; None before the first replay, and if it cannot read all that
        differs."""

    # -- arguments of the region -----------------------------------------------------------------------------------

    @property
    def exempt(self) -> frozenset[int]:
        """Positions of the region's arguments that contain spared tensors."""
        numbers = ((each,) if isinstance(each, int) else each.members for each in self.plan)
        return frozenset(position for position, each in enumerate(numbers) if not self.spared.isdisjoint(each))

    def arguments(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The region's arguments."""
        if not self.groups and len(self.plan) == len(tensors):
            return tensors.copy()
        return [tensors[each] if isinstance(each, int) else _bytes_of(each, tensors) for each in self.plan]

    def shown(self, call: Call, args: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """For each tensor of a call, by number, a tensor like it in the memory of ``args``."""
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
        """Answer the call by running the callable; describe its effects if a replay is compared with them."""
        call = current.call
        assert call is not None
        args.clear()
        watched = call.stood or self.verifies
        before = Before(call) if watched else None
        call.returned = self.answering(*call.args, **call.kwargs)
        call.answered = True
        if before is None:
            return []
        try:
            outputs = self._number(*before.left(call.returned))
        except CaptureError:
            return [-1]  # equal to the outputs of no capture
        before.tell(self.left[outputs[0]].written)
        return outputs

    def on_stand_ins(self, args: list[Any]) -> list[Any]:
        """Run the callable with the call's tensors on the memory of ``args``, and undo its effects."""
        call = current.call
        assert call is not None
        call.stood = True
        recorded = compat.dispatch_mode_depth() > 0
        with contextlib.ExitStack() as steps:
            steps.enter_context(turns.alone(call.tensors))
            with metadata():
                shown = self.shown(call, args)
                before = Before(call, shown)
                around = Around(self.function, call.tensors, before.containers) if recorded else None
            args.clear()
            modes = Modes()
            steps.callback(modes.put_back, seeds=recorded)
            torch.clear_autocast_cache()
            steps.callback(self._drop_casts)
            steps.callback(before.put_back)
            with metadata():
                for number, tensor in shown.items():
                    call.tensors[number].data = tensor
            steps.enter_context(torch.inference_mode(call.inference))
            steps.enter_context(torch.set_grad_enabled(call.gradients))
            steps.enter_context(torch.autograd.set_multithreading_enabled(False))
            spared = [shown[number] for number in self.spared]
            watch = Watch(self.function, self.device, shown.values(), spared) if recorded else None
            if watch is not None:
                steps.enter_context(watch)
            if recorded:
                steps.enter_context(attributes_refused(call.tensors, shown.values()))
            steps.enter_context(compat.compiled_code_runs())
            if around is not None and watch is not None:
                steps.callback(around.put_back, watch.is_known)
            try:
                returned = self.function(*call.args, **call.kwargs)
            except Exception as error:
                name = getattr(self.function, "__qualname__", type(self.function).__name__)
                blame(name, origin_of_line(last_frame(error)))  # unless an operator is to blame
                raise
            if recorded and (failed := blamed()) is not None:
                raise CaptureError("capture-failed", f"{failed} failed, and the callable went on")
            if torch.is_grad_enabled() is not call.gradients:
                raise CaptureError("uncaptured-work", "the callable leaves the mode of gradients changed")
            modes.check(seeds=recorded)
            with metadata():
                before.check()
                if around is not None and watch is not None and (place := around.put_back(watch.is_known)):
                    raise CaptureError("survivor", f"{place} keeps a tensor that the callable makes: add it to held")
                left, made = before.left(returned, () if around is None else around.containers)
                if watch is not None:
                    written = (
                        n for n, each in shown.items() if watch.writes(each) and not call.tensors[n].is_inference()
                    )
                    left = dataclasses.replace(left, written=left.written.union(written))
                outputs = self._number(left, made)
            if watch is not None:
                watch.log.append((f"leaves({outputs[0]})", watch.memory(outputs[1:]), None))
                if call.log is not None:
                    hold_against(call.log, watch.log)
                call.log = watch.log
            return outputs

    def _drop_casts(self) -> None:
        """Drop autocast's cached casts of stand-ins; an autocast context around the call continues."""
        torch.clear_autocast_cache()
        if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            with metadata():
                self._keep_casts()

    def _number(self, left: Left, outputs: list[torch.Tensor]) -> list[Any]:
        """The outputs of the region: the number of ``left`` among the known ones, and tensors."""
        known = next((number for number, each in enumerate(self.left) if each == left), len(self.left))
        if known == len(self.left):
            self.left.append(left)
        self.left[known] = dataclasses.replace(left, written=left.written | self.left[known].written)
        return [known, *outputs]


def _bytes_of(group: Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All memory of a group, as bytes. Raises CaptureError if it lies in several storages."""
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
    """State of the tensors and containers of a call before the callable runs. ``shown``: the stand-ins, if it runs on
    them."""

    def __init__(self, call: Call, shown: Mapping[int, torch.Tensor] | None = None) -> None:
        self._walk, self._tensors, self._shown = Walk(call.root), call.tensors, shown or {}
        self.containers = self._walk.containers
        self._contents = self._walk.contents()
        known = set(map(id, self._walk.containers))
        self._arguments = [each for each in containers_in((call.args, call.kwargs)) if id(each) not in known]
        self._given = [contents_of(_written_in(each)) for each in self._arguments]
        self._hooks = [_hooks_of(tensor) for tensor in call.tensors]
        self._gradients = [_gradient(tensor) for tensor in call.tensors]
        self._versions = [-1 if tensor.is_inference() else tensor._version for tensor in call.tensors]
        self._facts = [(tensor.requires_grad, tensor.is_leaf) for tensor in call.tensors]
        self._data = [call.tensors[number].data for number in self._shown]

    def check(self) -> None:
        """Raise CaptureError if the callable gave a tensor other memory, changed its autograd flags or hooks, or wrote
        to a container among the arguments."""
        for number, tensor in enumerate(self._tensors):
            moved = number in self._shown and (
                tensor.untyped_storage()._cdata != self._shown[number].untyped_storage()._cdata
                or tensor.size() != self._shown[number].size()
            )
            if moved or self._facts[number] != (tensor.requires_grad, tensor.is_leaf):
                said = "the callable gives a tensor other memory, or has autograd follow it"
                raise CaptureError("metadata-mutation", said)
            if _hooks_of(tensor) != self._hooks[number]:
                raise CaptureError("metadata-mutation", "the callable registers a hook of a tensor, or removes one")
        for container, before in zip(self._arguments, self._given, strict=True):
            if before is not None and not are_same(contents_of(_written_in(container)), before):
                said = f"the callable writes to a {type(container).__name__} among its arguments: hold it"
                raise CaptureError("unsupported-argument", said)

    def left(self, returned: Any, others: Iterable[Any] = ()) -> tuple[Left, list[torch.Tensor]]:
        """The description of the callable's effects, and the tensors that it made. ``others``: further containers that
        existed before. Raises CaptureError for effects that a replay cannot have."""
        describer = Describer(self._tensors, self._walk.containers, (*self._arguments, *others))
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

    def tell(self, written: Iterable[int]) -> None:
        """Increment the versions of ``written`` tensors whose writes autograd has not noticed."""
        missed = [number for number in written if self._tensors[number]._version == self._versions[number]]
        torch.autograd.graph.increment_version([self._tensors[number] for number in missed])

    def put_back(self) -> None:
        """Undo the callable's changes to tensors, arguments and held state."""
        with metadata():
            for number, data in zip(self._shown, self._data, strict=True):
                self._tensors[number].data = data
            for tensor, gradient, facts in zip(self._tensors, self._gradients, self._facts, strict=True):
                if tensor.requires_grad != facts[0] and tensor.is_leaf:
                    tensor.requires_grad_(facts[0])
                if _gradient(tensor) is not gradient:
                    tensor.grad = gradient
            for tensor, hooks in zip(self._tensors, self._hooks, strict=True):
                for known, before in zip(_hook_tables(tensor), hooks, strict=True):
                    if known is not None and dict(known) != before:
                        known.clear()
                        known.update(before)
            for container, contents in zip(self._arguments, self._given, strict=True):
                written = _written_in(container)
                if contents is not None and not are_same(contents_of(written), contents):
                    refill(written, contents)
            self._walk.restore(self._contents)


_CACHE = type(functools.lru_cache(len))


class Around:
    """Places outside of held state in which a callable may keep tensors, as far as a search finds them: dictionaries,
    lists, attributes, variables, and caches of functions."""

    def __init__(
        self, function: Callable[..., Any], tensors: Iterable[torch.Tensor], containers: Iterable[Any]
    ) -> None:
        known, self._given = set(map(id, containers)), set(map(id, tensors))
        self.containers: list[Any] = []
        """Containers found by the search that a callable may write to."""
        self._tables: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[types.CellType, str, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        for value, path in reachable(function):
            if isinstance(value, _CACHE):
                self._caches.append((value, value.cache_info().misses))
            if isinstance(value, types.FunctionType):
                cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                self._cells += [(cell, name, _content_of(cell)) for name, cell in cells]
            table = tables_of(value)
            if table is value:
                self.containers.append(value)
            if table is not None and id(table) not in known:
                known.add(id(table))
                self._tables.append((table, path, contents_of(table)))

    def put_back(self, is_made: Callable[[torch.Tensor], bool]) -> str | None:
        """Remove tensors that were made meanwhile. Returns a place that kept one, other than a cache, or None."""

        def keeps(value: Any) -> bool:
            found = (each for each, _ in reachable(value) if isinstance(each, torch.Tensor))
            return any(is_made(each) for each in found if id(each) not in self._given)

        found = None
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for cell, name, before in self._cells:
            now = _content_of(cell)
            if now is not before and keeps(now):
                found = name
                if before is None:
                    del cell.cell_contents
                else:
                    cell.cell_contents = before
        for table, path, contents in self._tables:
            if are_same(contents_of(table), contents):
                continue
            if isinstance(table, dict):
                was = dict(contents)
                for key, value in list(table.items()):
                    if was.get(key) is not value and keeps(value):
                        found = step_of(path, key, table).lstrip(".")
                        if key in was:
                            table[key] = was[key]
                        else:
                            del table[key]
            else:
                kept = set(map(id, contents))
                if any(id(item) not in kept and keeps(item) for item in table):
                    found = path or f"a {type(table).__name__}"
                    refill(table, contents)
        return found


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


class Modes:
    """Current modes of torch, and the state of its generator."""

    _ACCESS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    )

    def __init__(self) -> None:
        self._modes = [get() for get, _ in self._ACCESS]
        with metadata():
            self._seeds = torch.get_rng_state()

    def check(self, *, seeds: bool) -> None:
        """Raise CaptureError if modes have changed; with ``seeds``, where draws do not execute, also if the generator
        has."""
        if [get() for get, _ in self._ACCESS] != self._modes:
            raise CaptureError("uncaptured-work", "the callable leaves a mode of torch changed")
        with metadata():
            if seeds and not torch.equal(self._seeds, torch.get_rng_state()):
                raise CaptureError("host-random", "the callable seeds torch's generator, or sets its state")

    def put_back(self, *, seeds: bool) -> None:
        for (get, put), mode in zip(self._ACCESS, self._modes, strict=True):
            if get() != mode:
                put(mode)
        if seeds:
            with metadata():
                torch.set_rng_state(self._seeds)


def _written_in(argument: Any) -> Any:
    """The list or dictionary behind a container among the arguments: itself, or its attributes."""
    return argument if isinstance(argument, (list, dict)) else getattr(argument, "__dict__", None)


def _hook_tables(tensor: torch.Tensor) -> tuple[dict[int, Any] | None, ...]:
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def _hooks_of(tensor: torch.Tensor) -> tuple[dict[int, Any], ...]:
    return tuple(dict(hooks or ()) for hooks in _hook_tables(tensor))


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf and not tensor.is_inference() else None


def _changes(number: int, container: Any, before: list[Any], describer: Describer) -> Iterator[Place]:
    """Changes of a container since ``before``. Raises CaptureError for an object that a replay cannot make."""
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
        yield Place("entry", number, describer.describe(key), describer.describe(value))
    for key in was:
        if key not in container:
            yield Place("gone", number, describer.describe(key))


def _bits_or_none(value: object) -> Hashable:
    return bits_of(value) if type(value) in PLAIN else None


@dataclass(eq=False)
class Look:
    """One structure of held state. ``entries``: by the rest of the key. ``containers``: true if an entry's calls change
    containers, or return one."""

    held: Any
    paths: tuple[str, ...]
    entries: OrderedDict[Hashable, Entry] = field(default_factory=OrderedDict)
    containers: bool = False


def signature_of(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Sizes, strides and types, by which calls of an entry differ."""
    return tuple([(tensor.size(), tensor.stride(), tensor.dtype) for tensor in tensors])


def layouts_of(shared: bytes, tensors: Sequence[torch.Tensor]) -> Hashable:
    """Layouts of tensors that share memory, and which of them are one object."""
    members = [number for group in groups_of(shared) for number in group.members]
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(tensors[number]), number) for number in members)
    return same, signature_of([tensors[number] for number in members])
