"""The life of a variant, as a program that is read from top to bottom.

    call 1        runs uncaptured: it is warm, and the second one is due to be captured
    call 2        its life begins: captured, compared with the run that answers the call, replayed from now on
    call 3        its life goes on, once the ledger consents: captured in another order of launches, and compared
    calls 4 to …  replayed in turns of either order, which are timed, until one is kept: its life is over

A variant is what calls of one key and signature have in common. Its life is a generator, ``Lives._live``: each
``yield`` waits for the next call to answer. It ends when the calls are replayed for good, or with a refusal: once the
variant is due again, a new life begins. Votes of ranks (``votes``) are a second generator, which yields at the calls
at which ranks vote.

The thread that has the capturing turn alone goes on with a life. What others do meanwhile never enters it: they replay
what there is, or run uncaptured. Whoever frees a capture, on any thread and at any time, drops its life with it.
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
from pygraph.runtime.contest import DEPENDENCES, PATIENCE, PROGRAM, Contest, Decision, kept_path, read
from pygraph.runtime.contract import Driver, Executable, uses
from pygraph.runtime.control import trying_bodies, watching
from pygraph.runtime.critical import interruptible, without_collection
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.eager import base_of, is_operator
from pygraph.runtime.events import Journal, Sizes, counts
from pygraph.runtime.forecast import Workspace
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
"""Inductor's convention of a partition: empties its arguments, and returns outputs."""

_MAX_REFUSALS = 2
"""Captures that fail before a region that was never captured is left off (one, where no scalar tells calls apart)."""

_CONTESTS = 3
"""Variants of a region that are timed in two orders at once; and, if so many kept that of the program, the last."""

_WORTH_TRYING = 0.95
"""Part of the launches that the longest path has at most, for another order to be tried."""

_NO_OPERATORS_FAULT = (
    "comparison-failed",
    "unknown-memory",
    "dynamic-output",
    "host-read",
    "metadata-mutation",
    "only-eager",
)
"""Refusals that name an operator, and would name it as well if each replay called it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A function that is captured.

    Args:
        fn: what captures and comparisons run
        run: what answers calls that are not replayed
        driver: captures and replays it
        facts: fields of the programs that no capture tells
        options: how the region lives
        owner: whose it is
        origins: what the lines of ``fn`` run
        on_capture: is told each program that will be replayed
        clock: seconds
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
    """The lives of a region's variants, and what these share.

    Args:
        table: the variants
        latest: how the variant that was used last is replayed, where no call has to be told from another by hand
        left: why nothing is captured any more, if so
        ballot: how ranks decide on captured collectives, until they do no longer
        key: reads the scalars of a call
        signatures: reads all that tells calls apart
        device: where it is captured
        parameters: positions of parameters, whose sizes tell no calls apart
        sensitive: positions of arguments whose storage offsets tell calls apart
        journal: takes down events
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
        """Until something was captured that no earlier process has proven, though it had proven this program."""
        self._failures = 0
        self._odd: tuple[Variant, bytes] | None = None
        """The variant of which the last replay that could be judged was the odd one, and what the call was given."""
        self._queued = 0
        """Calls, since the last turn of a contest, of variants that wait for one to end."""
        self._paths: dict[int, int] = {}
        """The longest path of programs by how many launches they have: those of other sizes differ little."""
        self._began: float | None = None
        """When the call began that captures, if one does now."""

    def meet(self, args: Sequence[Any]) -> ScalarKey:
        """Learn from the first call what tells calls apart."""
        devices = (arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu")
        self.device = next(devices, None) or self.subject.driver.current_device()
        self.parameters = frozenset(i for i, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter))
        options = self.subject.options
        self._proof = Proof(proof_path(self.subject.fn, args, options.cache_dir, options.launch_passes.key))
        self.key = ScalarKey(args)
        return self.key

    def is_known(self, variant: Variant, args: Sequence[Any]) -> bool:
        """True if a call is captured that runs uncaptured first, one earlier than others, since an earlier process has
        proven its kernels. Its arguments are held until it has run: those that the caller does not keep must be
        small."""
        if not (self._recalls and self._proof.kept) or self._compares or not (variant.due_next and self._pays):
            return False
        held = self.subject.facts.get("held", ())
        lost = (arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in held)
        return sum(map(extent, lost)) <= WORTHWHILE

    def fits(self, variant: Variant, args: Sequence[Any]) -> bool:
        """True if a call is one that ``variant`` is captured for."""
        sensitive, captured = variant.like
        return variant.replay is not None and self.signatures.of(args, sensitive) == captured

    def go_on(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Have the life of ``variant`` answer a call, on the thread that has the capturing turn."""
        call, life = Call(args), variant.life
        try:
            # one that a thread was at when this process was forked from it never goes on
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
        """True if a call is one that the life of a captured variant waits for, and another capture pays. Who prepares
        sizes asks for one of each."""
        if not is_alive(variant.life) or self.ballot is not None or is_asked():
            return False
        if self._no_order_gains or self.subject.owner.frozen:
            self._keep_order(variant)
            return False
        if not self._pays or not self.fits(variant, args):
            return False
        if self.table.contested_now < _CONTESTS:
            return True
        self._queued += 1
        return self._queued > PATIENCE

    # -- the life of a variant -----------------------------------------------------------------------------------------

    def _live(self, variant: Variant, call: Call) -> Generator[None, Call, None]:
        """From the call at which a variant is due to be captured. Whatever comes of it, the call is answered."""
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
        del made  # what waits holds nothing of a capture

        call = yield
        with self._charged(variant):
            self._capture_rival(variant, call)

    def _capture_rival(self, variant: Variant, call: Call) -> None:
        """Capture in the other order, compare, and replay in turns of either from now on."""
        rival = self.try_capture(call.args, DEPENDENCES)
        if isinstance(rival, Refusal) or not has_order(rival.program):  # or it would take too much memory
            self._keep_order(variant, rival)
            self._answer(variant, call)
            return
        contest = Contest(self.subject.driver, call.args, self._kept_path(call.args), self.subject.clock)
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
        """Capture, compare, and replay from now on; None where that was refused."""
        if self._like_the_odd_one(variant, call.args):
            # a wrong replay may be right where it reads what was there the last time
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
        """Answer a call by an uncaptured run; then capture what an earlier process has proven, and replay from now on.
        None, as after any uncaptured run, where that cannot be."""
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
        """The ledger pays for the call that captures, unless the user asks for it."""
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
        """The order in which ``variant`` is captured, as the user, or real calls, have decided so far."""
        return DEPENDENCES if DEPENDENCES in (variant.order, self.subject.options.order) else PROGRAM

    def try_capture(
        self, args: list[Any], order: str, *, collectives: bool = False, cold: bool = False
    ) -> Captured | Refusal:
        """A capture, in which operators that fail are eager calls, one after the other; with ``collectives``, which are
        captured too, the first attempt alone counts, and so it does of a ``cold`` size, which never ran."""
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
        """Record the function once more, and drop the recording; why that failed, if so."""
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
        """Hold a capture, which is closed if that raises, against what answers ``call``: ``answer``, which counts it,
        or an uncaptured run. The verdict comes without outputs."""
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
        """Compare a capture, which answers ``call``; one of proven kernels is right, and answers nothing."""
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
        """True if captures are compared though their kernels are proven."""
        return bool(self.subject.options.verify_every) or self._odd is not None

    def _answer(self, variant: Variant, call: Call) -> None:
        """Answer a call that captures, unless that is done."""
        if call.outputs is None:
            call.outputs = interruptible(partial(self._replayed, variant), call.args)

    def _replayed(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Replay a call if that can be, else run it uncaptured."""
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
        """Run a call uncaptured that captures, and tell the ledger how long it took."""
        began = self.subject.clock()
        outputs = self._run(args)
        if self._ledger is not None:
            self._ledger.ran(variant.account, self.subject.clock() - began)
        return outputs

    def count(self, variant: Variant, args: list[Any], calls: int = 1) -> Sequence[Any]:
        """Run a call of ``variant`` uncaptured, which stands for so many that make it due to be captured."""
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
        """Run a call uncaptured; where memory is short, captures make room."""
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
        """True if a call has the arguments of the one whose replay was odd; or there is no memory to tell."""
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

    def _make_eager(self, refusal: Refusal) -> bool:
        """Have replays call the operators that ``refusal`` names; whether that is new. A capture that fails has run
        nothing."""
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
        """Replay what was captured from now on; or why not, if there is no room, or the region was closed meanwhile."""
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
        """Have captures go that were not used for longest, of any region of the same owner, if all take too much memory
        with the new one for ``variant``; a refusal where those that may go are too few."""
        subject, nbytes = self.subject, made.executable.nbytes
        limits = (subject.options.memory_limit, subject.owner.memory_limit, subject.driver.memory_limit(self.device))
        limit = next(limit for limit in limits if limit is not None)
        if live.make_room(self.device, nbytes, limit, variant, subject.owner):
            return None
        return Refusal(OVER_LIMIT, f"the capture takes {nbytes:,} bytes, and all of them may take {limit:,}")

    def timed(self, variant: Variant, replay: Replay) -> Replay:
        """``replay``, of which the first few runs are timed for the ledger."""
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
        """Try ``variant`` first from now on, unless each call has to be looked at, as for the bits of a float."""
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
        """``replay``, so often as ``variant``, which waits, has to be replayed until another capture is paid for."""
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
        """``replay``, but None where the call is one to be verified."""

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
        """Answer a call by running uncaptured what is captured, and hold a replay against that; None, with nothing
        done, if the call does not fit."""
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
        """One call less is compared for bodies that no compared call ran; after the last one, they are replayed all the
        same, and the report says so."""
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
        """The decision of an earlier process for calls like this; ``variant`` is captured in that order then. It says
        nothing of collectives that are captured."""
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
        """True if the last few variants kept the order of the program: no other is tried any more, since each takes a
        capture."""
        return [each.order for each in self.record.orders[-_CONTESTS:]] == [PROGRAM] * _CONTESTS

    @property
    def _pays(self) -> bool:
        """True if a capture may be tried whose variant has missed nothing: the ledger consents, or the user asks."""
        return self._ledger is None or is_asked() or self._ledger.owed_us <= 0

    def _keep_order(self, variant: Variant, why: object = None) -> None:
        """Replay ``variant`` in the order of the program for good; ``why``: a capture in the other, or its refusal."""
        variant.life, variant.order = None, PROGRAM
        if isinstance(why, Captured):
            why.executable.close()
        elif isinstance(why, Refusal):
            self.note(why)
        self.record.contests = self.table.contests

    def begin_contest(
        self, variant: Variant, contest: Contest, rival: Executable, chosen: Callable[[Variant, Decision], None]
    ) -> bool:
        """Replay ``variant`` as before and by ``rival``, in turns, until ``contest`` has decided; tell ``chosen``.
        Returns whether that has begun: another thread may have freed ``variant``."""
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
                self._queued = 0
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
            return True
        rival.close()
        return False

    def order_chosen(self, variant: Variant, decision: Decision) -> None:
        """``variant`` is replayed in one of its two orders from now on. May be told twice."""
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
        """The group of the collectives of ``program``, and what its ranks say of them, where they may vote on these now
        or later: another order of launches waits for that, since where all is captured it takes other times."""
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
        """Ranks vote no longer: each goes on by itself, with what is captured by then."""
        self.ballot = None
        for variant in self.table.captured:
            variant.joint = None
        if AGREED not in self.record.notes:
            self.record.notes.append(f"collectives are called by each replay: {why}")

    # -- the end of lives ----------------------------------------------------------------------------------------------

    def free(self, variant: Variant) -> bool:
        """Free a capture, to be made anew once its calls ran often enough; whether this thread did."""
        freed = self.table.free(variant)
        if freed:
            variant.ran = 0
            self.latest = None
            self.record.contests = self.table.contests
            if not self.table.captured:
                self.record.state = State.WARM
        return freed

    def evict(self, variant: Variant, reason: str) -> None:
        """Free a capture to make room. Its calls run twice as often until the next one; where memory was short, which
        passes, no longer than refused captures wait at most."""
        if self.free(variant):
            if reason == OVER_LIMIT:
                variant.postpone()
            else:
                variant.wait(self.subject.clock())
            self.journal.evicted(reason, self.sizes(variant))

    def _refuse(self, variant: Variant, refusal: Refusal, *, cold: bool = False) -> None:
        """Leave a variant uncaptured, for a while or for good. A replay that was wrong, or failures alone, end the
        whole region's captures. Where memory is short, captures make room that were not used for longer. A ``cold``
        variant never ran: it may have failed for what its first run loads, and nothing is made of that."""
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
        """A call raised: ``args`` is emptied as ever, captures make room if memory is short, and a replay that broke
        its contract is the region's last."""
        args.clear()
        if isinstance(error, torch.OutOfMemoryError):
            live.shed(self.device)
        if isinstance(error, ReplayError):
            refusal = Refusal("replay-failed", str(error))
            self.note(refusal)
            self.retire(refusal)

    def close(self) -> None:
        """Free everything that was captured; later calls run uncaptured."""
        self.retire(Refusal(CLOSED))

    def retire(self, refusal: Refusal) -> None:
        """Capture nothing any more."""
        before, self.left = self.left, refusal
        self._forget()
        if refusal.reason != CLOSED and reason_of(refusal.reason).lasting is Lasting.REGION:
            self._proof.forget()
        self.record.state, self.record.reason = State.UNCAPTURED, str(refusal)
        if before is None and refusal.reason != CLOSED:
            self.journal.left(refusal, duration_us=self._duration_us)

    def forgive(self) -> None:
        """Captures are made again, whatever was refused before."""
        self.left, self._failures = None, 0
        if self._ledger is not None:
            self._ledger.forgive()
        if not self.table.captured:
            self.record.state, self.record.reason = State.WARM, None

    def _forget(self) -> None:
        """Free everything that was captured; what comes next is captured anew."""
        self.latest = None
        self.record.state = State.WARM
        self.table.clear()
        self.record.contests = 0

    # -- the record ----------------------------------------------------------------------------------------------------

    def add_notes(self, *notes: str) -> None:
        """Add those that the report does not have yet."""
        self.record.notes.extend(note for note in notes if note not in self.record.notes)

    def tell(self, variant: Variant, program: Program) -> None:
        """A program is replayed from now on."""
        self.record.describe(program)
        if is_asked():
            variant.workspace = Workspace.of(program)
        self._count_capture(variant)
        if self.subject.on_capture is not None:
            self.subject.on_capture(program)
        self.journal.captured(self.sizes(variant), self._duration_us, program.layout.nbytes)

    def _count_capture(self, variant: Variant) -> None:
        """Count the capture that ``variant`` is replayed by, once."""
        self.record.state, self.record.reason = State.REPLAY, None
        if not variant.counted:
            variant.counted, self.record.captures = True, self.record.captures + 1

    def note(self, refusal: Refusal, variant: Variant | None = None, *, waits: str = "") -> None:
        """Something was refused."""
        self.record.refusals.setdefault(refusal.reason, refusal)
        sizes = () if variant is None else self.sizes(variant)
        self.journal.refused(refusal, sizes, self._duration_us, waits=waits)

    def sizes(self, variant: Variant) -> Sizes:
        """The sizes that a variant's calls pass, but for those of parameters."""
        return sizes_in(variant.signature, self.parameters)

    @property
    def _duration_us(self) -> float:
        """Of the call that captures, so far."""
        return 0.0 if self._began is None else (self.subject.clock() - self._began) * 1e6
