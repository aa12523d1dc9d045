"""The life of a variant, as a program that is read from top to bottom.

    call 1        runs uncaptured: the variant is warm, and due to be captured at its second call
    call 2        its life begins: captured, compared with the run that answers the call, replayed from now on
    call 3        its life goes on, once the ledger consents: captured in another order of launches, and compared
    calls 4 to …  replayed in both orders in turn, and timed, until one order is kept: its life is over

A variant stands for all calls of one key and signature. Its life is a generator, ``Lives._live``: each
``yield`` waits for the next call to answer. It ends when the calls are replayed for good, or with a refusal: once the
variant is due again, a new life begins. Votes of ranks (``votes``) are a second generator, which yields at the calls
at which ranks vote.

Only the thread that has the capturing turn advances a life. Other threads never enter it: meanwhile, they use existing
captures or run uncaptured. Freeing a capture, on any thread and at any time, also drops its life.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any, TypeAlias

import torch

from pygraph.compat import without_dispatch_modes
from pygraph.errors import ReplayError
from pygraph.program.default import longest_path
from pygraph.program.nested import has_order
from pygraph.program.program import Program
from pygraph.program.recording import Origin, is_functional_collective
from pygraph.program.steps import WORTHWHILE, timeline
from pygraph.runtime import live
from pygraph.runtime.asked import is_asked
from pygraph.runtime.compare import Verdict, compare, verify
from pygraph.runtime.contest import DEPENDENCES, PROGRAM, Contest, Decision, kept_path, may_begin, read
from pygraph.runtime.contract import Driver, Executable, uses
from pygraph.runtime.control import trying_bodies, watching
from pygraph.runtime.critical import interruptible, without_collection
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.eager import base_of, is_operator
from pygraph.runtime.events import Journal, Sizes, counts
from pygraph.runtime.forecast import Workspace
from pygraph.runtime.identity import device_of
from pygraph.runtime.judge import ODD_REPLAY
from pygraph.runtime.ledger import TIMED, Ledger
from pygraph.runtime.proof import Proof, proof_path
from pygraph.runtime.provenance import Refusal, is_out_of_memory, tracing
from pygraph.runtime.reasons import CLOSED, MEMORY, OVER_LIMIT, Lasting, reason_of
from pygraph.runtime.record import RegionOptions, RegionRecord
from pygraph.runtime.tensors import extent, fingerprint
from pygraph.runtime.variants import (
    LONGEST_WAIT,
    Call,
    Checked,
    Replay,
    ScalarKey,
    Signatures,
    State,
    Variant,
    VariantTable,
    go_on,
    is_alive,
    sizes_in,
)
from pygraph.runtime.votes import AGREED, TOLERATED, Ballot, collectives_of, joint, open_ballot

__all__ = ["Lives", "Subject"]

Function: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Inductor's calling convention for partitions: empties its arguments, and returns outputs."""

_MAX_REFUSALS = 2
"""Variants left uncaptured for good that retire a never captured region (one, if no scalar distinguishes calls)."""

_TRIES = 3
"""Decisions in a row for the program's order after which no other order is tried."""

_WORTH_TRYING = 0.95
"""Another order is tried only if the longest path has less than this fraction of the launches."""

_NO_OPERATORS_FAULT = (
    "comparison-failed",
    "unknown-memory",
    "dynamic-output",
    "host-read",
    "metadata-mutation",
    "only-eager",
)
"""Refusals that name an operator, and that an eager call of it would not avoid."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A function to capture.

    Args:
        fn: function that captures and comparisons run
        run: answers calls that are not replayed
        driver: captures and replays ``fn``
        facts: fields of the programs that captures do not determine
        options: options of the region
        owner: owner of the region
        origins: origin of each line of ``fn``, or a callable that returns that of the current line
        on_capture: called with each program that will be replayed
        clock: returns seconds
    """

    fn: Function
    run: Function
    driver: Driver
    facts: Mapping[str, Any]
    options: RegionOptions
    owner: live.Owner
    origins: Mapping[int, Origin] | Callable[[], Origin]
    on_capture: Callable[[Program], None] | None
    clock: Callable[[], float]


class Lives:
    """The lives of a region's variants, and the state that they share.

    Args:
        table: the variants
        latest: replays the most recently used variant; None if each call has to be looked up
        left: reason why nothing more is captured, if so
        ballot: votes of ranks on captured collectives, as long as they vote
        key: reads the scalars of a call
        signatures: reads the signature of a call
        device: device on which the region is captured
        parameters: positions of parameters, whose sizes do not distinguish calls
        sensitive: positions of arguments whose storage offsets distinguish calls
        journal: records events
    """

    def __init__(self, subject: Subject, record: RegionRecord, table: VariantTable, eager: Mapping[str, None]) -> None:
        self.subject, self.record, self.table = subject, record, table
        self._run = trying_bodies(subject.fn, subject.run)
        self.latest: Replay | None = None
        self.left: Refusal | None = None
        self.ballot: Ballot | None = None
        self.key: ScalarKey | None = None
        self.device = torch.device("cpu")
        self.signatures = Signatures()
        self.parameters: frozenset[int] = frozenset()
        self.sensitive: frozenset[int] = frozenset()
        self.journal = Journal(record.name, record.events, subject.clock, subject.owner.log)
        self._ledger: Ledger | None = record.ledger
        self._eager = dict(eager)
        self._proof = Proof()
        self._recalls = True
        """True until a capture that an earlier process should have proven cannot be used without comparison."""
        self._failures = 0
        self._odd: tuple[Variant, bytes] | None = None
        """The variant whose last judged replay was the odd one, and the fingerprint of the arguments of that call."""
        self._paths: dict[int, int] = {}
        """Longest path of programs by their number of launches: programs of other sizes differ little."""
        self._began: float | None = None
        """Start time of the call that captures now, if any."""

    def meet(self, args: Sequence[Any]) -> ScalarKey:
        """Learn from the first call how to distinguish calls."""
        devices = (arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu")
        self.device = next(devices, None) or self.subject.driver.current_device()
        self.parameters = frozenset(i for i, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter))
        options = self.subject.options
        self._proof = Proof(proof_path(self.subject.fn, args, options.cache_dir, options.launch_passes.key))
        self.key = ScalarKey(args)
        return self.key

    def is_known(self, variant: Variant, args: Sequence[Any]) -> bool:
        """True if a call is to be captured one call earlier than others, after it ran uncaptured, since an earlier
        process has proven its kernels. Its arguments are held until it has run: those that the caller does not keep
        must be small."""
        if not (self._recalls and self._proof.kept) or self._compares or not (variant.due_next and self._pays):
            return False
        held = self.subject.facts.get("held", ())
        lost = (arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in held)
        return sum(map(extent, lost)) <= WORTHWHILE

    def fits(self, variant: Variant, args: Sequence[Any]) -> bool:
        """True if ``variant`` is captured for calls like this one."""
        sensitive, captured = variant.like
        return variant.replay is not None and self.signatures.of(args, sensitive) == captured

    def go_on(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Have the life of ``variant`` answer a call, on the thread that has the capturing turn."""
        call, life = Call(args), variant.life
        try:
            # a life that another thread was running when this process was forked never goes on
            if life is None or inspect.getgeneratorstate(life) != inspect.GEN_SUSPENDED:
                life = variant.life = self._live(variant, call)
                go_on(life)
            else:
                go_on(life, call)
        except BaseException:
            if self.table.settle(variant):
                self._count_capture(variant)
            raise
        finally:
            self.record.contests = self.table.contests
        if variant.replay is not None:
            self.prefer(variant)
        outputs = call.take()
        assert outputs is not None
        return outputs

    def may_go_on(self, variant: Variant, args: Sequence[Any]) -> bool:
        """True if the life of a captured variant waits for this call, and another capture pays. A thread that prepares
        sizes asks for one capture of each."""
        if not is_alive(variant.life) or self.ballot is not None or is_asked():
            return False
        if self._no_order_gains or self.subject.owner.frozen:
            self._keep_order(variant)
            return False
        if not self._pays or not self.fits(variant, args):
            return False
        return may_begin(device_of(args), variant)

    # -- the life of a variant -----------------------------------------------------------------------------------------

    def _live(self, variant: Variant, call: Call) -> Generator[None, Call, None]:
        """Life of a variant from the call at which it is due to be captured. The call is answered in any case."""
        known = self._known_order(variant, call.args)
        early = self.is_known(variant, call.args)
        with self._charged(variant):
            made = (self._capture_known if early else self._capture_first)(variant, call)
            goes_on = made is not None and self._has_another_order(variant, made.program)
        if early:
            variant.account.uncaptured = inf  # of a run that loaded kernels
        if made is None:
            if known is not None:
                variant.order = None  # the next capture finds it again
            return
        if known is not None:
            counts["recalled"] += 1
            self.record.orders.append(known)
        if not goes_on:
            return
        del made  # a waiting life holds nothing of a capture

        call = yield
        with self._charged(variant):
            self._capture_rival(variant, call)

    def _capture_rival(self, variant: Variant, call: Call) -> None:
        """Capture in the other order and compare; from then on, replay in both orders in turn."""
        rival = self.try_capture(call.args, DEPENDENCES)
        if isinstance(rival, Refusal) or not has_order(rival.program):  # or it would take too much memory
            self._keep_order(variant, rival)
            self._answer(variant, call)
            return
        contest = Contest(self.subject.driver, call.args, self._kept_path(call.args))
        refusal = self._judge(variant, rival, call).refusal or self.make_room(variant, rival)
        if refusal is not None:
            rival.executable.close()
            self._keep_order(variant, refusal)
            self._answer(variant, call)
            return
        self.record.timeline = timeline(rival.program)
        self.begin_contest(variant, contest, rival.executable, self.order_chosen)
        self._answer(variant, call)

    def _capture_first(self, variant: Variant, call: Call) -> Captured | None:
        """Capture, compare, and replay from now on. Returns None if that was refused."""
        if self._like_the_odd_one(variant, call.args):
            # a wrong replay may look right if it reads what the last run left in memory
            variant.wait(self.subject.clock())
            self._answer(variant, call)
            return None
        cold = is_asked() and not variant.ran
        made = self.try_capture(call.args, self.order_of(variant), cold=cold)
        if isinstance(made, Refusal):
            self._refuse(variant, made, cold=cold)
            self._answer(variant, call)
            return None
        sensitive = made.program.recording.offset_sensitive
        self.sensitive |= sensitive
        variant.like = sensitive, self.signatures.of(call.args, sensitive)
        verdict = self._judge(variant, made, call)
        refusal = verdict.refusal or self._adopt(variant, made, tolerant=verdict.tolerant)
        if refusal is not None:
            made.executable.close()
            if not cold and self._make_eager(refusal):
                self._forget()
            else:
                self._refuse(variant, refusal, cold=cold)
        self._answer(variant, call)
        return None if refusal is not None else made

    def _capture_known(self, variant: Variant, call: Call) -> Captured | None:
        """Answer a call by an uncaptured run; then capture kernels that an earlier process has proven, and replay from
        now on. Returns None, as for any uncaptured call, if that is not possible."""
        args = list(call.args)
        call.outputs = interruptible(partial(self.count, variant), call.args)
        with without_dispatch_modes():  # they have seen the run
            made = self.try_capture(args, self.order_of(variant))
        if isinstance(made, Refusal):
            return None
        sensitive = made.program.recording.offset_sensitive
        if self._proof.covers(made.program):
            self.sensitive |= sensitive
            variant.like = sensitive, self.signatures.of(args, sensitive)
            if self._adopt(variant, made, tolerant=False) is None:
                self._proof.add(made.program)
                self.record.proven += 1
                return made
        made.executable.close()
        self._recalls = False
        return None

    @contextlib.contextmanager
    def _charged(self, variant: Variant) -> Iterator[None]:
        """Charge the call that captures to the ledger, unless the user asks for the capture."""
        self._began, before = self.subject.clock(), self.record.uncaptured
        try:
            yield
        finally:
            if self._ledger is not None and not is_asked():
                ran = self.record.uncaptured > before
                self._ledger.captured(variant.account, self.subject.clock() - self._began, ran=ran)
            self._began = None

    # -- the parts of a life -------------------------------------------------------------------------------------------

    def order_of(self, variant: Variant) -> str:
        """The order in which ``variant`` is captured, as decided so far by the user or by real calls."""
        return DEPENDENCES if DEPENDENCES in (variant.order, self.subject.options.order) else PROGRAM

    def try_capture(
        self, args: list[Any], order: str, *, collectives: bool = False, cold: bool = False
    ) -> Captured | Refusal:
        """Capture. After a failure, make the operators that it names eager calls, and try again. There is only one
        attempt with ``collectives``, which are captured too, and for a ``cold`` size, which never ran."""
        subject, proof = self.subject, None if collectives else self._proof
        with without_collection(), tracing(subject.fn, subject.origins) as bodies:
            try:
                while True:
                    made: Captured | Refusal
                    try:
                        made = capture(
                            subject.fn,
                            subject.driver,
                            args,
                            proof,
                            tuple(self._eager),
                            order,
                            subject.options.launch_passes,
                            collectives=collectives,
                            **subject.facts,
                        )
                    except Exception as error:  # noqa: BLE001 - operators raise anything; the call must be answered
                        made = Refusal.of(error)
                    if collectives or cold or not isinstance(made, Refusal) or not self._make_eager(made):
                        return made
            finally:
                self.record.python_runs.update(bodies)

    def rehearse(self, args: list[Any]) -> Refusal | None:
        """Record the function once more, and drop the recording. Returns the refusal if that failed."""
        subject = self.subject
        with tracing(subject.fn, subject.origins):
            try:
                subject.driver.capture(subject.fn, args, tuple(self._eager))
            except Exception as error:  # noqa: BLE001 - as in a capture
                return Refusal.of(error)
        return None

    def compare(
        self,
        variant: Variant,
        made: Captured,
        call: Call,
        together: Callable[[str | None], bool] | None = None,
        answer: Function | None = None,
    ) -> Verdict:
        """Compare a capture with the run that answers ``call``: ``answer``, which counts the call, or an uncaptured
        run. Closes the capture if that raises. The verdict has no outputs."""
        subject = self.subject
        try:
            with watching() as ran:
                verdict = compare(
                    subject.fn,
                    subject.driver,
                    made.executable,
                    call.args,
                    made.program,
                    partial(interruptible, answer or partial(self._run_timed, variant)),
                    odd=self._odd is not None,
                    together=together,
                    exempt=subject.options.exempt,
                )
        except BaseException as error:
            made.executable.close()
            variant.ran = 0
            self.raised(call.args, error)
            raise
        call.args.clear()
        call.outputs = verdict.outputs
        variant.unseen = made.bodies - ran
        self._compared(variant, verdict)
        if answer is None:
            self.record.count_uncaptured()
        for python in made.program.recording.python * verdict.runs:
            self.record.python_runs[python.name] += 1
        return replace(verdict, outputs=())

    def _judge(self, variant: Variant, made: Captured, call: Call) -> Verdict:
        """Compare a capture, which answers ``call``. One of proven kernels is right, and the call is not answered."""
        proof = self._proof
        if not self._compares and proof.covers(made.program):
            self.record.proven += 1
            return Verdict((), None)
        verdict = self.compare(variant, made, call)
        if verdict.refusal is None:
            proof.add(made.program)
        return verdict

    @property
    def _compares(self) -> bool:
        """True if captures are compared even if their kernels are proven."""
        return bool(self.subject.options.verify_every) or self._odd is not None

    def _answer(self, variant: Variant, call: Call) -> None:
        """Answer a call that captures, unless it is answered already."""
        if call.outputs is None:
            call.outputs = interruptible(partial(self._replayed, variant), call.args)

    def _replayed(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Replay a call if possible, else run it uncaptured."""
        replay = variant.replay  # which another thread may free meanwhile
        if replay is not None:
            try:
                outputs = replay(args)
            except BaseException as error:
                self.raised(args, error)
                raise
            if outputs is not None:
                self.record.count_replay()
                return outputs
        return self.uncaptured(args)

    def _run_timed(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Run the call that captures uncaptured, and report its time to the ledger."""
        began = self.subject.clock()
        outputs = self._run(args)
        if self._ledger is not None:
            self._ledger.ran(variant.account, self.subject.clock() - began)
        return outputs

    def count(self, variant: Variant, args: list[Any], calls: int = 1) -> Sequence[Any]:
        """Run a call of ``variant`` uncaptured, and count it as ``calls`` runs towards a capture."""
        began = self.subject.clock()
        outputs = self.uncaptured(args)
        if self._ledger is not None:
            self._ledger.ran(variant.account, self.subject.clock() - began)
        variant.ran += calls
        variant.seen = uses.value
        return outputs

    def inside(self, args: list[Any]) -> Sequence[Any]:
        """Run a call uncaptured on the thread that captures or compares another region."""
        return self.uncaptured(args, partial(self.subject.driver.run_inside, self.subject.run))

    def uncaptured(self, args: list[Any], run: Function | None = None) -> Sequence[Any]:
        """Run a call uncaptured. If it runs out of memory, captures are freed, and the error is raised."""
        try:
            outputs = (run or self._run)(args)
        except torch.OutOfMemoryError:
            live.shed(self.device)
            raise
        self.record.count_uncaptured()
        if self.record.state is State.COLD:
            self.record.state = State.WARM
        return outputs

    def _like_the_odd_one(self, variant: Variant, args: list[Any]) -> bool:
        """True if a call has the arguments of the call whose replay was odd, or if there is no memory to find out."""
        odd = self._odd
        try:
            return odd is not None and odd[0] is variant and odd[1] == fingerprint(args)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return True
            raise

    def _compared(self, variant: Variant, verdict: Verdict, *, verified: bool = False) -> None:
        """Remember that a replay was the odd one of runs that vary, until a first replay of any capture is right, or a
        ``verified`` replay of the same variant."""
        refusal, odd = verdict.refusal, self._odd
        if refusal is None and odd is not None and (odd[0] is variant or not verified):
            self._odd = None
        elif refusal is not None and refusal.reason == ODD_REPLAY:
            self._odd = variant, verdict.arguments

    def _make_eager(self, refusal: Refusal) -> bool:
        """Make replays call the operators that ``refusal`` names. Returns whether any of them is new. A failed capture
        has run nothing."""
        if refusal.reason in _NO_OPERATORS_FAULT or reason_of(refusal.reason).lasting is Lasting.PASSES:
            return False
        new = [base_of(name) for name in refusal.operators if is_operator(name) and base_of(name) not in self._eager]
        self._eager.update(dict.fromkeys(new))
        if new:
            self.note(refusal)
            self.record.eager_since[", ".join(new)] = str(refusal)
        return bool(new)

    # -- in use --------------------------------------------------------------------------------------------------------

    def _adopt(self, variant: Variant, made: Captured, *, tolerant: bool) -> Refusal | None:
        """Replay a capture from now on. Returns a refusal if there is no room, or the region was closed meanwhile."""
        refusal = self.make_room(variant, made)
        if refusal is not None:
            return refusal
        program = made.program
        checks = self.subject.options.verify_every
        replay: Replay = made.executable.replay
        unseen = set(variant.unseen)
        variant.checked = Checked(program, tolerant, unseen=unseen) if checks or unseen else None
        voted = self._voted_on(program)
        self.table.install(variant, self.timed(variant, replay), made.executable)
        if self.left is not None:  # maybe by another thread, before there was anything to free
            self.table.clear()
            return self.left
        if voted is not None:
            self._open_votes(variant, *voted)
        self.add_notes(*made.table.notes, *[TOLERATED] * tolerant)
        self.tell(variant, program)
        return None

    def make_room(self, variant: Variant, made: Captured) -> Refusal | None:
        """Free the least recently used captures of all regions of the owner, if together with the new one for
        ``variant`` they take too much memory. Returns a refusal if too few may be freed."""
        subject, nbytes = self.subject, made.executable.nbytes
        limits = (subject.options.memory_limit, subject.owner.memory_limit, subject.driver.memory_limit(self.device))
        limit = next(limit for limit in limits if limit is not None)
        if live.make_room(self.device, nbytes, limit, variant, subject.owner):
            return None
        return Refusal(OVER_LIMIT, f"the capture takes {nbytes:,} bytes, and all of them may take {limit:,}")

    def timed(self, variant: Variant, replay: Replay) -> Replay:
        """``replay``, with its first few runs timed for the ledger."""
        ledger, account, clock = self._ledger, variant.account, self.subject.clock
        if ledger is None or account.timed >= TIMED:
            return replay

        def timed_replay(args: list[Any]) -> Sequence[Any] | None:
            began = clock()
            outputs = replay(args)
            if outputs is not None:
                ledger.replayed(account, clock() - began)
                if account.timed >= TIMED and variant.replay is timed_replay:
                    self.table.replace(variant, replay, *variant.held, contest=variant.contest)
                    self.prefer(variant)
            return outputs

        return timed_replay

    def prefer(self, variant: Variant) -> None:
        """Try ``variant`` first from now on, unless each call has to be looked up, as for the bits of a float."""
        if self._ledger is not None:
            self._ledger.settle(self.record.replays, variant.account)
        plain = self.key is not None and self.key.plain and self.subject.options.verify_every != 1
        waits = is_alive(variant.life)
        usable = plain and self.left is None and self.ballot is None and not (waits and self._pays)
        replay = variant.replay if usable else None
        if replay is not None and waits:
            replay = self._until_paid(variant, replay)
        checked = variant.checked
        self.latest = replay if replay is None or checked is None else self._unverified(checked, replay)

    def _until_paid(self, variant: Variant, replay: Replay) -> Replay:
        """``replay`` of ``variant``, which waits, counted until its savings have paid for another capture."""
        saving = variant.account.saving
        if self._ledger is None or saving <= 0:
            return replay
        left = ceil(self._ledger.owed_us / saving)

        def replay_counted(args: list[Any]) -> Sequence[Any] | None:
            nonlocal left
            outputs = replay(args)
            left -= outputs is not None
            if left <= 0:
                self.prefer(variant)
            return outputs

        return replay_counted

    def _unverified(self, checked: Checked, replay: Replay) -> Replay:
        """``replay``, except that it returns None for a call that is to be verified."""

        def replay_unverified(args: list[Any]) -> Sequence[Any] | None:
            if self.is_to_be_verified(checked):
                return None
            outputs = replay(args)
            checked.unverified += outputs is not None
            return outputs

        return replay_unverified

    def is_to_be_verified(self, checked: Checked) -> bool:
        """True if the next replay is to be compared."""
        every = self.subject.options.verify_every
        return bool(checked.unseen) or (every > 0 and checked.unverified + 1 >= every)

    def verify(self, variant: Variant, checked: Checked, args: list[Any]) -> Sequence[Any] | None:
        """Answer a call by an uncaptured run, and compare a replay with it. Returns None, with nothing done, if the
        call does not fit."""
        if not self.fits(variant, args):
            return None
        (executable,) = variant.held or (None,)
        if executable is None:
            return None
        looks = bool(checked.unseen)  # else a wrong replay is an error
        with watching() as ran:
            verdict = (compare if looks else partial(verify, self.record.name))(
                self.subject.fn,
                self.subject.driver,
                executable,
                args,
                checked.program,
                tolerant=checked.tolerant,
                odd=self._odd is not None,
                exempt=self.subject.options.exempt,
            )
        args.clear()
        if verdict.refusal is None:
            checked.unseen -= ran
        elif looks and reason_of(verdict.refusal.reason).lasting is Lasting.REGION:
            self.note(verdict.refusal)
            self.retire(verdict.refusal)
            self.record.count_uncaptured()
            return verdict.outputs
        self._look_less(variant, checked)
        chance = verdict.refusal is not None and verdict.refusal.reason == ODD_REPLAY
        checked.unverified = self.subject.options.verify_every if chance else 0  # if it was chance, the next call says
        self._compared(variant, verdict, verified=True)
        self.prefer(variant)
        if verdict.refusal is None:
            self.record.count_replay()
        else:
            self.note(Refusal("unverified", str(verdict.refusal)))
            self.record.count_uncaptured()
        return verdict.outputs

    def _look_less(self, variant: Variant, checked: Checked) -> None:
        """Count down the calls that are compared for bodies which no compared call has run. After the last one, these
        bodies are replayed anyway, and the report says so."""
        checked.looks -= bool(checked.unseen)
        if checked.unseen and not checked.looks:
            self.add_notes(*(f"{name} was replayed before a call ran it that was compared" for name in checked.unseen))
            checked.unseen.clear()
        if not checked.unseen and not self.subject.options.verify_every:
            variant.checked = None

    # -- another order of launches -------------------------------------------------------------------------------------

    def _measures(self, variant: Variant) -> bool:
        """True if real calls are to choose the order of launches of ``variant``."""
        options = self.subject.options
        asked = options.order == "measured" and self.subject.driver.parallel and not options.verify_every
        return asked and variant.order is None

    def _known_order(self, variant: Variant, args: list[Any]) -> Decision | None:
        """The decision of an earlier process for calls like this one, if any: ``variant`` is then captured in that
        order. Such a decision does not apply to captured collectives."""
        if not self._measures(variant) or (self._may_vote and any(map(is_functional_collective, self._eager))):
            return None
        path = self._kept_path(args)
        known = None if path is None else read(path)
        if known is not None:
            variant.order = known.order
        return known

    def _kept_path(self, args: list[Any]) -> Any:
        options = self.subject.options
        return kept_path(self.subject.fn, args, options.cache_dir, options.launch_passes.key)

    def _has_another_order(self, variant: Variant, program: Program) -> bool:
        """True if another order of launches is to be tried for ``variant``."""
        if not self._measures(variant) or has_order(program) or self._no_order_gains:
            return False
        launches = sum(each.count for each in program.recording.launches)
        if launches not in self._paths:
            self._paths[launches] = longest_path(program)
        self.record.longest_path = self._paths[launches]
        return self._paths[launches] < _WORTH_TRYING * launches

    @property
    def _no_order_gains(self) -> bool:
        """True if the last few variants kept the order of the program. No other order is tried then, since each attempt
        takes a capture."""
        return [each.order for each in self.record.orders[-_TRIES:]] == [PROGRAM] * _TRIES

    @property
    def _pays(self) -> bool:
        """True if a variant that has missed nothing may be captured: the ledger consents, or the user asks."""
        return self._ledger is None or is_asked() or self._ledger.owed_us <= 0

    def _keep_order(self, variant: Variant, why: object = None) -> None:
        """Replay ``variant`` in the program's order for good. ``why``: a capture in the other order, or its refusal."""
        variant.life, variant.order = None, PROGRAM
        if isinstance(why, Captured):
            why.executable.close()
        elif isinstance(why, Refusal):
            self.note(why)
        self.record.contests = self.table.contests

    def begin_contest(
        self, variant: Variant, contest: Contest, rival: Executable, chosen: Callable[[Variant, Decision], None]
    ) -> bool:
        """Replay ``variant`` as before and by ``rival``, in turns, until ``contest`` has decided; then call ``chosen``.
        Returns False, with ``rival`` closed, if another thread has freed ``variant``."""
        serial = next(iter(variant.held), rival)

        def contested(args: list[Any]) -> Sequence[Any] | None:
            turn = contest.enter()
            outputs = None
            if turn is not None and turn.order == DEPENDENCES:
                outputs = rival.replay(args)
                turn = None if outputs is None else turn
            if outputs is None:
                outputs = serial.replay(args)
            if outputs is not None:
                contest.leave(turn, choose)
            return outputs

        def choose(decision: Decision) -> None:
            winner = rival if decision.order == DEPENDENCES else serial
            contest.keep(decision)
            if variant.held == (serial, rival):  # or another thread has freed them
                chosen(variant, decision)
                variant.contest = self.latest = None
                self.record.contests = self.table.contests
                # last: until then, whatever is raised, the next call chooses again
                self.table.replace(variant, self.timed(variant, winner.replay), winner)
            self.prefer(variant)

        if self.table.replace(variant, self.timed(variant, contested), serial, rival, contest=contest):
            contest.take_turn()
            return True
        rival.close()
        return False

    def order_chosen(self, variant: Variant, decision: Decision) -> None:
        """Record the order in which ``variant`` is replayed from now on. May be called twice for one decision."""
        if not any(each is decision for each in self.record.orders):
            self.record.orders.append(decision)
        variant.order = decision.order

    # -- votes of ranks ------------------------------------------------------------------------------------------------

    @property
    def _may_vote(self) -> bool:
        """True if this rank may capture collectives."""
        return self._wants_votes and self.subject.driver.no_collectives() is None

    @property
    def _wants_votes(self) -> bool:
        return self.subject.options.collectives == "measured" and not self.subject.options.verify_every

    def _voted_on(self, program: Program) -> tuple[str, str] | None:
        """The group of the collectives of ``program``, and a hash of them, if ranks may vote on these now or later.
        Another order of launches waits for the vote, since its times differ once collectives are captured."""
        open_to_votes = self.record.captures == 0 or self.ballot is not None
        found = collectives_of(program) if self._wants_votes and open_to_votes else None
        refusal = None if found is None else self.subject.driver.no_collectives()
        if refusal is not None:
            self.add_notes(f"collectives are called by each replay: {refusal.detail}")
            return None
        return found

    def _open_votes(self, variant: Variant, group: str, sends: str) -> None:
        if self.record.captures == 0:  # later, they may have decided already
            self.ballot = open_ballot(self.record.name, group)
        if self.ballot is not None:
            variant.joint = joint(self, self.ballot, variant, sends)
            next(variant.joint)

    def end_votes(self, why: str) -> None:
        """End the votes: each rank goes on by itself, with its captures so far."""
        self.ballot = None
        for variant in self.table.captured:
            variant.joint = None
        if AGREED not in self.record.notes:
            self.record.notes.append(f"collectives are called by each replay: {why}")

    # -- the end of lives ----------------------------------------------------------------------------------------------

    def free(self, variant: Variant) -> bool:
        """Free a capture; it is made anew once its calls have run often enough. Returns whether this thread did so."""
        freed = self.table.free(variant)
        if freed:
            variant.ran = 0
            self.latest = None
            self.record.contests = self.table.contests
            if not self.table.captured:
                self.record.state = State.WARM
        return freed

    def evict(self, variant: Variant, reason: str) -> None:
        """Free a capture to make room. The next one waits for twice as many runs; after a shortage of memory, which
        passes, no longer than refused captures wait at most."""
        if self.free(variant):
            if reason == OVER_LIMIT:
                variant.postpone()
            else:
                variant.wait(self.subject.clock())
            self.journal.evicted(reason, self.sizes(variant))

    def _refuse(self, variant: Variant, refusal: Refusal, *, cold: bool = False) -> None:
        """Leave a variant uncaptured, for a while or for good. A wrong replay, or nothing but failures, ends all
        captures of the region. If memory is short, captures that have been unused for longer are freed. A ``cold``
        variant never ran: it may have failed for lack of what its first run loads, so its refusal is ignored."""
        if cold:
            variant.ran = 1
            return
        variant.refuse(refusal, self.subject.clock())
        if refusal.reason in MEMORY and live.shed(self.device, variant.seen):
            variant.ran = variant.wanted  # once more, at once
        at_most = not variant.off and variant.wanted == LONGEST_WAIT[0]
        self.note(refusal, variant, waits="every {} calls or {:g} s".format(*LONGEST_WAIT) if at_most else "")
        self._failures += variant.off
        most = _MAX_REFUSALS if variant.key else 1
        if not self.table.captured:
            self.record.state, self.record.reason = State.UNCAPTURED, str(refusal)
        vain = self.record.captures == 0 and self._failures >= most
        if vain or reason_of(refusal.reason).lasting is Lasting.REGION:
            self.retire(refusal)
        elif variant.off:
            self.journal.left(refusal, self.sizes(variant), self._duration_us)

    def raised(self, args: list[Any], error: BaseException) -> None:
        """Handle an exception of a call: empty ``args`` as ever, free captures if memory is short, and retire the
        region if a replay broke its contract."""
        args.clear()
        if isinstance(error, torch.OutOfMemoryError):
            live.shed(self.device)
        if isinstance(error, ReplayError):
            refusal = Refusal("replay-failed", str(error))
            self.note(refusal)
            self.retire(refusal)

    def close(self) -> None:
        """Free all captures; later calls run uncaptured."""
        self.retire(Refusal(CLOSED))

    def retire(self, refusal: Refusal) -> None:
        """Free all captures, and make no more."""
        before, self.left = self.left, refusal
        self._forget()
        if refusal.reason != CLOSED and reason_of(refusal.reason).lasting is Lasting.REGION:
            self._proof.forget()
        self.record.state, self.record.reason = State.UNCAPTURED, str(refusal)
        if before is None and refusal.reason != CLOSED:
            self.journal.left(refusal, duration_us=self._duration_us)

    def forgive(self) -> None:
        """Allow captures again, whatever was refused before."""
        self.left, self._failures = None, 0
        if self._ledger is not None:
            self._ledger.forgive()
        if not self.table.captured:
            self.record.state, self.record.reason = State.WARM, None

    def _forget(self) -> None:
        """Free all captures; later calls may be captured anew."""
        self.latest = None
        self.record.state = State.WARM
        self.table.clear()
        self.record.contests = 0

    # -- the record ----------------------------------------------------------------------------------------------------

    def add_notes(self, *notes: str) -> None:
        """Add the notes that the report does not have yet."""
        self.record.notes.extend(note for note in notes if note not in self.record.notes)

    def tell(self, variant: Variant, program: Program) -> None:
        """Record, and report, that ``program`` is replayed from now on."""
        self.record.describe(program)
        if is_asked():
            variant.workspace = Workspace.of(program)
        self._count_capture(variant)
        if self.subject.on_capture is not None:
            self.subject.on_capture(program)
        self.journal.captured(self.sizes(variant), self._duration_us, program.layout.nbytes)

    def _count_capture(self, variant: Variant) -> None:
        """Count the capture by which ``variant`` is replayed, once."""
        self.record.state, self.record.reason = State.REPLAY, None
        if not variant.counted:
            variant.counted, self.record.captures = True, self.record.captures + 1

    def note(self, refusal: Refusal, variant: Variant | None = None, *, waits: str = "") -> None:
        """Record and report a refusal."""
        self.record.refusals.setdefault(refusal.reason, refusal)
        sizes = () if variant is None else self.sizes(variant)
        self.journal.refused(refusal, sizes, self._duration_us, waits=waits)

    def sizes(self, variant: Variant) -> Sizes:
        """Sizes of the tensors that a variant's calls pass, except parameters."""
        return sizes_in(variant.signature, self.parameters)

    @property
    def _duration_us(self) -> float:
        """Time of the call that captures, so far; 0 if none does."""
        return 0.0 if self._began is None else (self.subject.clock() - self._began) * 1e6
