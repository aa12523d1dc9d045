"""``pygraph.capture``: a step captured as it runs, with whatever Python it has, and replayed where nothing but tensors
changed.

    call ─ Walk ─ variant of its tokens ─┬─ new:       the step runs, and its operators are written down (a Tape)
                                         ├─ two tapes agree: a Region over the tape, which compares with the step
                                         └─ captured:  replay, then each result goes where the step would have put it
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch

from pygraph import compat
from pygraph.backend import driver_for
from pygraph.errors import CaptureError, first_line
from pygraph.frontend.location import GraphOrigin, location_of_code
from pygraph.report.model import STEP, GraphReport, RegionReport, open_report
from pygraph.runtime.critical import capturing
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import Region, RegionOptions, RegionRecord
from pygraph.runtime.tensors import bits
from pygraph.runtime.variants import State
from pygraph.settings import Settings
from pygraph.training.reach import Change, Executed, Walk
from pygraph.training.tape import HostReads, Tape

__all__ = ["CapturedStep", "StepRecord", "capture"]

_PATIENCE = 16
"""Calls in a row that are looked at, or written down, in vain before a step is left uncaptured."""

_REFUSED = 4
"""How many such calls one counts for that no tape can hold."""

_MAX_VARIANTS = 16
"""States of a step that are captured at the same time; the one that was not used for longest goes."""


def capture(step: Callable[..., Any]) -> CapturedStep:
    """Capture ``step``, a function that trains (forward, backward, optimizer), as it runs. Also for a decorator.

    The first calls run it, and write its operators down. Where calls agree on them, later ones replay what was
    captured, with today's tensors, in whatever place they are. A replay does what the step does to tensors, random
    numbers, and to the places of its reach that held another tensor or value afterwards.

    A call runs as it is, and is captured anew, where anything that the step can read differs: arguments, attributes,
    closures, globals that its code names, sizes, modes of torch. A step that a replay could not repeat is not captured,
    and ``record`` says why. Raises what the step raises.
    """
    return CapturedStep(step)


@dataclass(repr=False)
class StepRecord:
    """What became of a step's calls. ``reason`` says why it is not captured (any more), ``refusals`` what was in the
    way in some call, one of each kind; ``regions`` are the captures."""

    name: str
    state: State = State.COLD
    reason: str | None = None
    replays: int = 0
    uncaptured: int = 0
    refusals: dict[str, Refusal] = field(default_factory=dict)
    regions: list[RegionRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        counts = f"regions: {len(self.regions)}, replays: {self.replays}, uncaptured calls: {self.uncaptured}"
        why = f"; {first_line(self.reason)}" if self.reason else ""
        return f"<StepRecord {self.name}: {self.state.value}; {counts}{why}>"


# -- what a step leaves behind -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that operators made: the output of the tape at ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class _Known:
    """An object that was there before the step: by its entry in the walk."""

    entry: int


@dataclass(frozen=True, slots=True)
class _Plain:
    """A plain value. Two are equal if their types and bits are."""

    value: Any = field(compare=False)
    bits: Hashable


@dataclass(frozen=True, slots=True)
class _Built:
    """A new list, tuple or dictionary, which is one of tuples of a key and a value."""

    kind: type
    items: tuple[Any, ...]


class _Reader:
    """Describes the values that a step leaves behind. ``results`` are the tensors among them that operators made."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.results: list[torch.Tensor] = []

    def read(self, value: Any) -> Any:
        """The description of one value. Raises CaptureError for what a replay cannot make."""
        kind = type(value)
        if kind in (bool, int, float, complex, str, bytes, type(None)):
            return _Plain(value, bits(value))
        known = self.walk.entry(value)
        if known is not None:
            return _Known(known)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            return _Built(kind, tuple(map(self.read, value)))
        if kind in (dict, OrderedDict):
            return _Built(kind, tuple(map(self.read, value.items())))
        raise CaptureError("unsupported-result", f"the step makes an object of type {kind.__name__}")

    def _tensor(self, tensor: torch.Tensor) -> _Result:
        if type(tensor) is not torch.Tensor or tensor.__dict__ or (tensor.is_leaf and tensor.requires_grad):
            raise CaptureError("unsupported-result", "the step makes a parameter, or a tensor with attributes")
        if tensor.requires_grad and not _is_spent(tensor):
            raise CaptureError("open-graph", "the step leaves a tensor behind that autograd can go back from")
        index = next((i for i, each in enumerate(self.results) if each is tensor), len(self.results))
        if index == len(self.results):
            self.results.append(tensor)
        return _Result(index)


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


class _Spent(torch.autograd.Function):
    """A tensor that autograd has gone back from already."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor, _follow: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError("backward through the graph of a captured step, which has gone back through it already")


def _make(value: Any, walk: Walk, outputs: Sequence[torch.Tensor]) -> Any:
    """A value by its description: of today's objects of ``walk``, and the ``outputs`` of a replay."""
    match value:
        case _Plain():
            return value.value
        case _Known():
            return walk.object(value.entry)
        case _Result():
            return outputs[value.index]
        case _:
            items = [_make(each, walk, outputs) for each in value.items]
            return value.kind(*items) if hasattr(value.kind, "_fields") else value.kind(items)


# -- one call that is written down -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Written:
    """What a call did: its tape, the value that it returned, and the places that it changed. ``spent`` are the outputs
    that autograd had followed, and has freed what it would need to go back from them."""

    tape: Tape
    value: Any
    places: tuple[Change, ...]
    spent: tuple[int, ...]

    def differs(self, other: _Written) -> Refusal | None:
        """Why another call is none that the same replay could stand for."""
        refusal = self.tape.differs(other.tape)
        if refusal is None and replace(self, tape=other.tape) != other:
            return Refusal("unsteady-step", "it leaves something else behind in one call than in the next")
        return refusal


def _write_down(
    step: Callable[..., Any], args: Any, kwargs: Any, walk: Walk, executed: Executed
) -> tuple[Any, _Written, list[torch.Tensor]]:
    """Run ``step``, and write down what it does. Returns what it returned, and the tensors that the tape's function
    returns. Raises what it raises."""
    tape = Tape(walk.tensors)
    host = _random_state()
    memory = [_versions(tensor) for tensor in walk.tensors]
    executed.refusal = None
    collecting = gc.isenabled()
    gc.disable()  # what is told of a collection is no code of the step
    sys.setprofile(executed)
    try:
        with HostReads(tape), tape:
            returned = step(*args, **kwargs)
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    tape.refusal = tape.refusal or executed.refusal
    reader = _Reader(walk)
    value, places = None, list[Change]()
    try:
        _check_rest(tape, walk, executed, memory, host)
        changes = walk.changes()
        places = [Change(each.holder, reader.read(each.key), reader.read(each.value)) for each in changes]
        value = reader.read(returned)
        if tape.refusal is None:
            tape.returning(reader.results)
    except CaptureError as error:
        tape.refuse(error.reason, error.detail)
    except Exception as error:  # noqa: BLE001 - the step has run, and its result is the caller's
        tape.refuse("tape-failed", f"{type(error).__name__}: {error}")
    spent = tuple(index for index, tensor in enumerate(reader.results) if tensor.requires_grad)
    return returned, _Written(tape, value, tuple(places), spent), reader.results


def _check_rest(tape: Tape, walk: Walk, executed: Executed, memory: Sequence[Any], host: Any) -> None:
    """Refuse what a step did besides running operators. ``memory`` and ``host`` are the tensors' versions and the
    random state before it."""
    if _random_state() != host:
        tape.refuse("host-random", "the step draws random numbers on the host")
    hidden = executed.hidden(walk.codes)
    if hidden is not None:
        where = f"{hidden.co_filename}:{hidden.co_firstlineno}"
        tape.refuse("hidden-closure", f"{hidden.co_name} has a closure that cannot be looked into", None, where)
    for number, (before, tensor) in enumerate(zip(memory, walk.tensors, strict=True)):
        now = _versions(tensor)
        if now[1:] != before[1:]:
            tape.refuse("other-memory", f"the step gives {_name(walk, tensor)} other memory, or has autograd follow it")
        if now[0] != before[0] and number not in tape.written and not _shares(walk, number, tape.written):
            tape.refuse("unseen-write", f"{_name(walk, tensor)} is written by something that is no operator")


def _random_state() -> Any:
    """The state of the generators of Python and, where it is loaded, of numpy."""
    numpy = sys.modules.get("numpy")
    other = None if numpy is None else tuple(map(str, numpy.random.get_state(legacy=True)))
    return random.getstate(), other


def _versions(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How often a tensor was written, and all else of it that operators may change."""
    version = -1 if tensor.is_inference() else tensor._version
    storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return version, storage, tensor.size(), tensor.requires_grad, tensor.is_leaf


def _shares(walk: Walk, number: int, written: set[int]) -> bool:
    """Whether an operator has written memory of a tensor by way of another one."""
    mine = walk.tensors[number].untyped_storage()._cdata
    return any(walk.tensors[other].untyped_storage()._cdata == mine for other in written)


def _name(walk: Walk, tensor: torch.Tensor) -> str:
    entry = walk.entry(tensor)
    return "a tensor" if entry is None else walk.path(entry)


# -- the step ----------------------------------------------------------------------------------------------------------


class _Tokens:
    """Tokens as a key, hashed once."""

    __slots__ = ("_hash", "_tokens")

    def __init__(self, tokens: tuple[Hashable, ...]) -> None:
        self._tokens, self._hash = tokens, hash(tokens)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Tokens) and self._tokens == other._tokens)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class _Look:
    """A walk before a call. ``tokens`` are those of its base, which is all but the arguments and gradients, ``key`` is
    all that calls of one variant have in common. ``again``: the base was used before."""

    walk: Walk
    tokens: _Tokens
    key: Hashable
    again: bool = False


@dataclass(eq=False)
class _Variant:
    """Calls with the same ``tokens``, and arguments. ``written`` is one of them that was written down. With a
    ``region``, calls are answered by it."""

    tokens: _Tokens
    written: _Written
    region: Region | None = None
    off: Refusal | None = None
    """Why there is no region: nothing to capture, or nothing that captures."""
    answer: Callable[[list[Any]], Sequence[Any]] = list
    """How a call that is under way is answered where the region does not replay it: by the step itself."""

    @property
    def captures(self) -> bool:
        """Whether its region replays calls, or may come to."""
        return self.region is not None and self.region.record.state is not State.UNCAPTURED

    @property
    def refusal(self) -> Refusal | None:
        """Why its region captures nothing."""
        if self.region is None:
            return self.off
        record = self.region.record
        return next(reversed(record.refusals.values()), Refusal("uncaptured", record.reason or "measured to be faster"))

    def close(self) -> None:
        """Free what was captured."""
        if self.region is not None:
            self.region.close()


class CapturedStep:
    """A step that is captured as it runs (see ``capture``). ``record`` tells what became of its calls.

    One call at a time is looked at: calls of other threads meanwhile run the step as it is, and so do those under a
    dispatch mode, a function transform, hooks of saved tensors, a profiler of Python, or in inference mode.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step, updated=())
        self.record = StepRecord(getattr(step, "__qualname__", type(step).__name__))
        self._step = step
        self._settings = Settings.make(None)
        self._executed = Executed()
        self._variants: OrderedDict[Hashable, _Variant] = OrderedDict()
        self._lock = Lock()
        self._report: GraphReport | None = None
        self._patience = _PATIENCE
        self._kept: tuple[Walk, _Tokens] | None = None
        """The base of the last call's walk, if that was a replay."""
        self._last: Sequence[Hashable] = ()
        """The tokens of the last call that was new, for what is said of the next."""
        missing = compat.missing_text(compat.CAPTURE)
        if missing or self._settings.disable:
            self._give_up(Refusal("unavailable", missing or "the option disable is set"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the step returns. Raises CaptureError where the option ``strict`` is set and it cannot be captured."""
        if self.record.state is State.UNCAPTURED and self._settings.strict:
            raise CaptureError("strict", f"{self.record.name} cannot be captured: {self.record.reason}")
        if self.record.state is State.UNCAPTURED or _is_watched() or not self._lock.acquire(blocking=False):
            self.record.uncaptured += 1
            return self._step(*args, **kwargs)
        try:
            if self._report is None:
                self._report = open_report(STEP, _origin(self._step, self.record.name))
            return self._call(args, kwargs)
        finally:
            self._lock.release()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        look = self._look(args, kwargs)
        variant = self._variants.get(look.key)
        if look.again and (variant is None or not (variant.region or variant.off)):
            # a walk that is used again does not see that tensors have come to share memory, or do so no more
            look = self._look(args, kwargs)
            variant = self._variants.get(look.key)
        if look.walk.refusal is not None:
            self.record.uncaptured += 1
            self._waste(_REFUSED, look.walk.refusal)
            return self._step(*args, **kwargs)
        if variant is None or not (variant.region or variant.off):
            return self._write(variant, look, args, kwargs)
        self._variants.move_to_end(look.key)
        if not variant.captures:
            self.record.uncaptured += 1
            if not any(each.captures for each in self._variants.values()):
                self._waste(1, variant.refusal)  # a look at all that the step can reach takes time
            return self._step(*args, **kwargs)
        return self._run(variant, look, args, kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Look:
        """Look at everything that a call can read: at all but arguments and gradients only where something there has
        changed since the last replay. An object that cannot be looked at is a refusal."""
        kept, self._kept = self._kept, None
        walk, key, tokens, again = Walk((), Executed()), None, _Tokens(()), False
        try:
            again = kept is not None and kept[0].holds()
            if kept is None or not again:
                kept = None  # weak references see what only the earlier walk holds on to
                roots = [("", compat.global_hooks()), ("os.environ", os.environ), ("step", self._step)]
                walk = Walk(roots, self._executed)
                kept = walk, _Tokens(tuple(walk.tokens))
            state, tokens = kept
            if state.refusal is None:
                walk = Walk([("args", args), ("", kwargs), ("", compat.function_modes())], self._executed, state)
                key = tokens, tuple(walk.tokens), _torch_state()
        except Exception as error:  # noqa: BLE001 - objects of any kind are met; the step must run
            walk.refusal = Refusal("walk-failed", f"{type(error).__name__}: {error}")
        return _Look(walk, tokens, key, again)

    # -- calls that are written down -----------------------------------------------------------------------------------

    def _write(self, variant: _Variant | None, look: _Look, args: Any, kwargs: Any) -> Any:
        walk = look.walk
        self.record.uncaptured += 1
        self.record.state = State.WARM if self.record.state is State.COLD else self.record.state
        known = len(self._executed.codes)
        returned, written, _ = _write_down(self._step, args, kwargs, walk, self._executed)
        refusal = written.tape.refusal
        differs = None if variant is None else variant.written.differs(written)
        if len(self._executed.codes) > known:  # the walk has not seen what new code can read
            self._waste(1, None)
        elif refusal is not None:
            self._waste(_REFUSED, refusal)
        elif variant is None or differs is not None:
            self._keep(look.key, _Variant(look.tokens, written))
            if self._last and differs is None:
                differs = Refusal("state-changes", walk.differs(self._last))
            self._last = walk.every()
            self._waste(1, differs)
        else:
            self._keep(look.key, self._captured(written, look))
        return returned

    def _captured(self, written: _Written, look: _Look) -> _Variant:
        """The variant of calls that agree, with a region over their tape."""
        made = _Variant(look.tokens, written)
        tensors = written.tape.operands(look.walk.tensors)
        devices = sorted({tensor.device.type for tensor in tensors})
        driver = driver_for(devices[0]) if len(devices) == 1 else None
        if driver is None:
            made.off = Refusal("no-driver", f"no driver captures on {' and '.join(devices) or 'no device'}")
            self._note(made.off)
            return made
        fn, origins = written.tape.function()
        settings = self._settings
        made.region = Region(
            fn,
            driver,
            name=(name := f"{self.record.name}.{len(self.record.regions)}"),
            label=f"captured step {name}",
            options=RegionOptions(
                memory_limit=settings.memory_limit,
                verify_every=settings.verify_every,
                order=settings.order,
                launch_passes=settings.launches(),
            ),
            held=range(len(tensors)),
            origins=origins,
            uncaptured=lambda args: made.answer(args),
        )
        if self._report is not None:
            self._report.device = devices[0]
            operators, number = tuple(written.tape.operators()), len(self._report.regions)
            self._report.regions.append(RegionReport(number, (), (), operators, True, "", made.region.record))
        self.record.regions.append(made.region.record)
        return made

    def _keep(self, key: Hashable, variant: _Variant) -> None:
        old = self._variants.pop(key, None)
        if old is not None:
            old.close()
        self._variants[key] = variant
        while len(self._variants) > _MAX_VARIANTS:
            self._variants.popitem(last=False)[1].close()

    # -- calls of a variant with a region ------------------------------------------------------------------------------

    def _run(self, variant: _Variant, look: _Look, args: Any, kwargs: Any) -> Any:
        region, walk = variant.region, look.walk
        assert region is not None
        answers: list[tuple[Any, _Written]] = []

        def answer(_: list[Any]) -> Sequence[Any]:
            self.record.uncaptured += 1
            returned, written, results = _write_down(self._step, args, kwargs, walk, self._executed)
            answers.append((returned, written))
            return results

        variant.answer = answer
        try:
            outputs = region(variant.written.tape.operands(walk.tensors))
        finally:
            variant.answer = list
        if answers:
            self._judge(variant, answers[0][1])
            return answers[0][0]
        self.record.replays += 1
        self.record.state, self.record.reason = State.REPLAY, None
        self._patience = _PATIENCE
        return self._leave(variant, look, outputs)

    def _judge(self, variant: _Variant, written: _Written) -> None:
        """Whether a call that the region did not replay speaks against it."""
        region = variant.region
        refusal = written.tape.refusal or variant.written.differs(written)
        if refusal is not None:
            variant.close()
            self._waste(_REFUSED, refusal)
        elif region is not None and not variant.captures:
            self._waste(_REFUSED, variant.refusal)

    def _leave(self, variant: _Variant, look: _Look, outputs: Sequence[Any]) -> Any:
        """Put what a replay made where the step would have put it. Returns what the step would have returned."""
        written, walk, state = variant.written, look.walk, look.walk.base
        assert state is not None
        if written.tape.written:
            torch.autograd.graph.increment_version([walk.tensors[number] for number in written.tape.written])
        made = list(outputs)
        for index in written.spent:
            with torch.enable_grad():
                made[index] = _Spent.apply(made[index], torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        for place in written.places:
            walk.holders[place.holder].put(_make(place.key, walk, made), _make(place.value, walk, made))
        if not state.weak and all(place.holder >= len(state.holders) for place in written.places):
            state.keep()
            self._kept = state, variant.tokens
        return _make(written.value, walk, made)

    # -- giving up -----------------------------------------------------------------------------------------------------

    def _waste(self, calls: int, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._note(refusal)
        self._patience -= calls
        if self._patience <= 0:
            self._give_up(refusal or Refusal("state-changes"))

    def _give_up(self, refusal: Refusal) -> None:
        """Run the step as it is from now on."""
        self.record.state, self.record.reason = State.UNCAPTURED, str(refusal)
        self._note(refusal)
        if self._report is not None:
            self._report.error = str(refusal)
        for variant in self._variants.values():
            variant.close()
        self._variants.clear()
        self._last = ()

    def _note(self, refusal: Refusal) -> None:
        """Keep what was in the way of a call; reports tell the first of each kind."""
        if self._report is not None and refusal.reason not in self.record.refusals:
            self._report.notes.append(str(refusal))
        self.record.refusals[refusal.reason] = refusal


def _origin(step: Callable[..., Any], name: str) -> GraphOrigin:
    """Where a step begins."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return GraphOrigin(name, None if code is None else location_of_code(code))


def _is_watched() -> bool:
    """Whether something has to see each operator, or each Python function, of this call."""
    return bool(
        compat.dispatch_mode_depth()
        or compat.functorch_level() is not None
        or torch.is_inference_mode_enabled()
        or torch.compiler.is_compiling()
        or sys.getprofile() is not None
        or compat.saved_tensor_hooks(True) is not None
        or capturing
    )


def _torch_state() -> tuple[Any, ...]:
    """The modes and options of torch that decide what operators do."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,
    )
