"""``pygraph.loop``: a step that is run many times by one replay, in which the device decides how often.

    control: count, limit, stop ─┬─ captured:  one replay, while count < limit and not stop { iteration, count + 1 }
                                 └─ else:      the same loop on the host

    iteration:  new = step(state) ─ copied into the state's memory ─ what is collected ─ stop = until(state)

The iteration is captured as ``pygraph.graph`` captures it; the program of its launches is made the body of a loop.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.graphs.callable import Graph, GraphRecord, How
from pygraph.graphs.entry import Call, Entry, Look
from pygraph.graphs.held import PLAIN, bits_of
from pygraph.program.default import LaunchPasses
from pygraph.program.loops import Looped as LoopPasses
from pygraph.runtime.reasons import reason_of
from pygraph.runtime.variants import State

_KNOWN = 64
"""Loops that are known at the same time."""

_COMPARED = 2
"""Iterations that a replay is compared in, at least."""


@dataclass(frozen=True)
class Looped:
    """What a loop leaves.

    Args:
        state: the last one
        count: how many iterations ran: an integer tensor on the device
        collected: what ``collect`` returned, one row an iteration, zeros behind the last one; None without it
        record: what became of the calls of this loop
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
    held: Any = (),
    key: Callable[..., Any] | None = None,
    compare: Callable[[str, torch.Tensor], bool] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Looped:
    """Run ``state = step(state)`` at most ``steps`` times, until ``until(state)`` holds. From the third call on, that
    is one launch, which nobody waits for: the device counts, and looks at what ``until`` returns.

    The state that is given is copied, and left as it was. What a step writes in place, such as a cache, is ``held``.
    No gradients are followed. Where an iteration cannot be captured, or needs the host, the host loops, and
    ``record.reason`` says why. Raises ValueError where a step changes the structure, sizes or types of the state.

    Args:
        step: takes a state, a pytree of tensors and plain values, and returns the next one
        state: the first one
        steps: how many iterations at most; an integer, or a tensor of one
        until: called with each state; returns a tensor of one element. The first state is looked at as well
        collect: called with each new state; what it returns, a pytree of tensors, is kept for each iteration. ``steps``
            is an integer then
        held: modules, tensors, and containers of them, that the step reads or writes, beside ``step`` if that is one
        key: called with a state; what else the Python code decides by
        compare: as that of ``pygraph.graph``
        options: those of the backend
    """
    if collect is not None and isinstance(steps, torch.Tensor):
        raise ValueError("what is collected needs an integer for steps: memory for it is made before the loop")
    identity = _named((step, until, collect, key, compare, tuple(sorted((options or {}).items()))))
    found = _loops.get(identity)
    if found is None:
        found = _loops[identity] = Loop(step, until, collect, key=key, compare=compare, options=options)
        while len(_loops) > _KNOWN:
            _loops.popitem(last=False)
    _loops.move_to_end(identity)
    with torch.no_grad():
        return found.run(state, steps, (step, held) if isinstance(step, torch.nn.Module) else held)


_loops: OrderedDict[Hashable, Loop] = OrderedDict()


def _named(value: Any, met: tuple[Any, ...] = ()) -> Hashable:
    """A key of a function: its code and what that refers to, so that a lambda is the same in each call. Of anything
    else, tuples and plain values count by what they are, objects by identity. ``met``: functions around it."""
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
    return value.__code__, _Same(value.__globals__), _named((*cells, *(value.__defaults__ or ())), (*met, value))


class _Same:
    """Equal to itself alone: by identity, whatever the object's own equality says."""

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
        iteration = _iteration(step, until, collect)
        iteration.__qualname__ = getattr(step, "__qualname__", type(step).__name__)
        how: How = {"key": None if key is None else _key_of_state(key), "compare": compare, "options": options}
        super().__init__(iteration, how)
        self._until, self._collect = until, collect
        self._each = Graph(iteration, how)
        """An iteration at a time: where the host loops for good."""
        self._on_host = False
        self._turn = RLock()
        """Of the thread that runs it: what is held is that of its call."""
        self._answering = self._loop_on_host

    def run(self, state: Any, steps: int | torch.Tensor, held: Any) -> Looped:
        """The loop, from ``state`` on."""
        leaves, structure = pytree.tree_flatten(state)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError("the state of a loop has no tensor")
        device = tensors[0].device
        state = pytree.tree_unflatten([_copied(leaf) for leaf in leaves], structure)
        control = torch.zeros(3, dtype=torch.int64, device=device)  # count, limit, stop
        control[1:2] = steps.reshape(1) if isinstance(steps, torch.Tensor) else steps
        rows = None
        _look(self._until, state, control)
        if self._collect is not None:
            rows = pytree.tree_map(lambda value: _rows(value, steps), self._collect(state))
        with self._turn:
            self._root = self._each._root = (held,)
            try:
                self(control, state, rows)
            finally:
                self._root = self._each._root = ((),)
        if rows is not None:
            rows = pytree.tree_map(lambda buffer: buffer[: max(int(steps), 0)], rows)
        return Looped(state, control[0], rows, self.record)

    def _loop_on_host(self, control: torch.Tensor, *args: Any) -> None:
        iteration: Callable[..., None] = self._each if self._on_host else self.function
        count, limit = control[:2].tolist()
        while count < limit and not control[2]:
            iteration(control, *args)
            control[0].add_(1)
            count += 1

    def _launches(self, look: Look, entry: Entry) -> LaunchPasses:
        """What is held comes first, and ``control`` behind it."""
        return LoopPasses(entry.plan.index(len(look.paths)), super()._launches(look, entry))

    def _look_up(self, entry: Entry, call: Call, look: Look, containers: Sequence[Any], *, new: bool) -> Any:
        """A comparison of no iteration, or of one, would show little: such a call runs on the host."""
        _, limit, stop = call.args[0].tolist()
        if limit < _COMPARED or stop:
            return self._run(call.args, call.kwargs)
        result = super()._look_up(entry, call, look, containers, new=new)
        record = entry.region.record
        refusal = next(reversed(record.refusals.values()), None)
        self._on_host = record.state is State.UNCAPTURED and not (refusal and reason_of(refusal.reason).may_pass)
        return result


def _iteration(
    step: Callable[[Any], Any],
    until: Callable[[Any], torch.Tensor] | None,
    collect: Callable[[Any], Any] | None,
) -> Callable[..., None]:
    """What the device runs again and again."""

    def iteration(control: torch.Tensor, state: Any, rows: Any) -> None:
        _carry(state, step(state))
        if collect is not None:
            for buffer, value in zip(pytree.tree_leaves(rows), pytree.tree_leaves(collect(state)), strict=True):
                buffer.index_copy_(0, control[:1], value.unsqueeze(0))
        _look(until, state, control)

    return iteration


def _look(until: Callable[[Any], torch.Tensor] | None, state: Any, control: torch.Tensor) -> None:
    """Write down whether ``state`` ends the loop."""
    if until is None:
        return
    ends = until(state)
    if not isinstance(ends, torch.Tensor) or ends.numel() != 1:
        raise ValueError("until has to return a tensor of one element")
    control[2:].copy_(ends.reshape(1) if ends.dtype is torch.bool else ends.reshape(1) != 0)


def _carry(state: Any, new: Any) -> None:
    """Copy ``new`` into the memory of ``state``. What is in that memory at another place is set aside first."""
    (old, before), (leaves, after) = pytree.tree_flatten(state), pytree.tree_flatten(new)
    if before != after:
        raise ValueError(f"the step makes a state of another structure: {after}, from {before}")
    carried = {_storage(leaf) for leaf in old if isinstance(leaf, torch.Tensor)}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for here, there in zip(old, leaves, strict=True):
        if not isinstance(here, torch.Tensor):
            if isinstance(there, torch.Tensor) or type(there) is not type(here) or bits_of(there) != bits_of(here):
                raise ValueError(f"the step changes a plain value of the state, {here!r}: make it a tensor")
        elif not isinstance(there, torch.Tensor) or (here.size(), here.dtype) != (there.size(), there.dtype):
            raise ValueError(f"the step makes {_described(there)} of {_described(here)}")
        elif there is not here:
            pairs.append((here, there.clone() if _storage(there) in carried else there))
    for here, there in pairs:
        here.copy_(there)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of {list(value.size())} of {value.dtype} on {value.device}"


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _rows(value: torch.Tensor, steps: Any) -> torch.Tensor:
    """Zeros for so many values, and more: loops whose numbers are not far apart are captured once."""
    return value.new_zeros((1 << max(4, (max(steps, 1) - 1).bit_length()), *value.size()))


def _key_of_state(key: Callable[..., Any]) -> Callable[..., Any]:
    return lambda control, state, rows: key(state)  # noqa: ARG005 - as an iteration
