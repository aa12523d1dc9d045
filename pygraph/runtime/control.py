"""``torch.cond`` and ``torch.while_loop`` in compiled programs: the host decides, or, in replays, the device.

    b = cond(p, f, g, x)    uncaptured:  p.item(), then f(x) or g(x)
                            captured:    f(x) ─ g(x) ─ copied into the results of f(x), noted as a branch on p

A capture runs each body once, one after the other, whatever the condition; nothing executes then. ``program.fold``
makes bodies from these notes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import LaunchKind, Nest
from pygraph.runtime.tensors import extent

__all__ = ["MODULE", "Bodies", "cond", "trying_bodies", "watching", "while_loop"]

Function = Callable[[list[Any]], Sequence[Any]]

_WITHOUT_END = 1 << 62
"""A number of iterations that no loop reaches."""

MODULE = "pygraph_control"
"""The name of this module in compiled programs."""

_MOST_TRIED = 256 << 20
"""Maximum bytes of zeros (256 MiB) on which a body is tried."""


class Bodies:
    """Loops and branches of a capture under way.

    Args:
        launches: returns the number of launches so far
        run: runs a function of a compiled program, so that its launches are captured
        address: returns the address of a tensor's first element
        storage: returns the start address of a tensor's memory
    """

    def __init__(
        self,
        launches: Callable[[], int],
        run: Callable[[Function, list[Any]], Sequence[Any]],
        address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr,
        storage: Callable[[torch.Tensor], int] | None = None,
    ) -> None:
        self.nests: list[Nest] = []
        self._launches, self._run, self._address, self._storage = launches, run, address, storage or _storage_of

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within the block, loops and branches of this thread are noted, and not decided by the host."""
        before, _here.bodies = _here.bodies, self
        try:
            yield
        finally:
            _here.bodies = before

    def branch(self, decides: torch.Tensor, functions: Sequence[Function], args: Sequence[Any]) -> list[Any]:
        """The results of a branch between ``functions``."""
        if decides.dtype is not torch.bool:
            decides = decides != 0  # one byte of it decides
        bounds, results = [self._launches()], list[Any]()
        for function in functions:
            returned = list(self._run(function, list(args)))
            if any(not isinstance(each, torch.Tensor) for each in returned):
                raise CaptureError("control-flow", "a branch returns something else than tensors")
            if not results:
                results = _apart(returned, args, self._storage)
            else:
                for result, value in zip(results, returned, strict=True):
                    _copy(value, result)
            bounds.append(self._launches())
        self._note(LaunchKind.IF, decides, bounds, functions)
        return results

    def loop(self, check: Function, body: Function, carried: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """The final state of a loop."""
        if any(not isinstance(each, torch.Tensor) for each in carried):
            raise CaptureError("control-flow", "a loop carries something else than tensors")
        state = list(map(_copied, carried))
        control = torch.zeros(3, dtype=torch.int64, device=state[0].device)
        control[1].fill_(_WITHOUT_END)
        stop = control[2]
        stop.copy_(self._run(check, [*state, *given])[0].logical_not())
        begin = self._launches()
        returned = self._run(body, [*state, *given])
        for old, new in zip(state, self._unmixed(state, list(returned)), strict=True):
            if not self._is_same(old, new):
                _copy(new, old)
        stop.copy_(self._run(check, [*state, *given])[0].logical_not())
        self._note(LaunchKind.WHILE, control, [begin, self._launches()], [body])
        return state

    def _note(self, kind: LaunchKind, decides: torch.Tensor, bounds: Sequence[int], bodies: Sequence[Function]) -> None:
        if bounds[0] < bounds[-1]:
            self.nests.append(Nest(kind, self._address(decides), tuple(bounds), tuple(map(_name_of, bodies))))

    def _unmixed(self, state: Sequence[torch.Tensor], returned: Sequence[Any]) -> list[torch.Tensor]:
        """``returned``, with tensors in the memory of ``state`` copied, except those that are the state of their own
        position."""
        if any(not isinstance(each, torch.Tensor) for each in returned):
            raise CaptureError("control-flow", "an iteration returns something else than tensors")
        taken = {self._storage(each) for each in state}
        return [
            new if self._storage(new) not in taken or self._is_same(old, new) else _copied(new)
            for old, new in zip(state, returned, strict=True)
        ]

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """True if both are the same bytes, laid out alike."""
        alike = one.dtype == other.dtype and one.size() == other.size() and one.stride() == other.stride()
        return alike and self._address(one) == self._address(other)


class _Here(threading.local):
    """State of one thread. ``bodies``: notes those of its capture. ``ran``: names of bodies that its uncaptured calls
    run. ``tried``: names of bodies of its current region that were run or tried. ``trying``: it tries a body now."""

    bodies: Bodies | None = None
    ran: set[str] | None = None
    tried: set[str] | None = None
    trying: bool = False


_here = _Here()


@contextlib.contextmanager
def watching() -> Iterator[set[str]]:
    """Yields the names of bodies that uncaptured calls of this thread run within the block."""
    before, _here.ran = _here.ran, set()
    try:
        yield _here.ran
    finally:
        _here.ran = before


def trying_bodies(fn: Function, run: Function) -> Function:
    """``run``, which runs the region ``fn`` uncaptured. If ``fn`` has bodies, each one that a call on a device does not
    reach is tried on zeros once: kernels are loaded, and configurations chosen, in a first run, not in a capture.
    """
    if MODULE not in getattr(getattr(fn, "__code__", None), "co_names", ()):
        return run
    tried: set[str] = set()

    def run_and_try(args: list[Any]) -> Sequence[Any]:
        before, _here.tried = _here.tried, tried
        try:
            return run(args)
        finally:
            _here.tried = before

    return run_and_try


def cond(predicate: Any, first: Function, second: Function, args: list[Any]) -> Sequence[Any]:
    """``first(args)`` if ``predicate``, a tensor of one bool or a number, is true; else ``second(args)``."""
    if _here.bodies is not None and isinstance(predicate, torch.Tensor):
        return _here.bodies.branch(predicate, (first, second), args)
    if _here.trying:
        second(list(args))
        return first(args)
    body, other = (first, second) if predicate else (second, first)
    _ran(body)
    _try(other, args)
    given = list(args)  # bodies empty their arguments
    return _apart(body(args), given, _storage_of)


def while_loop(check: Function, body: Function, carried: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """``carried`` after repeating ``carried = body(carried, given)`` as long as ``check(carried, given)`` is true."""
    if _here.bodies is not None:
        return _here.bodies.loop(check, body, carried, given)
    state = list(carried)
    holds: Any = check([*state, *given])[0]
    if _here.trying:
        return list(body([*state, *given]))
    if not holds:
        _try(body, [*state, *given])
        return [each.clone() for each in state]
    _ran(body)
    while holds:
        state = list(body([*state, *given]))
        holds = check([*state, *given])[0]
    return _apart(state, [*carried, *given], _storage_of)


def _apart(returned: Sequence[Any], args: Sequence[Any], storage: Callable[[torch.Tensor], int]) -> list[Any]:
    """``returned``, copied so that no tensor shares memory with another or with ``args``: a body compiled by Inductor
    returns one tensor for equal results."""
    taken = {storage(each) for each in args if isinstance(each, torch.Tensor)}
    found = list[Any]()
    for each in returned:
        if isinstance(each, torch.Tensor):
            each = _copied(each) if storage(each) in taken else each
            taken.add(storage(each))
        found.append(each)
    return found


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _try(body: Function, args: Sequence[Any]) -> None:
    """Run a body that no call of the region has reached on zeros, if these are few: bodies only compute results."""
    name, tensors = _name_of(body), [each for each in args if isinstance(each, torch.Tensor)]
    if _here.tried is None or name in _here.tried or not any(tensor.is_cuda for tensor in tensors):
        return
    _here.tried.add(name)
    if sum(extent(tensor) for tensor in tensors) > _MOST_TRIED:
        return
    _here.trying = True
    try:
        with contextlib.suppress(RuntimeError):  # if it cannot run on zeros, its first call will show
            body([_zeros(each) if isinstance(each, torch.Tensor) else each for each in args])
    finally:
        _here.trying = False


def _ran(body: Function) -> None:
    for names in (_here.ran, _here.tried):
        if names is not None:
            names.add(_name_of(body))


def _name_of(body: Function) -> str:
    return str(getattr(body, "__name__", body))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return _empty(tensor).zero_()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    made = _empty(tensor)
    _copy(tensor, made)
    return made


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``source`` to ``target``; elements that share one place in an expanded tensor are copied once."""
    for dim, (size, stride) in enumerate(zip(target.size(), target.stride(), strict=True)):
        if size > 1 and not stride:
            if source.stride(dim):
                raise CaptureError("control-flow", "bodies return results of other strides")
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
