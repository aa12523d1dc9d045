"""``pygraph.loop``: a step that one replay runs many times; the device decides how often.

    control: count, limit, stop ─┬─ captured:  one replay, while count < limit and not stop { iteration, count + 1 }
                                 └─ else:      the same loop on the host

    iteration:  new = step(state) ─ copied into the state's memory ─ what is collected ─ stop = until(state)

The iteration is captured as by ``pygraph.graph``; the program of its launches becomes the body of a loop, without
unnecessary copies.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import operator
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event, RLock, Thread
from typing import Any

import torch

from pygraph import compat
from pygraph.graphs.callable import Graph, GraphRecord, How
from pygraph.graphs.entry import Call, Entry, Look, current, signature_of
from pygraph.graphs.held import PLAIN, Walk, bits_of, named_storages, storage_of
from pygraph.program.default import LaunchPasses
from pygraph.program.loops import LoopPasses
from pygraph.runtime import live
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.reasons import reason_of
from pygraph.runtime.tensors import digest
from pygraph.runtime.variants import State

_KNOWN = 64
"""Maximum number of known loops."""

_LEAST, _COMPARED = 2, 4
"""Least and greatest number of iterations in which a replay is compared. Each iteration is the same body. Over many of
them, sums whose last bits vary from run to run would lead to other integers, such as tokens, in any two runs."""

_LOOKED = 3
"""Number of runs of ``until`` and ``collect`` that all have to change something before these are blamed: another thread
may draw numbers."""


@dataclass(frozen=True)
class Looped:
    """Result of ``loop``.

    Args:
        state: final state
        count: number of iterations that ran: an int64 scalar tensor on the state's device
        collected: results of ``collect``, one row per iteration, then zeros up to ``steps`` rows; None without it
        record: outcome of the calls of this loop
    """

    state: Any
    count: torch.Tensor
    collected: Any
    record: GraphRecord


@torch.compiler.disable  # type: ignore[untyped-decorator]
def loop(
    step: Callable[[Any], Any],
    state: Any,
    *,
    steps: int | torch.Tensor,
    until: Callable[[Any], torch.Tensor] | None = None,
    collect: Callable[[Any], Any] | None = None,
    follow: Callable[[Any], None] | None = None,
    held: Any = (),
    key: Callable[..., Any] | None = None,
    compare: Callable[[str, torch.Tensor], bool] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Looped:
    """Run ``state = step(state)`` at most ``steps`` times, until ``until(state)`` is true. From the third call on, the
    loop is one launch: the device counts iterations and reads the result of ``until``, and the host does not wait.

    The initial state is not modified. Memory that a step writes in place, such as a cache, must be in ``held``.
    Gradients are not recorded. If an iteration cannot be captured or needs the host, the host runs the loop, and
    ``record.reason`` says why. Raises ValueError if a step changes the structure, sizes, types or plain values of the
    state, TypeError if ``steps`` is not an integer, and OptionError or ParseError for an invalid option.

    Args:
        step: takes a state, a pytree of tensors and plain values, and returns the next state
        state: initial state, with at least one tensor
        steps: maximum number of iterations: an integer, or an integer tensor of one element
        until: takes each state, also the initial one; returns a tensor of one element; default: run all ``steps``
        collect: takes each new state; returns a pytree of tensors, kept for each iteration. Needs an integer ``steps``
        follow: called with the rows of new iterations while the loop runs: on the CPU, in order, by one thread at a
            time, perhaps not the caller's. ``loop`` then waits for the end, and raises an exception of ``follow``.
            Needs ``collect``
        held: modules, tensors, and containers of them, that the step reads or writes; a
            ``step`` that is a module is held by itself
        key: called with a state; returns the other plain values on which the Python code depends
        compare: see ``pygraph.graph``
        options: see ``pygraph.graph``
    """
    if not isinstance(steps, torch.Tensor):
        steps = operator.index(steps)
    elif steps.is_floating_point() or steps.is_complex():
        raise ValueError(f"steps is a tensor of {steps.dtype}: pass an integer one")
    elif collect is not None:
        raise ValueError("what is collected needs an integer for steps: memory for it is made before the loop")
    if follow is not None and collect is None:
        raise ValueError("follow is called with what is collected: pass collect, too")
    identity = _named((step, until, collect, key, compare, tuple(sorted((options or {}).items())), live.owner()))
    found = _loops.get(identity)
    if found is None:
        found = _loops[identity] = Loop(step, until, collect, key=key, compare=compare, options=options)
        while len(_loops) > _KNOWN:
            _loops.popitem(last=False)
    _loops.move_to_end(identity)
    with torch.no_grad():
        return found.run(state, steps, (step, held) if isinstance(step, torch.nn.Module) else held, follow)


_loops: OrderedDict[Hashable, Loop] = OrderedDict()


def _named(value: Any, met: tuple[Any, ...] = ()) -> Hashable:
    """A key of a function: its code and the objects to which it refers, so that a lambda has the same key in each call.
    Tuples and plain values count by value, other objects by identity. ``met``: enclosing functions."""
    kind = type(value)
    if kind in PLAIN:
        return kind, bits_of(value)
    if kind is tuple:
        return kind, *(_named(each, met) for each in value)
    if kind is types.MethodType:
        return _Same(value.__self__), _named(value.__func__, met)
    if kind is not types.FunctionType or any(value is each for each in met):
        return _Same(value)
    empty = types.CellType()
    cells = tuple(cell if cell == empty else cell.cell_contents for cell in value.__closure__ or ())
    defaults = *(value.__defaults__ or ()), *(item for pair in (value.__kwdefaults__ or {}).items() for item in pair)
    return value.__code__, _Same(value.__globals__), _named((*cells, *defaults), (*met, value))


class _Same:
    """Key of an object by identity, independent of the object's own equality."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Loop(Graph[..., None]):
    """The graph of one iteration, replayed in a loop."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        until: Callable[[Any], torch.Tensor] | None,
        collect: Callable[[Any], Any] | None,
        *,
        key: Callable[..., Any] | None,
        compare: Callable[[str, torch.Tensor], bool] | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        after = _ends(until, collect)
        iteration = _iteration(step, after)
        iteration.__qualname__ = getattr(step, "__qualname__", type(step).__name__)
        how: How = {"key": None if key is None else _key_of_state(key), "compare": compare, "options": options}
        super().__init__(iteration, how)
        self._until, self._collect, self._step, self._after = until, collect, step, after
        self._each = Graph(iteration, how)
        """Replays one iteration at a time, if the host runs the loop for good."""
        self._on_host = False
        self._control: torch.Tensor | None = None
        """Count, limit and stop of the latest call."""
        self._odd: str | None = None
        """Why copies into one state would not do the same as the last loop on the host; None if they would."""
        self._latest: Any = None
        """Final state of the last loop on the host, if the loop may continue."""
        self._follower: _Follower | None = None
        self._turn = RLock()
        """Lock of the thread that runs the loop: held state is that of its call."""
        self._answering = self._loop_on_host

    def run(
        self, state: Any, steps: int | torch.Tensor, held: Any, follow: Callable[[Any], None] | None = None
    ) -> Looped:
        """Run the loop from ``state`` on."""
        leaves, structure = compat.tree_flatten(state)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError("the state of a loop has no tensor")
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.layout is not torch.strided:
                    raise ValueError(f"a tensor of {leaf.layout} in the state of a loop: make it a strided one")
            elif type(leaf) not in PLAIN and not isinstance(leaf, enum.Enum):
                raise ValueError(f"a {type(leaf).__name__} in the state of a loop: make it a pytree, or a tensor")
        device = tensors[0].device
        shared = len({storage_of(leaf) for leaf in tensors}) < len(tensors)
        begin = copy.deepcopy(compat.tree_map(_detached, state)) if shared else None
        leaves = [_copied(leaf) for leaf in leaves]
        state = compat.tree_unflatten(leaves, structure)
        control = torch.zeros(3, dtype=torch.int64, device=device)  # count, limit, stop
        control[1:2] = steps.reshape(1) if isinstance(steps, torch.Tensor) else steps
        rows, known = None, self.record.replays or (self._until is None and self._collect is None)
        for _ in range(_LOOKED):
            reads = None if known else _Reads((leaves, held), device)
            _look(self._until, state, control)
            if self._collect is not None:
                rows = compat.tree_map(lambda value: _rows(value, steps), self._collect(state))
            if reads is None or not reads.changed():
                break
        else:
            raise ValueError(
                "until and collect may only read: one writes to what it is given, or held, or draws numbers"
            )
        with self._turn:
            outer = self._root, self._follower
            self._root = self._each._root = (held,)
            self._follower = None if follow is None else _Follower(follow, control, rows)
            try:
                if shared:
                    refusal = Refusal("host-loop", "values of the first state share memory: clone them")
                    self._refused(refusal, (control, state, rows), {"begin": begin})
                else:
                    self._control = control
                    self(control, state, rows)
                if self._follower is not None:
                    self._follower.finish()
            finally:
                self._each._root = outer[0]
                self._root, self._follower = outer
                self._latest = None
        if rows is not None:
            rows = compat.tree_map(lambda buffer: buffer[: max(int(steps), 0)], rows)
        return Looped(compat.tree_unflatten(leaves, structure), control[0], rows, self.record)

    def _loop_on_host(self, control: torch.Tensor, state: Any, rows: Any, begin: Any = None) -> None:
        """Run the loop as in Python: each step gets the result of the last one, not a copy. If copies are equivalent
        and iterations are captured one by one, all but the first are replays. ``begin``: argument of the first step,
        if not a copy of ``state``."""
        old, self._odd = compat.tree_flatten(state), None
        now = compat.tree_map(_copied, state) if begin is None else begin
        count, limit = control[:2].tolist()
        first = count
        while count < limit and not control[2]:
            now = self._step(now)
            _pairs(old, now)
            if count == first:
                self._odd = _odd(old[0], now, self._root, self._step)
            self._after(control, now, rows)
            control[0].add_(1)
            count += 1
            if self._follower is not None:
                self._follower.look()
            if self._on_host and self._odd is None:
                break
        _carry(old, now)
        self._latest = None if self._on_host and self._odd is None else now
        while self._on_host and self._odd is None and count < limit and not control[2]:
            self._each(control, state, rows)
            control[0].add_(1)
            count += 1
            if self._follower is not None:
                self._follower.look()

    def _replay(self, entry: Entry, tensors: list[torch.Tensor]) -> Any:
        with self._following():
            return super()._replay(entry, tensors)

    def _following(self) -> contextlib.AbstractContextManager[object]:
        return self._follower or contextlib.nullcontext()

    def _launches(self, tensors: Sequence[torch.Tensor], entry: Entry) -> LaunchPasses:
        return LoopPasses(self._place(tensors, entry), super()._launches(tensors, entry))

    def _place(self, tensors: Sequence[torch.Tensor], entry: Entry) -> int:
        """Position of the control among the region's arguments."""
        return entry.plan.index(next(number for number, tensor in enumerate(tensors) if tensor is self._control))

    def _on_stand_ins(self, entry: Entry, args: list[Any]) -> list[Any]:
        """Run one iteration in a capture, and the whole loop otherwise."""
        call = current.call
        if call is None or compat.dispatch_mode_depth():
            return super()._on_stand_ins(entry, args)
        control, left = args[self._place(call.tensors, entry)], list[Any]()
        while control[0] < control[1] and not control[2]:
            left = super()._on_stand_ins(entry, list(args))
            control[0].add_(1)
        args.clear()
        return left

    def _look_up(self, entry: Entry, call: Call, look: Look, containers: Sequence[Any], *, new: bool) -> Any:
        """Answer a call that was not replayed at once. With less than two iterations, it runs on the host: a comparison
        would show little. Otherwise the iterations that may be compared come first."""
        control = call.args[0]
        _, limit, stop = control.tolist()
        if limit < _LEAST or stop:
            return self._run(call.args, call.kwargs)
        self._odd = None
        record, replays = entry.region.record, self.record.replays
        known = record.state is State.UNCAPTURED or signature_of(call.tensors) in entry.pending
        control[1] = limit if known else min(limit, _COMPARED)
        super()._look_up(entry, call, look, containers, new=new)
        control[1] = limit
        if self._odd is None and any(left.places for left in entry.left):
            self._odd = "an iteration changes attributes, or containers, that are held"
        if self._odd is not None and record.state is not State.UNCAPTURED:
            found = Refusal("host-loop", self._odd)
            entry.region.refuse(found)
            self._note(found)
        refusal = next(reversed(record.refusals.values()), None)
        self._on_host = record.state is State.UNCAPTURED and not (refusal and reason_of(refusal.reason).may_pass)
        if known or limit <= _COMPARED:
            return None
        if self.record.replays == replays:
            state, rows = call.args[1:]
            return self._loop_on_host(control, state, rows, self._latest)
        self.record.replays = replays  # two replays are one call
        with contextlib.nullcontext() if entry.verifies else self._following():
            return super()._look_up(entry, call, look, containers, new=False)


_INTERVAL = 0.001
"""Seconds between two checks of a running loop."""


class _Follower:
    """Passes the rows of new iterations to ``follow``. During a replay, a separate thread checks the device's progress:
    the count is written after the rows of its iterations."""

    def __init__(self, follow: Callable[[Any], None], control: torch.Tensor, rows: Any) -> None:
        self._follow, self._count, self._rows = follow, control[0], rows
        self._handed_over = 0
        self._error: BaseException | None = None
        self._stream = torch.cuda.Stream(control.device) if control.is_cuda else None
        self._over = Event()
        self._thread: Thread | None = None

    def look(self) -> None:
        """Pass new rows to ``follow``."""
        count = int(self._count)
        if count <= self._handed_over or self._error is not None:
            return
        new = compat.tree_map(lambda buffer: buffer[self._handed_over : count].to("cpu", copy=True), self._rows)
        self._handed_over = count
        try:
            self._follow(new)
        except BaseException as error:  # noqa: BLE001 - raised at the end of the loop
            self._error = error

    def finish(self) -> None:
        """Pass the remaining rows to ``follow``. Raises the exception of an earlier call of it."""
        self.look()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the count is 0 from then on
        self._over.clear()
        self._thread = Thread(target=self._watch, name="pygraph-follow", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._stream is not None and kind is None:
                torch.cuda.current_stream(self._stream.device).synchronize()
        finally:
            self._over.set()
            if self._thread is not None:
                self._thread.join()

    def _watch(self) -> None:
        with torch.cuda.stream(self._stream):
            while not self._over.wait(_INTERVAL):
                self.look()


def _ends(
    until: Callable[[Any], torch.Tensor] | None, collect: Callable[[Any], Any] | None
) -> Callable[[torch.Tensor, Any, Any], None]:
    """The end of an iteration: a function that writes its row and the stop flag."""

    def after(control: torch.Tensor, state: Any, rows: Any) -> None:
        if collect is not None:
            for buffer, value in zip(compat.tree_leaves(rows), compat.tree_leaves(collect(state)), strict=True):
                buffer.index_copy_(0, control[:1], value.unsqueeze(0))
        _look(until, state, control)

    return after


def _iteration(
    step: Callable[[Any], Any], after: Callable[[torch.Tensor, Any, Any], None]
) -> Callable[[torch.Tensor, Any, Any], None]:
    """An iteration that writes the new state over the old one."""

    def iteration(control: torch.Tensor, state: Any, rows: Any) -> None:
        old = compat.tree_flatten(state)
        _carry(old, step(compat.tree_unflatten(*old)))  # a step may write to containers
        after(control, state, rows)

    return iteration


def _look(until: Callable[[Any], torch.Tensor] | None, state: Any, control: torch.Tensor) -> None:
    """Write to ``control`` whether ``state`` ends the loop."""
    if until is None:
        return
    ends = until(state)
    if not isinstance(ends, torch.Tensor) or ends.numel() != 1:
        raise ValueError("until has to return a tensor of one element")
    stop = control[2:].view(torch.bool)[:1]  # the lowest byte: bytes of one type are copied as they are
    stop.copy_(ends.reshape(1) if ends.dtype is torch.bool else ends.reshape(1) != 0)


_Flat = tuple[list[Any], Any]
"""Leaves of a state, and its structure."""


def _carry(old: _Flat, new: Any) -> None:
    """Copy ``new`` into the memory of the state ``old``, in an order in which no copy overwrites the source of a later
    one. If there is no such order, a source is cloned first. Values that are already in place are skipped."""
    waiting = [(here, there) for here, there in _pairs(old, new) if not _shows(here, there)]
    while waiting:
        read, left = Counter(storage_of(there) for _, there in waiting), list[tuple[torch.Tensor, torch.Tensor]]()
        for here, there in waiting:
            if read[storage_of(here)]:
                left.append((here, there))
            else:
                here.copy_(there)
                read[storage_of(there)] -= 1
        if len(left) == len(waiting):
            here, there = left[0]
            left[0] = here, there.clone()
        waiting = left


def _shows(here: torch.Tensor, there: torch.Tensor) -> bool:
    """True if two tensors of one size and type show the same elements of the same memory."""
    if here is there:
        return True
    place, other = (
        (storage_of(one), one.storage_offset(), _strides(one), one.is_conj(), one.is_neg()) for one in (here, there)
    )
    return place == other


def _pairs(old: _Flat, new: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of corresponding tensors of ``old`` and ``new``. Raises ValueError if ``new`` is no state like ``old``."""
    (leaves, before), (made, after) = old, compat.tree_flatten(new)
    if before != after:
        raise ValueError(f"the step makes a state of another structure: {after}, from {before}")
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for here, there in zip(leaves, made, strict=True):
        if not isinstance(here, torch.Tensor):
            if isinstance(there, torch.Tensor) or type(there) is not type(here) or bits_of(there) != bits_of(here):
                raise ValueError(f"the step changes a plain value of the state, {here!r}: make it a tensor")
        elif not isinstance(there, torch.Tensor) or (here.size(), here.dtype) != (there.size(), there.dtype):
            raise ValueError(f"the step makes {_described(there)} of {_described(here)}")
        else:
            pairs.append((here, there))
    return pairs


def _odd(old: list[Any], new: Any, held: tuple[object], step: Callable[[Any], Any]) -> str | None:
    """Why a copy of ``new`` in the memory of ``old`` would not be equivalent in the next step; None if it would."""
    tensors = [leaf for leaf in old if isinstance(leaf, torch.Tensor)]
    made = [leaf for leaf in compat.tree_leaves(new) if isinstance(leaf, torch.Tensor)]
    storages = {storage_of(leaf) for leaf in made}
    if len(storages) < len(made):
        return "values of a state that a step returns share memory"
    named = {storage_of(one) for one in Walk(held).tensors if one.layout is torch.strided} | set(named_storages(step))
    if not storages.isdisjoint(named):
        return "a step returns memory that is held, or that it refers to: return a copy"
    for here, there in zip(tensors, made, strict=True):
        if _strides(here) != _strides(there):
            return f"the step makes strides {there.stride()} of {here.stride()}: begin with the former"
    return None


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of dimensions larger than 1; 0 for the others."""
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs) if tensor.numel() else ()


class _Reads:
    """Current versions of the tensors in ``things``, and states of torch's generators."""

    def __init__(self, things: Any, device: torch.device) -> None:
        self._device, self._tensors = device, Walk((things,)).tensors
        self._before = self._now()

    def changed(self) -> bool:
        """True if a tensor has been written, or numbers drawn, since."""
        (versions, states), (before, earlier) = self._now(), self._before
        return versions != before or not all(map(torch.equal, states, earlier))

    def _now(self) -> tuple[list[Any], list[torch.Tensor]]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return [_version(tensor) for tensor in self._tensors], states


def _version(tensor: torch.Tensor) -> Any:
    """The version of a tensor, which writes change; for a tensor without one, a fingerprint of its bits."""
    return digest(tensor) if tensor.is_inference() else tensor._version


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of {list(value.size())} of {value.dtype} on {value.device}"


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def _rows(value: torch.Tensor, steps: Any) -> torch.Tensor:
    """Zeros for at least ``steps`` values: rounded up, so that loops with similar ``steps`` share a capture."""
    return value.new_zeros((1 << max(4, (max(steps, 1) - 1).bit_length()), *value.size()))


def _key_of_state(key: Callable[..., Any]) -> Callable[..., Any]:
    return lambda control, state, rows: key(state)  # noqa: ARG005 - as an iteration
