"""The life of one region: warm, captured and compared, then replayed, or left uncaptured with a reason.

A Region stands in for a compiled region's function. Most calls end in ``try_replay``: the variant that was used last is
replayed if it fits. All others are told apart in ``_choose``, by the State of their variant:

    REPLAY       it fits: replayed
    UNCAPTURED   uncaptured: a capture failed, for good
    COLD, WARM   uncaptured, and counted; the n-th call captures, if the ledger consents, and compares with a run that
                 answers it

One thread captures at a time, and nobody waits for it: the others run uncaptured meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from pygraph.compat import dispatch_mode_depth, functorch_level
from pygraph.errors import ReplayError, first_line
from pygraph.program.default import DEFAULT_PASSES, LaunchPasses, longest_path
from pygraph.program.program import EagerStep, GraphSegment, Program
from pygraph.program.recording import Origin
from pygraph.program.steps import timeline
from pygraph.runtime import live
from pygraph.runtime.agreement import Ballot, Outcome, collectives_of, only_collectives, open_ballot
from pygraph.runtime.compare import ODD_REPLAY, Verdict, compare, verify
from pygraph.runtime.contest import DEPENDENCES, PATIENCE, PROGRAM, Contest, Decision, kept_path, read
from pygraph.runtime.contract import Driver, Executable, uses
from pygraph.runtime.critical import capturing, capturing_turn, interruptible
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.eager import base_of, is_operator
from pygraph.runtime.events import Journal, Sizes, counts
from pygraph.runtime.ledger import TIMED, Ledger
from pygraph.runtime.provenance import Refusal, is_out_of_memory, tracing
from pygraph.runtime.reasons import BUILDING, CLOSED, MEMORY, Lasting, reason_of
from pygraph.runtime.slots import SlotTable
from pygraph.runtime.tensors import fingerprint
from pygraph.runtime.variants import LONGEST_WAIT, ScalarKey, State, Variant, VariantTable, signature, sizes_in

__all__ = ["EagerCalls", "Region", "RegionOptions", "RegionRecord"]

_MAX_REFUSALS = 2
"""Captures that fail before a region that was never captured is left off (one, where no scalar tells calls apart)."""

_CONTESTS = 3
"""Variants of a region that are timed in two orders at once; and, if so many kept that of the program, the last."""

_WORTH_TRYING = 0.95
"""Part of the launches that the longest path has at most, for another order to be tried."""

_AGREED = "collectives are captured, as all ranks agreed"
"""What is noted of a region once votes have ended so."""

_TOLERATED = "non-deterministic: compared within a tolerance"
"""The same, where results vary by themselves."""

_NO_OPERATORS_FAULT = ("comparison-failed", "dynamic-output", "host-read", "metadata-mutation", "only-eager")
"""Refusals that name an operator, and would name it as well if each replay called it."""


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """How a region lives.

    ``capture_after``: the occurrence of a variant at which it is captured (at least 2). ``max_captures``: executables
    that one region holds; the least recently used goes. ``verify_every``: of so many replays, one is compared with an
    uncaptured run, which answers the call (0: none). ``ledger``: a capture must pay. ``cache_dir``: where decisions are
    kept, if at all. ``order``: what launches of a replay wait for: ``program``, ``dependences``, or, as real calls
    decide, ``measured``. ``launch_passes`` make the program that is replayed of the captured one.
    ``collectives``: replays call them (``eager``), or they are ``captured`` once all ranks agree.
    """

    capture_after: int = 2
    max_captures: int = 64
    verify_every: int = 0
    ledger: bool = False
    cache_dir: str | None = None
    order: str = "program"
    launch_passes: LaunchPasses = DEFAULT_PASSES
    collectives: str = "eager"


@dataclass(frozen=True, slots=True)
class EagerCalls:
    """Calls of one operator by one line of the user's, in each replay."""

    operator: str
    loc: str | None
    count: int


@dataclass(repr=False)
class RegionRecord:
    """What a report reads of one region.

    ``slots``, ``launches``, ``workspace_bytes``, ``segments`` and the ``eager`` calls between them are those of the
    last capture. ``eager_since`` says why operators are called that were to be captured. ``python_runs``: how often
    bodies of operators written in Python ran for captures and comparisons. ``refusals`` holds the first of each reason.
    ``ledger``: what captures cost and replays saved; None where captures need not pay. ``orders`` are the decisions on
    the order of launches; ``contests`` variants still wait for one.
    ``passes``: notes of the launch passes on the last capture. ``longest_path``: of its launches that depend on each
    other (0: nobody asked); ``timeline``: of the last one that ran side by side. ``events``: how often something else
    happened, by kind, and by kind and reason."""

    name: str
    state: State = State.COLD
    reason: str | None = None
    captures: int = 0
    replays: int = 0
    uncaptured: int = 0
    slots: int = 0
    launches: int = 0
    workspace_bytes: int = 0
    segments: int = 0
    eager: list[EagerCalls] = field(default_factory=list)
    eager_since: dict[str, str] = field(default_factory=dict)
    python_runs: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    ledger: Ledger | None = None
    orders: list[Decision] = field(default_factory=list)
    contests: int = 0
    passes: tuple[str, ...] = ()
    longest_path: int = 0
    timeline: tuple[tuple[str, int, int], ...] = ()
    events: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        counts = f"captures: {self.captures}, replays: {self.replays}, uncaptured calls: {self.uncaptured}"
        why = f"; {first_line(self.reason)}" if self.reason else ""
        return f"<RegionRecord {self.name}: {self.state.value}; {counts}{why}>"

    def settle(self) -> None:
        """Have the ledger's sum include all replays."""
        if self.ledger is not None:
            self.ledger.settle(self.replays)

    def count_replay(self) -> None:
        """Here, and for the process."""
        self.replays += 1
        counts["replays"] += 1

    def count_uncaptured(self) -> None:
        """Here, and for the process."""
        self.uncaptured += 1
        counts["uncaptured"] += 1


class Region:
    """A callable with the convention of Inductor's partitions: ``region(args) -> outputs``, and ``args`` is emptied.

    ``fn`` is what is captured; ``uncaptured`` (``fn``, unless it is given) does the same to the caller's own arguments
    where nothing is replayed, and a new capture is compared with what it does. ``label`` is what profilers call a
    replay (``name``, unless it is given), ``held`` positions of arguments that outlive the call, such as parameters,
    ``lent`` of those that may. ``on_capture`` is told each program that will be replayed; it may not raise. ``origins``
    says what the lines of ``fn`` run. Replays call the operators ``eager`` (without overloads), and those that turn out
    to fail in a capture. Nothing of a call is kept after it. Calling raises what ``fn`` or a replayed kernel raises,
    and ReplayError when a replay broke its contract; a capture that fails never shows but in ``record``."""

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        driver: Driver,
        *,
        name: str,
        label: str = "",
        options: RegionOptions | None = None,
        held: Iterable[int] = (),
        lent: Iterable[int] = (),
        on_capture: Callable[[Program], None] | None = None,
        origins: Mapping[int, Origin] | None = None,
        eager: Iterable[str] = (),
        clock: Callable[[], float] = perf_counter,
        uncaptured: Callable[[list[Any]], Sequence[Any]] | None = None,
    ) -> None:
        self._options = options or RegionOptions()
        self._ledger = Ledger() if self._options.ledger else None
        self.record = RegionRecord(name, ledger=self._ledger)
        self._fn = fn
        self._run_fn = uncaptured or fn
        self._driver = driver
        self._facts = {"held": frozenset(held), "lent": frozenset(lent), "name": label or name}
        self._on_capture = on_capture
        self._eager = dict.fromkeys(map(base_of, eager))
        self._origins: Mapping[int, Origin] = origins or {}
        self._variants = VariantTable(self._options.max_captures, self._options.capture_after - 1)
        self._clock = clock
        self._replay_last: Callable[[list[Any]], Sequence[Any] | None] | None = None
        """How the capture that was used last is replayed, where no call has to be told from another by hand."""
        self._timed: Variant | None = None
        """The variant that was used last, if its calls are timed."""
        self._key: ScalarKey | None = None
        self._device = torch.device("cpu")
        """Where it is captured, once it was called."""
        self._parameters: frozenset[int] = frozenset()
        """Positions of parameters, whose sizes tell no calls apart."""
        self._slots: SlotTable | None = None
        self._sensitive: frozenset[int] = frozenset()
        self._ballot: Ballot | None = None
        """How ranks decide on captured collectives, until they do no longer."""
        self._left: Refusal | None = None
        """Why nothing is captured any more, if so."""
        self._failures = 0
        self._unready: Refusal | None = None
        """Why the driver could not capture when it was asked last."""
        self._odd: tuple[Variant, bytes] | None = None
        """The variant of which the last replay that could be judged was the odd one, and what the call was given."""
        self._queued = 0
        """Calls, since the last turn of a contest, of variants that wait for one to end."""
        self._journal = Journal(name, self.record.events, clock)
        self._began: float | None = None
        """When the call began that captures, if one does now."""
        live.enter(self)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        outputs = self.try_replay(args)
        return self._choose(args) if outputs is None else outputs

    def expects_replay(self) -> bool:
        """Whether a call that comes now is replayed, if it fits."""
        if dispatch_mode_depth():
            return False
        return self._replay_last is not None or self._timed is not None

    def try_replay(self, args: list[Any]) -> Sequence[Any] | None:
        """Replay what was used last; None, with nothing done and ``args`` as it was, if that does not fit."""
        replay = self._replay_last
        if capturing or dispatch_mode_depth() or functorch_level() is not None:
            return None
        if replay is None:
            timed = self._timed
            outputs = None if timed is None else self._use(timed, args)
            if outputs is None:
                self._timed = None
            return outputs
        try:
            outputs = replay(args)
        except BaseException as error:
            self._raised(args, error)
            raise
        if outputs is not None:
            self.record.count_replay()
        return outputs

    def close(self) -> None:
        """Free everything that was captured; later calls run uncaptured."""
        self._retire(Refusal(CLOSED))

    @property
    def counters(self) -> tuple[str, dict[str, int]]:
        """Its name, and what happened to it so far."""
        record = self.record
        calls = {"captures": record.captures, "replays": record.replays, "uncaptured": record.uncaptured}
        return record.name, {**calls, **dict(record.events)}

    def retry(self, *, every: bool) -> bool:
        """Make calls eligible for captures again that were refused for what may pass; with ``every``, for whatever
        reason. Whether there were any."""
        left = self._left
        if left is not None and (left.reason == CLOSED or not (every or reason_of(left.reason).may_pass)):
            return False
        refusal = self._variants.retry(every=every) or left or self._unready
        if refusal is None:
            return False
        self._left, self._unready, self._failures = None, None, 0
        if self._ledger is not None:
            self._ledger.forgive()
        if not self._variants.captured:
            self.record.state, self.record.reason = State.WARM, None
        self._journal.retried(refusal.reason)
        return True

    def release(self) -> int:
        """Free all captures; later calls are captured again. Returns how many there were."""
        freed = sum(self._free(variant) for variant in self._variants.captured)
        if freed:
            self._journal.released()
        return freed

    def captures(self) -> list[live.Capture]:
        """The captures, but for those that ranks have agreed on."""
        known = [(variant, variant.executable) for variant in self._variants.captured if not variant.joined]
        return [
            live.Capture(self._device, executable.used, partial(self._evict, variant))
            for variant, executable in known
            if executable is not None
        ]

    def _evict(self, variant: Variant) -> None:
        """Free a capture because memory is short."""
        if self._free(variant):
            variant.wait(self._clock())
            self._journal.evicted("out-of-memory", self._sizes(variant))

    def _free(self, variant: Variant) -> bool:
        """Free a capture, to be made anew once its calls ran often enough; whether this thread did."""
        freed = self._variants.free(variant)
        if freed:
            variant.ran = 0
            self._replay_last = self._timed = None
            self.record.contests = self._variants.contests
            if not self._variants.captured:
                self.record.state = State.WARM
        return freed

    def _choose(self, args: list[Any]) -> Sequence[Any]:
        """A call that was not replayed at once: by the state of its variant."""
        if get_ident() in capturing or functorch_level() is not None:
            return self._uncaptured(args)
        self.record.settle()
        if self._ballot is not None and not dispatch_mode_depth():
            outputs = self._vote(self._ballot, args)
            if outputs is not None:
                return outputs
        if self._left is not None:
            return self._uncaptured(args)
        if self._key is None:
            self._key = ScalarKey(args)
            devices = (arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu")
            self._device = next(devices, self._device)
            self._parameters = frozenset(i for i, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter))
        key = self._key.of(args)
        watched = dispatch_mode_depth() > 0  # a mode has to see each operator, as AOTAutograd's does in the first call
        if not watched:
            variants = self._variants.under(key)
            for variant in variants:
                contested = variant.open and variant.contest is None and self._ballot is None
                outputs = self._contest(variant, args) if contested else self._use(variant, args)
                if outputs is not None:
                    return outputs
            if self._ledger is not None and len(variants) == 1 and self._waits(variants[0]):
                self._variants.touch(variants[0])
                return self._count(variants[0], args)  # most likely: a look at each tensor takes time
        facts = signature(args, self._sensitive)
        if isinstance(facts, Refusal):
            if facts.reason not in self.record.refusals:
                self._note(facts)
                self._journal.left(facts)
            if not self._variants.captured:
                self.record.reason = str(facts)
            return self._uncaptured(args)
        variant = self._variants.find(key, facts)
        if not watched and self._is_due(variant) and self._is_ready():
            with capturing_turn() as mine:
                if mine and self._is_due(variant):
                    return self._due(variant, args)
        return self._count(variant, args)

    def _count(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Run a call of ``variant`` uncaptured."""
        began = self._clock()
        outputs = self._uncaptured(args)
        if self._ledger is not None:
            self._ledger.ran(variant.account, self._clock() - began)
        variant.ran += 1
        variant.seen = uses.value
        return outputs

    def _is_ready(self) -> bool:
        """True if the driver can capture by now; the report says why it cannot."""
        refusal, before = self._driver.unready(), self._unready
        self._unready, record = refusal, self.record
        if refusal is not None and (before is None or before.reason != refusal.reason):
            self._journal.refused(refusal, ())
        if (refusal or before) is not None and not self._variants.captured:
            passing = refusal is None or refusal.reason == BUILDING
            record.state = State.WARM if passing else State.UNCAPTURED
            record.reason = None if refusal is None else str(refusal)
        return refusal is None

    def _waits(self, variant: Variant) -> bool:
        """True if a variant is neither captured, nor to be captured now, but maybe later."""
        return variant.executable is None and not variant.off and not self._is_due(variant)

    def _is_due(self, variant: Variant) -> bool:
        """True if a variant is to be captured now: its calls are enough, and the ledger consents."""
        if not variant.due(self._clock):
            return False
        return self._ledger is None or self._ledger.consents(variant.account, variant.ran)

    def _use(self, variant: Variant, args: list[Any]) -> Sequence[Any] | None:
        """Replay ``variant``; None, with nothing done, if it is not captured or does not fit."""
        executable, contest = variant.executable, variant.contest
        if executable is None:
            return None
        try:
            turn = None if contest is None else contest.enter()
            rival = variant.rival if turn is not None and turn.order == DEPENDENCES else None
            outputs = None if rival is None else self._replay(variant, rival, args)
            if outputs is None:
                turn = None if turn is not None and turn.order == DEPENDENCES else turn
                outputs = self._replay(variant, executable, args)
            if contest is not None and outputs is not None:
                self._queued = 0
                decision = contest.leave(turn)
                if decision is not None:
                    variant.contest = None
                    self._choose_order(variant, decision)
                    contest.keep(decision)
            return outputs
        except BaseException as error:
            self._raised(args, error)
            raise

    def _replay(self, variant: Variant, executable: Executable, args: list[Any]) -> Sequence[Any] | None:
        if variant.program is not None and variant.unverified + 1 >= self._options.verify_every:
            return self._verify(variant, executable, variant.program, args)
        ledger, account = self._ledger, variant.account
        if ledger is None or account.timed >= TIMED:
            outputs = executable.replay(args)
        else:
            began = self._clock()
            outputs = executable.replay(args)
            if outputs is not None:
                ledger.replayed(account, self._clock() - began)
        if outputs is not None:
            variant.unverified += 1
            self._prefer(variant)
            self.record.count_replay()
        return outputs

    def _verify(
        self, variant: Variant, executable: Executable, program: Program, args: list[Any]
    ) -> Sequence[Any] | None:
        """Answer a call by running uncaptured what is captured, and hold a replay against that; None, with nothing
        done, if the call does not fit."""
        if not variant.fits(args):
            return None
        facts = (self._fn, self._driver, executable, args, program)
        verdict = verify(self.record.name, *facts, tolerant=variant.tolerant, odd=self._odd is not None)
        args.clear()
        variant.unverified = 0
        self._compared(variant, verdict, verified=True)
        self._prefer(variant)
        if verdict.refusal is None:
            self.record.count_replay()
        else:
            self._note(Refusal("unverified", str(verdict.refusal)))
            self.record.count_uncaptured()
        return verdict.outputs

    def _prefer(self, variant: Variant) -> None:
        """Try ``variant`` first from now on, unless calls have to be told apart by the bits of a float."""
        self._variants.used(variant)
        if self._ledger is not None:
            self._ledger.settle(self.record.replays, variant.account)
        executable = None if self._left is not None else variant.executable
        timed = variant.contest is not None or (self._ledger is not None and variant.account.timed < TIMED)
        plain = self._key is not None and self._key.plain and self._options.verify_every != 1
        usable = executable is not None and plain and self._ballot is None  # with a ballot, each call may be a vote
        self._timed = variant if usable and timed else None
        replay = executable.replay if executable is not None and usable and not (timed or variant.open) else None
        self._replay_last = self._sampled(variant, replay) if replay is not None and variant.program else replay

    def _sampled(self, variant: Variant, replay: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """``replay``, but None where the call is one to be verified."""

        def replay_unverified(args: list[Any]) -> Any:
            if variant.unverified + 1 >= self._options.verify_every:
                return None
            outputs = replay(args)
            variant.unverified += outputs is not None
            return outputs

        return replay_unverified

    def _choose_order(self, variant: Variant, decision: Decision) -> None:
        """Replay ``variant`` in one of its two orders from now on."""
        self.record.orders.append(decision)
        variant.choose(rival=decision.order == DEPENDENCES)
        self.record.contests = self._variants.contests
        self._prefer(variant)

    def _due(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """A call whose variant is to be captured."""
        self._began = self._clock()
        try:
            return self._capture(variant, args)
        finally:
            if self._ledger is not None:
                self._ledger.captured(variant.account, self._clock() - self._began)
            self._began = None
            self.record.contests = self._variants.contests

    def _uncaptured(self, args: list[Any]) -> Sequence[Any]:
        """Run a call uncaptured; where memory is short, captures make room."""
        try:
            outputs = self._run_fn(args)
        except torch.OutOfMemoryError:
            live.shed(self._device)
            raise
        self.record.count_uncaptured()
        if self.record.state is State.COLD:
            self.record.state = State.WARM
        return outputs

    def _run_timed(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Run the uncaptured function for a call that captures, and tell the ledger how long it took."""
        began = self._clock()
        outputs = self._run_fn(args)
        if self._ledger is not None:
            self._ledger.ran(variant.account, self._clock() - began)
        return outputs

    def _answer(self, args: list[Any]) -> Sequence[Any]:
        """Run uncaptured a call that was to capture."""
        return interruptible(self._uncaptured, args)

    def _capture(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Capture and compare; the call is answered by the uncaptured function whatever comes of it."""
        if self._like_the_odd_one(variant, args):
            variant.wait(self._clock())  # a wrong replay may be right where it reads what was there the last time
            return self._answer(args)
        made = self._try_capture(args, self._order(variant))
        if isinstance(made, Refusal):
            self._refuse(variant, made)
            return self._answer(args)
        sensitive = made.program.recording.offset_sensitive
        self._sensitive |= sensitive
        variant.like = sensitive, signature(args, sensitive)
        voted_on = self._to_vote_on(made.program)
        contests = self._contests(variant, made.program)
        kept = self._kept_order(args) if contests and voted_on is None else None
        known = None if kept is None else read(kept)
        verdict = self._compare(variant, made, args)
        if contests and verdict.refusal is None:
            variant.contested, variant.known_order = True, known
            if known is None or known.order == DEPENDENCES:
                variant.open = True
            else:
                counts["recalled"] += 1
                self.record.orders.append(known)
        self._settle(variant, made, verdict, voted_on)
        return verdict.outputs

    def _order(self, variant: Variant) -> str:
        """What launches of ``variant`` wait for, as the user, or real calls, have decided so far."""
        return "dependences" if variant.concurrent or self._options.order == "dependences" else "program"

    def _kept_order(self, args: list[Any]) -> Path | None:
        """The file of what was decided on the order of launches of calls like this."""
        return kept_path(self._fn, args, self._options.cache_dir, self._options.launch_passes.key)

    def _compare(
        self,
        variant: Variant,
        made: Captured,
        args: list[Any],
        together: Callable[[str | None], bool] | None = None,
        answer: Callable[[list[Any]], Sequence[Any]] | None = None,
    ) -> Verdict:
        """Compare what was captured, which is closed if that raises, with what answers the call: ``answer``, which
        counts it, or an uncaptured run."""
        run = partial(interruptible, answer or partial(self._run_timed, variant))
        facts = self._fn, self._driver, made.executable, args, made.program, run
        try:
            verdict = compare(*facts, odd=self._odd is not None, together=together)
        except BaseException as error:
            made.executable.close()
            variant.ran = 0
            self._raised(args, error)
            raise
        args.clear()
        self._compared(variant, verdict)
        if answer is None:
            self.record.count_uncaptured()
        for call in made.program.recording.python * verdict.runs:
            self.record.python_runs[call.name] += 1
        return verdict

    def _like_the_odd_one(self, variant: Variant, args: list[Any]) -> bool:
        """Whether a call has the arguments of the one whose replay was odd; or there is no memory to tell."""
        odd = self._odd
        try:
            return odd is not None and odd[0] is variant and odd[1] == fingerprint(args)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return True
            raise

    def _compared(self, variant: Variant, verdict: Verdict, *, verified: bool = False) -> None:
        """Keep whether a replay was the odd one of runs that vary, until a capture's is right, or a ``verified`` one of
        the same variant."""
        refusal, odd = verdict.refusal, self._odd
        if refusal is None and odd is not None and (odd[0] is variant or not verified):
            self._odd = None
        elif refusal is not None and refusal.reason == ODD_REPLAY:
            self._odd = variant, verdict.arguments

    def _contests(self, variant: Variant, program: Program) -> bool:
        """Whether another order of launches is to be tried for ``variant``."""
        if not self._driver.parallel or self._options.order == "program":
            return False
        path, launches = longest_path(program), len(program.recording.launches)
        self.record.longest_path = path
        if self._options.order != "measured" or self._options.verify_every or variant.contested:
            return False
        return program.order is None and path < _WORTH_TRYING * launches

    def _to_vote_on(self, program: Program) -> tuple[str, str] | None:
        """The group of the collectives of ``program``, and what its ranks say of them, where they may vote on these now
        or later: another order of launches waits for that, since where all is captured it takes other times."""
        open_to_votes = self.record.captures == 0 or self._ballot is not None
        if self._options.collectives != "captured" or self._options.verify_every or not open_to_votes:
            return None
        return collectives_of(program)

    def _tries_orders(self, variant: Variant) -> bool:
        """Whether another order may be tried for ``variant`` now. Where the last few sizes kept that of the program,
        it is not tried for any more: each takes a capture. One that is known to be faster is not asked for here."""
        last = [each.order for each in self.record.orders][-_CONTESTS:]
        if last == [PROGRAM] * _CONTESTS:
            variant.open = False
            self.record.contests = self._variants.contests
            return False
        if self._variants.contested_now < _CONTESTS:
            return True
        self._queued += 1
        return self._queued > PATIENCE

    def _contest(self, variant: Variant, args: list[Any]) -> Sequence[Any] | None:
        """A call of a captured variant whose launches another order is to be tried for: a second replay, which is
        compared like the first, and then measured, unless an earlier process did that."""
        if not variant.fits(args) or (variant.known_order is None and not self._tries_orders(variant)):
            return self._use(variant, args)
        with capturing_turn() as mine:
            if not mine or not variant.open:
                return self._use(variant, args)
            variant.open = False
            try:
                return self._capture_rival(variant, args)
            finally:
                self.record.contests = self._variants.contests

    def _capture_rival(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        made = self._try_capture(args, "dependences")
        if isinstance(made, Refusal) or made.program.order is None:  # or it would take too much memory
            if isinstance(made, Refusal):
                self._note(made)
            else:
                made.executable.close()
            self._prefer(variant)
            return self._answer(args)
        contest = Contest(self._driver, args, self._kept_order(args))
        verdict = self._compare(variant, made, args)
        if verdict.refusal is None:
            variant.rival = made.executable
        refusal = verdict.refusal or (Refusal(CLOSED) if self._left or variant.executable is None else None)
        if refusal is not None:
            variant.rival = None
            made.executable.close()
            self._note(refusal)
            self._prefer(variant)
            return verdict.outputs
        self._show(made.program)
        if variant.known_order is None:
            variant.contest = contest
            self._prefer(variant)
        else:
            counts["recalled"] += 1
            self._choose_order(variant, variant.known_order)
        return verdict.outputs

    def _vote(self, ballot: Ballot, args: list[Any]) -> Sequence[Any] | None:
        """Where this call is one that ranks vote at: if all of them can, replay with collectives captured, and use that
        from now on if it was right on every rank. Once they do, the same in another order of launches, if one is to be
        tried: real calls decide between the two. None, with nothing done, where this rank cannot."""
        call = self.record.replays + self.record.uncaptured + 1
        if not ballot.due(call):
            return None
        known = () if self._key is None else self._variants.under(self._key.of(args))
        variant = next((each for each in known if each.executable is not None and each.fits(args)), None)
        with capturing_turn() as mine:
            try:
                place = ballot.place(call)
                if mine and variant is not None and variant.sends and (variant.open or not variant.joined):
                    made = self._capture_joint(ballot, variant, args)
                    if made is not None:
                        return self._compare_joint(ballot, place, variant, made, args)
                self._said(ballot.decide("replay", None))
                return None
            finally:
                ballot.held += 1
                if ballot.over and self._ballot is not None:
                    self._end_votes("ranks did not agree to capture them")
                self.record.contests = self._variants.contests

    def _capture_joint(self, ballot: Ballot, variant: Variant, args: list[Any]) -> Captured | None:
        """A capture with collectives, if nothing but these would have to be called; in the other order of launches, if
        collectives are captured already, which is tried once."""
        variant.open = variant.open and not variant.joined
        with ballot.capturing(), tracing(self._fn, self._origins) as bodies:
            order = "dependences" if variant.joined else self._order(variant)
            made = self._capture_once(args, order, collectives=True)
        self.record.python_runs.update(bodies)
        if isinstance(made, Refusal):
            self._note(made)
            return None
        if not only_collectives(made.program):
            self._note(Refusal("eager-calls", "replays call other operators than collectives"))
        elif made.program.order is not None or not variant.joined:  # or it would take too much memory
            return made
        made.executable.close()
        return None

    def _compare_joint(
        self, ballot: Ballot, place: str, variant: Variant, made: Captured, args: list[Any]
    ) -> Sequence[Any]:
        """Compare with all ranks, and use what was captured if it was right on each. Once they have agreed, whatever
        keeps this rank from its part is raised: others would take what it sends next for that."""
        asked: list[Outcome] = []
        question = f"order {ballot.held}"

        def agree(faster: bool) -> bool:
            return ballot.decide(question, "faster" if faster else None) is Outcome.YES

        contest = Contest(self._driver, args, None, agree) if variant.joined else None

        def together(runs: str | None) -> bool:
            asked.append(ballot.decide("replay", None if runs is None else f"{place} {variant.sends} {runs}"))
            return asked[-1] is Outcome.YES

        def answer(args: list[Any]) -> Sequence[Any]:
            """Uncaptured, but where all go on with collectives that are captured already."""
            called = variant.executable if variant.joined and asked != [Outcome.YES] else None
            outputs: Sequence[Any] | None = None if called is None else called.replay(args)
            if outputs is None:
                outputs = self._run_fn(args)
                self.record.count_uncaptured()
            else:
                self.record.count_replay()
            return outputs

        right = kept = False
        try:
            verdict = self._compare(variant, made, args, together, answer)
            right = verdict.refusal is None and not self._left and variant.executable is not None
        finally:
            outcome = asked[0] if asked else ballot.decide("replay", None)
            if outcome is Outcome.YES:
                kept = ballot.decide("use", "right" if right else None) is Outcome.YES
                variant.sends = variant.sends if kept else None  # if this one is wrong, none is tried again
            if not kept:
                made.executable.close()
            self._said(outcome)
        refusal = verdict.refusal
        if kept:
            ballot.join(self)
            self._add_notes(*[_TOLERATED] * verdict.tolerant)
            self._install_joint(variant, made, contest)
        else:
            self._note(refusal or Refusal("ranks-differ", "another rank's replay was not right"))
        self._prefer(variant)
        return verdict.outputs

    def _install_joint(self, variant: Variant, made: Captured, contest: Contest | None) -> None:
        """Replay what was captured, or have a ``contest`` decide on that."""
        called = variant.executable
        if contest is not None:
            variant.rival, variant.contest = made.executable, contest
        else:
            variant.executable = made.executable
            if called is not None:
                called.close()
        if called is None or self._left:  # another thread has closed the region, or is about to
            variant.release()
        elif contest is not None:
            self._show(made.program)
        else:
            variant.joined = True
            self._tell(variant, made.program)
            self._add_notes(_AGREED)

    def _said(self, outcome: Outcome) -> None:
        """What ranks decided at a vote. After a rank that said nothing, nobody is asked again."""
        if outcome is Outcome.LATE:
            self._end_votes("a rank did not vote on capturing them")

    def _end_votes(self, why: str) -> None:
        self._variants.end_joint_contests()
        self._ballot = None
        if _AGREED not in self.record.notes:
            self.record.notes.append(f"collectives are called by each replay: {why}")

    def _try_capture(self, args: list[Any], order: str) -> Captured | Refusal:
        """A capture, in which operators that fail are eager calls, one after the other."""
        with tracing(self._fn, self._origins) as bodies:
            try:
                while True:
                    made = self._capture_once(args, order)
                    if not isinstance(made, Refusal) or not self._make_eager(made):
                        return made
            finally:
                self.record.python_runs.update(bodies)

    def _capture_once(self, args: list[Any], order: str, *, collectives: bool = False) -> Captured | Refusal:
        slots = None if collectives else self._slots
        try:
            facts: dict[str, Any] = {"collectives": collectives, **self._facts}
            passes = self._options.launch_passes
            return capture(self._fn, self._driver, args, slots, tuple(self._eager), order, passes, **facts)
        except Exception as error:  # noqa: BLE001 - operators raise anything; the call must be answered
            return Refusal.of(error)

    def _make_eager(self, refusal: Refusal) -> bool:
        """Have replays call the operators that ``refusal`` names; whether that is new. A capture that fails has run
        nothing."""
        if refusal.reason in _NO_OPERATORS_FAULT or reason_of(refusal.reason).lasting is Lasting.PASSES:
            return False
        new = [base_of(name) for name in refusal.operators if is_operator(name) and base_of(name) not in self._eager]
        self._eager.update(dict.fromkeys(new))
        if new:
            self._note(refusal)
            self.record.eager_since[", ".join(new)] = str(refusal)
        return bool(new)

    def _settle(self, variant: Variant, made: Captured, verdict: Verdict, voted_on: tuple[str, str] | None) -> None:
        """Use the executable from now on, or close it."""
        refusal, evicted = verdict.refusal, list[Variant]()
        if refusal is None:
            variant.tolerant = verdict.tolerant
            variant.program = made.program if self._options.verify_every else None
            evicted = self._variants.install(variant, made.executable)
            if self._left is not None:  # maybe by another thread, before there was anything to free
                self._variants.clear()
                refusal = self._left
        if refusal is not None:
            made.executable.close()
            if self._make_eager(refusal):
                self._forget()
            else:
                self._refuse(variant, refusal)
            return
        self._slots = made.table
        if voted_on is not None:
            group, variant.sends = voted_on
            if self.record.captures == 0:  # later, they may have decided already
                self._ballot = open_ballot(self.record.name, group)
        self._prefer(variant)
        record = self.record
        record.state, record.reason = State.REPLAY, None
        self._add_notes(*made.table.notes, *[_TOLERATED] * verdict.tolerant)
        self._tell(variant, made.program)
        for each in evicted:
            self._journal.evicted("max-captures", self._sizes(each))

    def _add_notes(self, *notes: str) -> None:
        """Those that the report does not have yet."""
        self.record.notes.extend(note for note in notes if note not in self.record.notes)

    def _tell(self, variant: Variant, program: Program) -> None:
        """What reports say of the last capture."""
        record = self.record
        record.captures += 1
        record.slots, record.launches = len(program.slots), len(program.recording.launches)
        record.workspace_bytes = program.layout.nbytes
        self._show(program)
        steps = program.steps
        record.segments = sum(isinstance(step, GraphSegment) for step in steps)
        called = Counter((step.call.name, step.origin.loc) for step in steps if isinstance(step, EagerStep))
        record.eager = [EagerCalls(*call, count) for call, count in called.items()]
        if self._on_capture is not None:
            self._on_capture(program)
        self._journal.captured(self._sizes(variant), self._duration_us, program.layout.nbytes)

    def _show(self, program: Program) -> None:
        """Have reports show what launch passes made of ``program``, and how it runs side by side."""
        self.record.passes, self.record.timeline = program.notes, timeline(program) or self.record.timeline

    def _refuse(self, variant: Variant, refusal: Refusal) -> None:
        """Leave a variant uncaptured, for a while or for good. A replay that was wrong, or failures alone, end the
        whole region's captures. Where memory is short, captures make room that were not used for longer."""
        variant.refuse(refusal, self._clock())
        if refusal.reason in MEMORY and live.shed(self._device, variant.seen):
            variant.ran = variant.wanted  # once more, at once
        at_most = not variant.off and variant.wanted == LONGEST_WAIT[0]
        self._note(refusal, variant, waits="every {} calls or {:g} s".format(*LONGEST_WAIT) if at_most else "")
        self._failures += variant.off
        most = _MAX_REFUSALS if variant.key else 1
        if not self._variants.captured:
            self.record.state, self.record.reason = State.UNCAPTURED, str(refusal)
        vain = self.record.captures == 0 and self._failures >= most
        if vain or reason_of(refusal.reason).lasting is Lasting.REGION:
            self._retire(refusal)
        elif variant.off:
            self._journal.left(refusal, self._sizes(variant), self._duration_us)

    def _raised(self, args: list[Any], error: BaseException) -> None:
        """A call raised: ``args`` is emptied as ever, captures make room if memory is short, and a replay that broke
        its contract is the region's last."""
        args.clear()
        if isinstance(error, torch.OutOfMemoryError):
            live.shed(self._device)
        if isinstance(error, ReplayError):
            refusal = Refusal("replay-failed", str(error))
            self._note(refusal)
            self._retire(refusal)

    def _retire(self, refusal: Refusal) -> None:
        before, self._left = self._left, refusal
        self._forget()
        self.record.state, self.record.reason = State.UNCAPTURED, str(refusal)
        if before is None and refusal.reason != CLOSED:
            self._journal.left(refusal, duration_us=self._duration_us)

    def _forget(self) -> None:
        """Free everything that was captured; what comes next is captured anew."""
        self._replay_last = self._timed = None
        self._slots = None
        self.record.state = State.WARM
        self._variants.clear()
        self.record.contests = 0

    def _note(self, refusal: Refusal, variant: Variant | None = None, *, waits: str = "") -> None:
        """Count a refusal; the first of each reason is kept for reports."""
        self.record.refusals.setdefault(refusal.reason, refusal)
        sizes = () if variant is None else self._sizes(variant)
        self._journal.refused(refusal, sizes, self._duration_us, waits=waits)

    def _sizes(self, variant: Variant) -> Sizes:
        """The sizes that a variant's calls pass, but for those of parameters."""
        return sizes_in(variant.signature, self._parameters)

    @property
    def _duration_us(self) -> float:
        """Of the call that captures, so far."""
        return 0.0 if self._began is None else (self._clock() - self._began) * 1e6
