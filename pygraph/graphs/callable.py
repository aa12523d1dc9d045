"""``pygraph.graph``: any callable, captured as it runs and replayed with the tensors of each call.

    call ─ read: arguments, what is held ─ entry ─┬─ captured:  replay, and put in place what the callable leaves
                                                  └─ else:      the callable runs; at the second call it is captured:

    for each of two captures:   tensors show stand-in memory ─ the callable runs, nothing executes ─ all is put back

Calls of one entry have the same key, the same structure of held state, and the same sharing of memory among tensors.
Tensors that share memory are one argument of the entry's region, so that arguments never overlap.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict, TypeVar, cast, overload

import torch

from pygraph import compat
from pygraph.backend import driver_for
from pygraph.errors import CaptureError, first_line
from pygraph.frontend.location import GraphOrigin, location_of_code
from pygraph.graphs.entry import Call, Entry, Look, current, groups_of, layouts_of, signature_of, turns
from pygraph.graphs.held import Walk, refill
from pygraph.graphs.values import OddError, described, make, read
from pygraph.graphs.watch import origin_of_line
from pygraph.program.default import LaunchPasses
from pygraph.report.model import CALLABLE, GraphReport, RegionReport, open_report
from pygraph.runtime import live
from pygraph.runtime.critical import capturing, capturing_turn
from pygraph.runtime.ledger import Ledger
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.reasons import reason_of
from pygraph.runtime.region import Region, RegionOptions, RegionRecord
from pygraph.runtime.variants import State
from pygraph.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE = 16
"""Number of consecutive calls without a use of captures after which as many calls, and later up to four times as many,
run the callable without a look-up."""

_LOOKS = 1024
"""Limit of that number, which doubles each time, if captures are refused for good or no call is like an earlier one."""

_MOST = 64
"""Maximum number of structures of held state, and of entries of each."""

_OTHER = object()
"""Returned instead of a result if the call is not like the last replay."""

_TRIED = 8
"""Number of latest structures with which a call is compared before a walk over all held state."""


@dataclass(repr=False)
class GraphRecord:
    """Outcome of a graph's calls. ``reason`` says why calls are not replays; None after a replay, and until a capture
    was tried. ``refusals`` has the first refusal of each kind. ``freed`` counts the captures of closed regions, which
    ``regions`` leaves out."""

    name: str
    replays: int = 0
    uncaptured: int = 0
    reason: str | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    regions: list[RegionRecord] = field(default_factory=list)
    freed: int = 0

    @property
    def state(self) -> State:
        """State of the graph: REPLAY if any region is captured."""
        if any(record.state is State.REPLAY for record in self.regions):
            return State.REPLAY
        return State.UNCAPTURED if self.reason else State.WARM if self.uncaptured else State.COLD

    @property
    def captures(self) -> int:
        """Number of captures, those of closed regions included."""
        return self.freed + sum(record.captures for record in self.regions)

    def __repr__(self) -> str:
        counts = f"captures: {self.captures}, replays: {self.replays}, uncaptured calls: {self.uncaptured}"
        why = f"; {first_line(self.reason)}" if self.reason else ""
        return f"<GraphRecord {self.name}: {self.state.value}; {counts}{why}>"


class How(TypedDict, total=False):
    """The keywords of ``graph``."""

    held: Any
    key: Callable[..., Any] | None
    compare: Callable[[str, torch.Tensor], bool] | None
    eager: Sequence[str]
    options: Mapping[str, Any] | None


class Graph(Generic[P, R]):
    """A callable that is captured as it runs (see ``graph``). ``record`` has the outcome of its calls.

    ``function`` runs uncaptured under a dispatch mode, a function transform, forward-mode differentiation, anomaly
    detection, or hooks of saved tensors, all modules or all optimizers; during a capture of another graph; and while
    Dynamo or ``torch.jit`` traces. A copy is a graph of the copied callable, without captures.
    """

    def __init__(self, function: Callable[P, R], how: How) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.record = GraphRecord(getattr(function, "__qualname__", type(function).__name__))
        self._how, self._root, self._key = how, (how.get("held", ()),), how.get("key")
        self._settings, self._owner = Settings.of_callable(how.get("options")), live.owner()
        self._answering: Callable[..., Any] = function
        """Runs calls that are not replayed."""
        self._made, self._ledger = 0, Ledger()
        self._looks: OrderedDict[Hashable, Look] = OrderedDict()
        self._look: Look | None = None
        self._last: tuple[Look, Entry] | None = None
        """The structure and entry of the last replay, which the next call tries first."""
        self._report: GraphReport | None = None
        self._patience, self._skip, self._skips = _PATIENCE, 0, 0
        self._waits_for: Region | None = None
        self._native: Any = None
        if self._settings.disable:
            self.record.reason, self._call = "the option disable is set", self._run  # type: ignore[method-assign]

    def __reduce__(self) -> Any:
        """A copy is a separate graph of the copied callable and the copied ``held``, without captures."""
        return type(self), (self.function, {**self._how, "held": self._root[0]})

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to ``instance``, as a function does: ``instance`` becomes the first argument."""
        return self if instance is None else functools.partial(cast("Any", self), instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of the callable, or raise its exception. With the option ``strict``, raise CaptureError if
        the callable cannot be captured."""
        if torch.compiler.is_compiling():
            return cast("R", self._answering(*args, **kwargs))
        use = get_ident(), self._root[0], args, kwargs
        try:
            if not turns.enter(use):
                return self._run(args, kwargs)
            last = self._last
            if last is not None and not self._skip and not capturing:
                result = self._again(*last, args, kwargs)
                if result is not _OTHER:
                    return cast("R", result)
            if (self._skip and self._still_skips()) or _is_watched():
                return self._run(args, kwargs)
            return cast("R", self._call(args, kwargs))
        finally:
            turns.leave(use)

    def _run(self, args: Any, kwargs: Any) -> R:
        self.record.uncaptured += 1
        return cast("R", self._answering(*args, **kwargs))

    def _still_skips(self) -> bool:
        region = self._waits_for
        if region is not None and region.record.state is not State.UNCAPTURED:  # it may capture again
            self._skip = 0
            return False
        self._skip -= 1
        return True

    def _again(self, look: Look, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay ``entry`` if the call equals its last one in all by which ``_call`` tells calls apart: one native
        check reads arguments and held state. Otherwise return ``_OTHER``, without effects."""
        seen = None if entry.pending else entry.known.read(self._root, args, kwargs, look.containers)
        if seen is None:
            return _OTHER
        tensors, containers = seen
        if entry.groups and layouts_of(entry.known.shared, tensors) != entry.layouts:
            return _OTHER
        outputs = self._replay(entry, tensors)
        if outputs is None:
            self._last = None  # its captures may be gone
            return _OTHER
        return self._leave(entry, outputs, tensors, containers)

    def _know(
        self, look: Look, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], told: tuple[bytes, bytes, Any]
    ) -> None:
        """Have the next call try ``entry``, which has just been replayed. ``told``: facts of the call, the sharing of
        memory among its tensors, and the layouts of tensors that share memory."""
        if entry.known is None and self._key is None and not compat.function_depth():
            nodes: list[tuple[int, Any, int]] = []
            try:
                whole = described(args, nodes) and described(kwargs, nodes)
            except RecursionError:  # it needs more frames than ``read``
                whole = False
            if whole:
                facts, shared, entry.layouts = told
                entry.known = look.held.known(nodes, facts, shared, compat.global_hooks)
        self._last = None if entry.known is None else (look, entry)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[torch.Tensor] = []
        key: list[Hashable] = [mode.device for mode in compat.function_modes()] if compat.function_depth() else []
        try:
            read(args, tensors, key)
            if kwargs:
                read(kwargs, tensors, key)
            if self._key is not None:
                decided: list[torch.Tensor] = []
                read(self._key(*args, **kwargs), decided, key)
                if decided:
                    said = "key returns a tensor, whose numbers tell no calls apart: return plain values"
                    return self._refused(Refusal("argument-type", said), args, kwargs)
        except OddError as odd:
            return self._refused(Refusal("argument-type", f"an argument is a {odd}"), args, kwargs)
        except RecursionError:
            said = "arguments are nested too deeply, or contain themselves"
            return self._refused(Refusal("argument-type", said), args, kwargs)
        if self._native is None:
            refusal = self._begin(tensors)
            if refusal is not None:
                return self._refused(refusal, args, kwargs)
        look, seen = self._look, None
        if look is not None:
            seen = look.held.read(self._root, tensors, look.containers)
        for key_of, other in list(reversed(self._looks.items()))[:_TRIED] if seen is None else ():
            seen = other.held.read(self._root, tensors, other.containers)
            if seen is not None:
                self._look = look = other
                self._looks.move_to_end(key_of)
                break
        if look is None or seen is None:
            walked = self._walked()
            if isinstance(walked, Refusal):
                return self._refused(walked, args, kwargs)
            look = walked
            seen = look.held.read(self._root, tensors, look.containers)
            if seen is None:  # another thread changes it
                return self._refused(Refusal("capture-busy", "what is held changes meanwhile"), args, kwargs)
        every, facts, shared, containers = seen
        layouts = layouts_of(shared, every) if shared else None
        whole = (tuple(key), facts, shared, layouts)
        found = look.entries.get(whole)
        new = found is None
        if found is None:
            made = self._entry(look, whole, every, facts, shared)
            if isinstance(made, Refusal):
                return self._refused(made, args, kwargs)
            found = made
        if not found.pending:
            outputs = self._replay(found, every)
            if outputs is not None:
                self._know(look, found, args, kwargs, (facts, shared, layouts))
                return self._leave(found, outputs, every, containers)
        call = Call(args, kwargs, every, self._root, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return self._look_up(found, call, look, containers, new=new)

    def _replay(self, entry: Entry, tensors: list[torch.Tensor]) -> Any:
        """The outputs of a replay of the capture that was used last; None, without effects, if it does not fit."""
        return entry.region.try_replay(entry.arguments(tensors))

    # -- entries -----------------------------------------------------------------------------------------------------

    def _begin(self, tensors: Sequence[torch.Tensor]) -> Refusal | None:
        """Find the driver at the first call."""
        if self._report is None:
            code = getattr(inspect.unwrap(self.function), "__code__", None)
            origin = GraphOrigin(self.record.name, None if code is None else location_of_code(code))
            self._report = open_report(CALLABLE, origin)
        kinds = {tensor.device.type for tensor in (*tensors, *Walk(self._root).tensors)}
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

    def _walked(self) -> Look | Refusal:
        """The current structure of held state."""
        walk = Walk(self._root)
        if walk.refusal is not None:
            return walk.refusal
        look = self._looks.get(walk.key)
        if look is None:
            self._patience -= 1  # a walk takes long
            look = Look(self._native(walk.nodes), tuple(walk.paths))
            self._looks[walk.key] = look
            while len(self._looks) > _MOST:
                self._drop(self._looks.popitem(last=False)[1])
        self._looks.move_to_end(walk.key)
        self._look = look
        return look

    def _drop(self, look: Look) -> None:
        for entry in look.entries.values():
            self._close(entry.region)

    def _close(self, region: Region) -> None:
        region.close()
        record = self.record
        record.freed += region.record.captures
        record.regions = [each for each in record.regions if each is not region.record]
        if self._report is not None:
            self._report.regions[:] = [each for each in self._report.regions if each.record is not region.record]

    def _entry(
        self, look: Look, key: Hashable, tensors: list[torch.Tensor], facts: bytes, shared: bytes
    ) -> Entry | Refusal:
        """A new entry, or the reason why calls like this one cannot be captured."""
        if facts[-1]:
            said = "autocast may keep a cast of a tensor that was written since: enter it inside of the callable"
            return Refusal("uncaptured-work", said)
        gradients = torch.is_grad_enabled()
        for fact in facts[: -self._native.MODES]:
            if not fact & 16:
                return Refusal("unsupported-tensor", "an argument, or what is held, is no plain strided tensor")
            if fact & 32:
                return Refusal("unsupported-tensor", "an argument, or what is held, has hooks of a backward pass")
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
        verifies = self._settings.verify_every > 0
        entry = Entry(self.function, self._answering, device, self._native.keep_casts, verifies=verifies)
        entry.groups = groups_of(shared)
        first = {group.members[0]: group for group in entry.groups}
        others = {number for group in entry.groups for number in group.members[1:]}
        entry.plan = tuple(first.get(number, number) for number in range(len(tensors)) if number not in others)
        settings = self._settings
        compares = self._how.get("compare")
        if compares is not None:
            pairs = enumerate(zip(look.paths, tensors, strict=False))
            entry.spared = frozenset(number for number, each in pairs if not compares(*each))

        def function(args: list[Any]) -> list[Any]:
            return self._on_stand_ins(entry, args)

        name = f"{self.record.name}.{self._made}"
        self._made += 1
        with live.owned_by(self._owner):
            entry.region = Region(
                function,
                self._driver,
                name=name,
                label=f"captured callable {name}",
                options=RegionOptions(
                    capture_after=settings.capture_after,
                    ledger=settings.ledger,
                    memory_limit=settings.memory_limit,
                    verify_every=settings.verify_every,
                    order=settings.order,
                    launch_passes=self._launches(tensors, entry),
                    exempt=entry.exempt,
                ),
                held=range(len(entry.plan)),
                origins=origin_of_line,
                eager=self._how.get("eager", ()),
                uncaptured=entry.answer,
                whole=self._ledger,
            )
        look.entries[key] = entry
        while len(look.entries) > _MOST:
            self._close(look.entries.popitem(last=False)[1].region)
        self.record.regions.append(entry.region.record)
        if self._report is not None:
            self._report.regions.append(
                RegionReport(len(self._report.regions), (), (), (), True, "", entry.region.record)
            )
        return entry

    def _on_stand_ins(self, entry: Entry, args: list[Any]) -> list[Any]:
        """Capture the callable, or run it on copies for a comparison."""
        return entry.on_stand_ins(args)

    def _launches(self, tensors: Sequence[torch.Tensor], entry: Entry) -> LaunchPasses:  # noqa: ARG002 - of loops
        """The passes over captured launches. ``tensors``: tensors of the call, numbered as in ``entry.plan``."""
        return self._settings.launches()

    # -- calls without an immediate replay -----------------------------------------------------------------------------

    def _look_up(self, entry: Entry, call: Call, look: Look, containers: Sequence[Any], *, new: bool) -> Any:
        """Answer a call that was not replayed at once. ``new``: it is the first of its entry."""
        region, record = entry.region, entry.region.record
        signature = signature_of(call.tensors) if entry.pending or not record.replays else None
        captures = record.captures
        outer, current.call = current.call, call
        try:
            if signature in entry.pending and not self._confirm(entry, call, signature):
                return self._run(call.args, call.kwargs)
            outputs = region(entry.arguments(call.tensors))
        finally:
            current.call = outer
        if record.captures > captures and call.log is not None:
            entry.pending[signature_of(call.tensors)] = call.log
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
            self._waste(lasts=lasts, region=region if lasts else None)
        elif not capturing:  # else, another thread's capture ends soon
            self._waste(lasts=new and self._skips > 0)
            if self._skip and new:
                self.record.reason = "no call had the plain values and the held structure of an earlier one"
            elif self._skip and record.ledger is not None and record.ledger.declined:
                self.record.reason = "captures have not paid so far: another one waits until it would"
        return call.returned

    def _confirm(self, entry: Entry, call: Call, signature: Hashable) -> bool:
        """True if the callable, run without executing operators, does the same in this call as in its capture. If not,
        the entry is never replayed again, or, if the obstacle may pass, not in this call."""
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

    def _leave(self, entry: Entry, outputs: Sequence[Any], tensors: Sequence[Any], containers: Sequence[Any]) -> Any:
        """Put the results of a replay where the callable would put them. Returns the callable's result."""
        record = self.record
        record.replays += 1
        record.reason, self._patience, self._skips = None, _PATIENCE, 0
        left = entry.left[outputs[0]]
        if left.written:
            torch.autograd.graph.increment_version([tensors[number] for number in left.written])
        for place in left.places:
            value = None if place.value is None else make(place.value, tensors, containers, outputs)
            if place.kind == "grad":
                tensors[place.where].grad = value
            elif place.kind == "items":
                refill(containers[place.where], value)
            else:
                key = make(place.key, tensors, containers, outputs)
                if place.kind == "gone":
                    del containers[place.where][key]
                else:
                    containers[place.where][key] = value
        return make(left.result, tensors, containers, outputs)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refused(self, refusal: Refusal, args: Any, kwargs: Any) -> Any:
        self._note(refusal)
        self._waste(lasts=self._skips > 0 and not reason_of(refusal.reason).may_pass)
        return self._run(args, kwargs)

    def _note(self, refusal: Refusal, reason: str | None = None) -> None:
        self.record.reason = reason or str(refusal)
        if refusal.reason not in self.record.refusals:
            self.record.refusals[refusal.reason] = refusal
            if self._report is not None:
                self._report.notes.append(str(refusal))
        if self._settings.strict:
            raise CaptureError("strict", f"{self.record.name} cannot be captured: {self.record.reason}")

    def _waste(self, *, lasts: bool, region: Region | None = None) -> None:
        """Count a look-up in vain: after several in a row, a number of calls run without one. ``lasts``: the next one
        will most likely be in vain, too. ``region``: a region that no longer captures."""
        self._patience -= 4 if lasts else 1
        if self._patience <= 0:
            self._skips = min(2 * self._skips or _PATIENCE, _LOOKS if lasts else 4 * _PATIENCE)
            self._skip, self._patience, self._waits_for = self._skips, 4, region


def _is_watched() -> bool:
    """True if a mode, hook, trace or the like has to see each operator of this call, or this thread is capturing."""
    return bool(
        get_ident() in capturing
        or compat.is_tracing()
        or compat.dispatch_mode_depth()
        or compat.functorch_level() is not None
        or compat.saved_tensor_hooks(True) is not None
        or compat.has_global_hooks()
        or compat.forward_level() >= 0
        or torch.is_anomaly_enabled()
        or (compat.function_depth() and {type(mode) for mode in compat.function_modes()} != {compat.DeviceContext})
    )


@overload
def graph(function: Callable[P, R], **how: Unpack[How]) -> Graph[P, R]: ...


@overload
def graph(function: None = None, **how: Unpack[How]) -> Callable[[Callable[P, R]], Graph[P, R]]: ...


def graph(
    function: Callable[..., Any] | None = None,
    *,
    held: Any = (),
    key: Callable[..., Any] | None = None,
    compare: Callable[[str, torch.Tensor], bool] | None = None,
    eager: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Capture any callable at its second call, and replay it in later calls. Without ``function``, return a decorator.

    Arguments are pytrees: tensors may have new addresses in each call; each set of plain values is captured by itself.
    A replay updates ``held`` as ``function`` does: gradients, buffers, optimizer state, attributes. A call runs
    uncaptured if a replay might differ, and ``record.reason`` says why. Raises OptionError or ParseError for an invalid
    option.

    Args:
        function: callable whose Python code runs in uncaptured calls and captures, never in a replay
        held: modules, optimizers, tensors, and containers of them, that ``function`` reads or writes; looked up at
            every call; default: none
        key: called with the arguments; returns the other plain values on which the Python code depends
        compare: called with path and tensor of each held tensor; default: compare all. If false, no comparison copies
            or checks the tensor: the replay writes it in place, and ``function`` then writes it again
        eager: operators without overload, such as ``aten.sort``, that replays call between segments
        options: options of the backend (see ``Settings``); those of compiled programs raise OptionError: ``passes``,
            ``dump_dir``, ``dump_inputs``, ``frames``, ``collectives``, ``cache_dir``, ``inductor``
    """
    how: How = {"held": held, "key": key, "compare": compare, "eager": tuple(eager), "options": options}
    return functools.partial(Graph, how=how) if function is None else Graph(function, how)
