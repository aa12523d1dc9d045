"""Effects of eager calls in the run that answers a call, repeated in the runs compared with it.

An operator that each replay calls may count, draw or talk to other processes: a comparison never calls it again. Its
results, and the arguments that it wrote, are copied in the run that answers the call, and copied into every other run.
Its operands there are compared with those in the answering run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.compat import OpOverload, TorchDispatchMode
from pygraph.errors import CaptureError
from pygraph.program.program import Program, Slot
from pygraph.program.recording import (
    WAIT,
    AllocationKind,
    EagerCall,
    EagerResult,
    Launch,
    TensorLayout,
    is_functional_collective,
)
from pygraph.runtime.calls import OperatorCall, leaves
from pygraph.runtime.contract import Answer, ScratchPool
from pygraph.runtime.eager import at_places
from pygraph.runtime.tensors import digests, span


def in_flight(program: Program) -> tuple[frozenset[tuple[AllocationKind, int]], frozenset[int]]:
    """Memory that a collective may still fill when ``program`` ends, and arguments that an earlier collective may still
    fill while it runs."""
    places: dict[int, list[Slot]] = {}
    for slot in program.slots:
        places.setdefault(slot.launch, []).append(slot)
    filling: set[tuple[AllocationKind, int]] = set()
    waited: set[int] = set()
    for launch in program.calls:
        slots = places.get(launch.index, [])
        if launch.name.startswith(WAIT):
            waited.update(slot.index for slot in slots if slot.kind is AllocationKind.INPUT)
            filling.difference_update(slot.key for slot in slots)
        elif is_functional_collective(launch.name):
            filling.update(slot.key for slot in slots if launch.may_write(slot.word, slot.key))
    return frozenset(filling), frozenset(waited)


def _unset(program: Program) -> frozenset[tuple[int, int]]:
    """Operands (launch, word) that an eager call may write, in memory of the region that no earlier launch may have
    written: uninitialised results for it to fill. They may hold anything."""
    launches = program.recording.launches
    written: dict[tuple[AllocationKind, int], list[tuple[int, float, float]]] = {}
    for slot in program.slots:
        launch = launches[slot.launch]
        if slot.kind is AllocationKind.POOL and launch.may_write(slot.word, slot.key):
            everything = (slot.launch, float("-inf"), float("inf"))
            uses = [use for use in launch.uses or () if use.word == slot.word and use.writes]
            spans = [(slot.launch, slot.offset + use.start, slot.offset + use.start + use.nbytes) for use in uses]
            written.setdefault(slot.key, []).extend(spans if launch.uses is not None else [everything])
    found: set[tuple[int, int]] = set()
    for slot in program.slots:
        call = launches[slot.launch].eager
        if call is None or slot.key not in written or slot.word >= len(call.operands):
            continue
        begin, end = slot.offset, slot.offset + call.operands[slot.word].layout.nbytes
        before = [low < end and begin < high for launch, low, high in written[slot.key] if launch < slot.launch]
        if not any(before) and launches[slot.launch].may_write(slot.word, slot.key):
            found.add((slot.launch, slot.word))
    return frozenset(found)


def _view_of(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> EagerResult | None:
    """How to make ``result`` from the operand in whose memory it lies, if it lies in any's."""
    for operand, base in enumerate(tensors):
        same = base.untyped_storage()._cdata == result.untyped_storage()._cdata
        if same and base.dtype == result.dtype and result.numel():
            offset = int(result.storage_offset() - base.storage_offset()) * base.element_size()
            return EagerResult(TensorLayout.of(result), operand, offset, result is base)
    return None


def _made_of(told: EagerResult, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that lies in the memory of an operand."""
    base = tensors[told.operand]
    start = base.storage_offset() + told.offset // base.element_size()
    return base if told.itself else base.as_strided(told.layout.size, told.layout.stride, start)


@dataclass(slots=True)
class _Answer:
    """Effects of one call. ``wrote``: copies of written arguments, by operand. ``results``: copies of results in memory
    of their own, or how to make them from operands. ``state``: random state that it left, if it drew."""

    wrote: Mapping[int, torch.Tensor]
    results: list[torch.Tensor | EagerResult]
    state: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Given:
    """An operand of an eager call of one run: its name, the owner of its memory, its fingerprint (empty if it may hold
    anything), and a copy if bits may not decide."""

    name: str
    owner: tuple[AllocationKind, int]
    content: bytes
    value: torch.Tensor | None


class Answers:
    """The eager calls of ``program``, in one comparison. ``given``: operands in the latest run. ``answered``: operands
    in the run that answers the call."""

    def __init__(self, program: Program, generator: torch.Generator | None) -> None:
        self._calls: list[tuple[Launch, EagerCall]] = [(c, c.eager) for c in program.calls if c.eager is not None]
        self._keys = {(slot.launch, slot.word): slot.key for slot in program.slots}
        self._unset = _unset(program)
        self._generator = generator
        self._loosely = any(launch.nondeterministic for launch in program.recording.launches)
        self._answers: list[_Answer] = []
        self._number = -1
        """Number of the eager call at which a run is."""
        self._scratch: ScratchPool = contextlib.nullcontext
        self.given: list[Given] = []
        self.answered: list[Given] = []
        self.failure: Exception | None = None
        """Reason why effects of the answering run could not be kept, if so: nothing can be compared with that run."""

    @contextlib.contextmanager
    def answering(self, scratch: ScratchPool) -> Iterator[None]:
        """An uncaptured run whose operators are called; their effects are kept in ``scratch`` memory."""
        self._begin()
        self._scratch, self._answers, self.answered = scratch, [], self.given
        try:
            with _Mode(self, answering=True):
                yield
        finally:
            self._scratch = contextlib.nullcontext

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """An uncaptured run that calls none of the operators: their effects are repeated."""
        self._begin()
        with _Mode(self, answering=False):
            yield

    def replaying(self) -> Answer:
        """Begin a replay, whose calls ``_repeat`` answers."""
        self._begin()
        return self._repeat

    def _begin(self) -> None:
        self.given, self._number = [], -1

    def clear(self) -> None:
        """Forget everything."""
        self._answers, self.given, self.answered = [], [], []

    def awaits(self, name: str) -> bool:
        """True if the next eager call is one of the operator ``name``."""
        following = self._number + 1
        known = self.failure is None and following < len(self._calls)
        return known and self._calls[following][1].name == name

    # -- one call -----------------------------------------------------------------------------------------------------

    def called(self, tensors: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Call the next operator, and keep its effects. If keeping them fails, ``failure`` is set; the run goes on."""
        self._try(lambda: self._next(tensors))
        written = [] if self.failure else self._written(tensors)
        before, places = self._state(), [tensors[word].data_ptr() for word in written]
        returned = run()
        if [tensors[word].data_ptr() for word in written] != places and self.failure is None:
            name = self._calls[self._number][1].name
            self.failure = CaptureError("comparison-failed", f"{name} writes an argument, and gives it other memory")
        self._try(lambda: self._keep(tensors, list(leaves(returned)), before))
        return returned

    def _try(self, step: Callable[[], None]) -> None:
        if self.failure is None:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - memory may be short, and operators return anything
                self.failure = error

    def _next(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the contents of ``tensors``, with which the next call is about to be made. Raises CaptureError if they
        are fewer than were captured, since two of them are one."""
        self._number += 1
        launch, call = self._calls[self._number]
        if len(tensors) != len(call.operands):
            raise CaptureError("comparison-failed", f"{call.name} is given one tensor where two were captured")
        wait = call.name.startswith(WAIT)  # until then, what it waits for may be anything
        with self._scratch():
            known = [
                not wait and operand.like is None and (launch.index, word) not in self._unset
                for word, operand in enumerate(call.operands)
            ]
            pairs = list(zip(tensors, known, strict=True))
            found = iter(digests([tensor for tensor, looked in pairs if looked]))
            contents = [next(found) if looked else b"" for looked in known]
            values = [_copied(tensor) if looked and self._loosely else None for tensor, looked in pairs]
        for word, (content, value) in enumerate(zip(contents, values, strict=True)):
            owner = self._keys.get((launch.index, word), _NOBODYS)
            self.given.append(Given(f"operand {word} of {call.name}", owner, content, value))

    def _keep(self, tensors: Sequence[torch.Tensor], results: Sequence[Any], before: torch.Tensor | None) -> None:
        """Keep the effects of the call that was made. ``before``: random state before it. Raises CaptureError if it
        returned something else than was captured."""
        _, call = self._calls[self._number]
        if not _as_told(call, tensors, results):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise CaptureError("comparison-failed", f"{call.name} returns {kinds}, and not what its fake kernel tells")
        with self._scratch():
            wrote = {word: _copied(tensors[word]) for word in self._written(tensors)}
            pairs = zip(call.results, results, strict=True)
            kept = [
                told if told.operand >= 0 else _view_of(result, tensors) or _copied(result) for told, result in pairs
            ]
        now = self._state()
        drew = before is not None and now is not None and not torch.equal(before, now)
        self._answers.append(_Answer(wrote, kept, now if drew else None))

    def _written(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The operands that this call may write."""
        launch, call = self._calls[self._number]
        everything = is_functional_collective(call.name)  # a wait fills what it is given
        return [
            word
            for word in range(len(tensors))
            if call.operands[word].like is None
            and (everything or launch.may_write(word, self._keys.get((launch.index, word), _NOBODYS)))
        ]

    def _repeat(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Repeat the effects of the next call on ``tensors``, and return its results."""
        self._next(tensors)
        answer = self._answers[self._number]
        for word, value in answer.wrote.items():
            span(tensors[word]).copy_(span(value))
        if answer.state is not None and self._generator is not None:
            self._generator.set_state(answer.state)
        kept = answer.results
        return [_made_of(each, tensors) if isinstance(each, EagerResult) else _copied(each) for each in kept]

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """``_repeat``, in the form that the operator returns."""
        results = self._repeat(tensors)
        return at_places(self._calls[self._number][1].returned, results)

    def _state(self) -> torch.Tensor | None:
        """The random state now."""
        return None if self._generator is None else self._generator.get_state()


_NOBODYS = (AllocationKind.CONSTANT, -1)


def _as_told(call: EagerCall, tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> bool:
    """True if ``results`` are plain tensors of the captured sizes and dtypes, each in the memory of the operand that
    was captured for it."""
    if len(results) != len(call.results):
        return False
    for told, result in zip(call.results, results, strict=True):
        if type(result) not in (torch.Tensor, torch.nn.Parameter):  # one of another class may have no memory
            return False
        if result.layout is not torch.strided or result._is_zerotensor():
            return False
        if (tuple(result.size()), result.dtype) != (told.layout.size, told.layout.dtype):
            return False
        inside = told.operand >= 0 and result.numel()
        if inside and result.data_ptr() != tensors[told.operand].data_ptr() + told.offset:
            return False
    return True


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same sizes and strides."""
    memory = span(tensor).clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(memory.untyped_storage(), 0, tensor.size(), tensor.stride())


class _Mode(TorchDispatchMode):
    """Sees the operators of an uncaptured run, with eager calls in the order of the program. ``answering``: these are
    made, not repeated."""

    supports_higher_order_operators = True

    def __init__(self, answers: Answers, answering: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers, self._answering = answers, answering

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not isinstance(func, OpOverload) or not self._answers.awaits(str(func)):
            return func(*args, **named)
        tensors = list({id(t): t for t in OperatorCall(func, tuple(args), named).tensors()}.values())
        if not self._answering:
            return self._answers.returned(tensors)
        return self._answers.called(tensors, lambda: func(*args, **named))
