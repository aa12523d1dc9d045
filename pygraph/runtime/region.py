"""The life of one region: cold, warm, captured and compared, then replayed, or left uncaptured with a reason.

A Region stands in for a compiled region's function. How captures are made, compared and told apart lives in
``capturing``, ``comparison`` and ``keys``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Lock, get_ident
from typing import Any

from pygraph.compat import dispatch_mode_depth, functorch_level
from pygraph.errors import ReplayError
from pygraph.runtime import counters
from pygraph.runtime.capturing import Captured, capture
from pygraph.runtime.comparison import Scope, Verdict, compare, verify
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import Driver, Executable, Keepers, Program
from pygraph.runtime.keys import ScalarKey, Variant, VariantTable, signature
from pygraph.runtime.measuring import CANDIDATES, UNCAPTURED, Measured, Site, copying, disturb, left_out, measured
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.provenance import Origin, blamed, tracing
from pygraph.runtime.refusal import Refusal
from pygraph.runtime.remembering import memory_of
from pygraph.runtime.slots import SlotTable
from pygraph.runtime.staging import asked_for

__all__ = ["Region"]

_ONE_CALLS_FAULT = ("argument-misaligned", "comparison-budget", "random-state", "replay-declined")
"""Refusals that say nothing about calls with other arguments."""

_REGIONS_FAULT = ("comparison-failed", "stateful-operator", "unstable-number")
"""Refusals that say something about every capture of the region: none is used any more."""

_capturing: list[int] = []
"""The threads that capture now: a region called while its own thread captures is on stand-ins, and runs uncaptured."""


class Region:
    """A callable with the convention of Inductor's partitions: ``region(args) -> outputs``, and ``args`` is emptied.

    ``fn`` is the uncaptured function, ``written_hint`` positions of arguments known to be mutated, ``held`` those of
    arguments that outlive the call in any case, such as parameters, ``lent`` those of arguments that may, ``copied``
    those of arguments that are to be copied to fixed addresses where they move, if copies can stand for them.
    ``on_capture`` is told each program that was captured, compared and will be replayed, ``on_refusal`` why a capture
    failed that leaves the region without any, if that names operators which are at fault; neither may raise.
    ``origins`` says what the lines of ``fn`` run. Nothing of a call is kept after it. Calling raises what ``fn`` or a
    replayed kernel raises, and ReplayError when a replay broke its contract; a capture that fails never shows but in
    ``record``.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        driver: Driver,
        *,
        name: str,
        options: RegionOptions | None = None,
        written_hint: Iterable[int] = (),
        held: Iterable[int] = (),
        lent: Iterable[int] = (),
        copied: Iterable[int] = (),
        on_capture: Callable[[Program], None] | None = None,
        origins: Mapping[int, Origin] | None = None,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        self.record = RegionRecord(name)
        self._count_replay = self.record.tally("replays").hit
        self._count_uncaptured = self.record.tally("uncaptured").hit
        self._fn = fn
        self._driver = driver
        self._options = options or RegionOptions()
        self._hint = frozenset(written_hint)
        self._keepers = Keepers(frozenset(held), frozenset(lent))
        self._copied = frozenset(copied)
        self._on_capture, self._on_refusal = on_capture, on_refusal
        self._origins: Mapping[int, Origin] = origins or {}
        self._variants = VariantTable(
            self._options.max_captures, self._options.max_tracked, self._options.capture_after - 1
        )
        self._memory = memory_of(fn, driver, self._options, CANDIDATES)
        self._lock = Lock()
        self._consume: Callable[[list[Any]], Sequence[Any] | None] | None = None
        """How the capture that was used last is replayed, where no call has to be told from another by hand."""
        self._measured: Measured | None = None
        """What was used last, if it is under measured selection."""
        self._key: ScalarKey | None = None
        self._slots: SlotTable | None = None
        self._sensitive: frozenset[int] = frozenset()
        self._off = False
        self._failures = 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        outputs = self.try_replay(args)
        return self._choose(args) if outputs is None else outputs

    def expects_replay(self) -> bool:
        """Whether a call that comes now is replayed, if it fits. Raises what waiting for the device raises."""
        known = self._consume is not None and not dispatch_mode_depth()
        return known and (self._measured is None or not self._measured.awaits_uncaptured())

    def try_replay(self, args: list[Any]) -> Sequence[Any] | None:
        """Replay the capture that was used last; None, with nothing done and ``args`` as it was, if that does not fit.

        Raises what a call raises.
        """
        consume = self._consume
        if consume is None or _capturing or dispatch_mode_depth() or functorch_level() is not None:
            return None
        try:
            outputs = consume(args)
        except BaseException as error:
            self._raised(args, error)
            raise
        if outputs is None:
            return None
        args.clear()
        self._count_replay()
        counters.REPLAYS.hit()
        return outputs

    def close(self) -> None:
        """Free everything that was captured; later calls run uncaptured."""
        self._retire(Refusal("closed"))

    def _choose(self, args: list[Any]) -> Sequence[Any]:
        """Replay another variant than the last one, or run uncaptured, or capture."""
        if _capturing:  # somebody's capture takes part of the time
            self._spoil()
        if self._off or get_ident() in _capturing or functorch_level() is not None:
            return self._uncaptured(args)
        if self._key is None:
            self._key = ScalarKey(args)
        key = self._key.of(args)
        if dispatch_mode_depth():  # a mode has to see each operator, as AOTAutograd's does in the very first call
            return self._miss(key, args, watched=True)
        variants = self._variants.under(key)
        for variant in variants:
            outputs = self._use(variant, args, alone=len(variants) == 1)
            if outputs is not None:
                return outputs
        return self._miss(key, args)

    def _use(self, variant: Variant, args: list[Any], *, alone: bool) -> Sequence[Any] | None:
        """Replay ``variant``, or run it uncaptured where measured selection says so, if it is captured and fits."""
        executable = variant.executable
        if executable is None:
            return self._left_out(variant, args, alone=alone)
        try:
            if isinstance(executable, Measured) and executable.awaits_uncaptured():
                return self._passed_over(variant, executable, args, alone=alone)
            return self._replay(variant, executable, args)
        except BaseException as error:
            self._raised(args, error)
            raise

    def _replay(self, variant: Variant, executable: Executable, args: list[Any]) -> Sequence[Any] | None:
        outputs = self._verified(variant, executable, args)
        if outputs is None:
            return None
        args.clear()
        self._prefer(variant, executable)
        self._count_replay()
        counters.REPLAYS.hit()
        return outputs

    def _verified(self, variant: Variant, executable: Executable, args: list[Any]) -> Sequence[Any] | None:
        if not self._options.verify_always:
            return _consuming(executable)(args)
        scope = self._scope(variant, variant.program)
        return verify(self._fn, self._driver, executable, args, scope, self.record.name)

    def _passed_over(
        self, variant: Variant, executable: Measured, args: list[Any], *, alone: bool
    ) -> Sequence[Any] | None:
        """Run a call of a captured variant uncaptured; None, with nothing done, if it is of another one after all."""
        if not executable.grants(args, alone=alone):
            return None
        if executable is not self._measured:
            self._prefer(variant, executable)
        return self._run(args)

    def _left_out(self, variant: Variant, args: list[Any], *, alone: bool) -> Sequence[Any] | None:
        """Run uncaptured a call of a variant that was decided not to be captured; None, with nothing done, if that is
        over, or if the call is of another one."""
        known = variant.left_out is not None and variant.left_out.grants(args, alone=alone)
        return self._uncaptured(args) if known else None

    def _prefer(self, variant: Variant, executable: Executable) -> None:
        """Try ``executable`` first from now on, unless calls have to be told apart by the bits of a float."""
        self._variants.used(variant)
        if executable is not self._measured:
            self._spoil()
            self._measured = executable if isinstance(executable, Measured) and not self._off else None
        plain = self._key is not None and self._key.plain
        if plain and not self._options.verify_always and variant.executable is executable and not self._off:
            self._consume = _consuming(executable)

    def _miss(self, key: Hashable, args: list[Any], *, watched: bool = False) -> Sequence[Any]:
        """No capture fits: count the call, and capture if the variant ran often enough and nobody else captures.

        A call that is ``watched`` by a dispatch mode counts, but is never captured.
        """
        facts = signature(args, self._sensitive)
        if isinstance(facts, Refusal):
            if facts.reason not in self.record.refusals:
                self._note(facts)
            return self._uncaptured(args)
        variant = self._variants.find(key, facts)
        self.record.keys = self._variants.keys
        if watched or not variant.due or not self._lock.acquire(blocking=False):
            outputs = self._uncaptured(args)
            variant.ran += 1
            return outputs
        try:
            if self._recall(variant, args):
                return self._uncaptured(args)
            return self._capture(variant, args)
        finally:
            self._lock.release()
            disturb()

    def _spoil(self) -> None:
        """A call came in between: what is being timed of the variant that was used last does not count."""
        last = self._measured
        if last is not None:
            last.spoil()

    def _uncaptured(self, args: list[Any]) -> Sequence[Any]:
        """Run uncaptured a call that measured selection has not asked for."""
        self._spoil()
        return self._run(args)

    def _run(self, args: list[Any]) -> Sequence[Any]:
        outputs = self._fn(args)
        self._count_uncaptured()
        counters.UNCAPTURED.hit()
        if self.record.state == "cold":
            self.record.state = "warm"
        return outputs

    def _recall(self, variant: Variant, args: Sequence[Any]) -> bool:
        """Look up what was decided on a variant that is due; whether it is left out, by what an earlier trial decided.

        One that is due although it was left out is not asked about again: the program has changed since.
        """
        variant.entry = None if self._memory is None else self._memory.entry(args)
        if variant.entry is None or variant.left_out is not None or not variant.entry.decided_on(UNCAPTURED):
            return False
        variant.left_out = left_out(variant.entry, Site(self._driver, args, self._sensitive), self.record, variant.key)
        return True

    def _capture(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Capture and compare; the call is answered by the uncaptured function whatever comes of it."""
        made = self._try_capture(args)
        if isinstance(made, Refusal):
            self._refuse(variant, made)
            self._tell(made)
            return self._uncaptured(args)
        variant.written = made.written | self._hint
        made = self._with_copies(made, variant)
        site = Site(self._driver, args, made.program.recording.offset_sensitive)
        self._sensitive |= made.program.recording.offset_sensitive
        try:
            staged = tuple(each.argument for each in made.stageable)
            scope = replace(self._scope(variant, made.program), staged=staged)
            verdict = compare(self._fn, self._driver, made.executable, args, scope)
        except BaseException as error:
            made.executable.close()
            variant.ran = 0
            self._raised(args, error)
            raise
        args.clear()
        self._count_uncaptured()
        counters.UNCAPTURED.hit()
        for call in made.program.recording.python * verdict.runs:
            self.record.python_runs[call.name] += 1
        self._settle(variant, made, verdict, site)
        return verdict.outputs

    def _with_copies(self, made: Captured, variant: Variant) -> Captured:
        """``made``, with the inputs to be copied: those that the passes chose, or else those where it may pay, if that
        is measured. None where every replay is compared on the caller's own arguments."""
        if self._options.verify_always or self._driver.copy_cost is None:
            return replace(made, stageable=())
        if self._copied:
            return replace(made, stageable=asked_for(made.program, variant.written, self._copied))
        wanted = made.stageable if self._options.measure else ()
        return replace(made, stageable=tuple(each for each in wanted if each.argument not in variant.written))

    def _try_capture(self, args: list[Any]) -> Captured | Refusal:
        _capturing.append(get_ident())
        try:
            with tracing(self._fn, self._origins) as bodies:
                try:
                    return capture(self._fn, self._driver, args, self._options, self._slots, self._keepers)
                except Exception as error:  # noqa: BLE001 - operators raise anything; the call must be answered
                    return Refusal.of(error, blamed(error))
                finally:
                    self.record.python_runs.update(bodies)
        finally:
            _capturing.remove(get_ident())

    def _settle(self, variant: Variant, made: Captured, verdict: Verdict, site: Site) -> None:
        """Use the executable from now on, or close it."""
        if verdict.refusal is not None or self._off:
            made.executable.close()
            refusal = verdict.refusal or Refusal("closed")
            self._refuse(variant, refusal)
            if refusal.reason == "stateful-operator":
                self._tell(refusal)
            return
        variant.spread = verdict.spread
        variant.program = made.program if self._options.verify_always else None
        self._describe(made, verdict)
        used = self._under_selection(variant, made, verdict, site)
        for executable in self._variants.install(variant, used):
            self._consume = None
            executable.close()
        self._slots = made.table
        self._prefer(variant, used)
        if self._on_capture is not None:
            self._on_capture(made.program)

    def _under_selection(self, variant: Variant, made: Captured, verdict: Verdict, site: Site) -> Executable:
        """The executable as it is to be used: measured, with copied inputs, or as it is."""
        inputs, changed = made.stageable if verdict.staged else (), variant.left_out is not None
        variant.left_out = None
        if self._options.measure and not self._options.verify_always:
            return measured(
                made.executable,
                site,
                self.record,
                variant.key,
                variant.entry,
                changed=changed,
                inputs=inputs,
                asked=bool(self._copied),
                uncaptured=verdict.seconds,
            )
        return copying(made.executable, site, self.record, inputs) if inputs else made.executable

    def _scope(self, variant: Variant, program: Program | None) -> Scope:
        chosen = self._options.comparison_budget
        budget = self._driver.spare_bytes() if chosen is None else chosen
        return Scope(variant.written, self._sensitive, budget, variant.spread, program)

    def _refuse(self, variant: Variant, refusal: Refusal) -> None:
        """Leave a variant uncaptured. A replay that was wrong, or failures alone, end the whole region's captures."""
        self._note(refusal)
        if refusal.reason in _ONE_CALLS_FAULT:
            variant.postpone()
        else:
            variant.refusal = refusal
            self._failures += 1
        if refusal.reason in _REGIONS_FAULT:
            self._retire(refusal)
        elif not self._variants.captured:
            self.record.state, self.record.reason = "uncaptured", str(refusal)
            if self._failures >= (self._options.max_refusals if variant.key else 1):
                self._retire(refusal)

    def _tell(self, refusal: Refusal) -> None:
        """Have the operators that a refusal names cut, if it leaves the region without any capture."""
        if not refusal.nodes or self._variants.captured or self._on_refusal is None:
            return
        runs = ", ".join(f"{name} {count}" for name, count in sorted(self.record.python_runs.items()))
        said = f"{refusal.detail} (runs of Python bodies for captures: {runs})" if runs else refusal.detail
        self._on_refusal(replace(refusal, detail=said))

    def _raised(self, args: list[Any], error: BaseException) -> None:
        """A call raised: ``args`` is emptied as ever, and a replay that broke its contract is the region's last."""
        args.clear()
        self._spoil()
        if isinstance(error, ReplayError):
            refusal = Refusal("replay-failed", str(error))
            self._note(refusal)
            self._retire(refusal)

    def _retire(self, refusal: Refusal) -> None:
        self._off = True
        self._consume = self._measured = None
        self._slots = None
        self.record.state, self.record.reason = "uncaptured", str(refusal)
        for executable in self._variants.clear():
            executable.close()

    def _note(self, refusal: Refusal) -> None:
        """Count a refusal; the first of each reason is kept for reports."""
        counters.add("refused")
        counters.add(f"refused.{refusal.reason}")
        self.record.refusals.setdefault(refusal.reason, refusal)

    def _describe(self, made: Captured, verdict: Verdict) -> None:
        """Put a successful capture into the record."""
        counters.add("captures")
        record, program = self.record, made.program
        record.state, record.reason, record.captures = "replay", None, record.captures + 1
        record.slots, record.launches = len(program.slots), len(program.recording.launches)
        record.workspace_bytes = program.layout.nbytes
        notes = list(made.table.notes)
        if verdict.spread is not None:
            notes.append("non-deterministic: compared within a tolerance")
        if verdict.doubt is not None:
            notes.append(f"inputs are not copied, as such a replay was wrong: {verdict.doubt}")
        record.notes.extend(note for note in notes if note not in record.notes)


def _consuming(executable: Executable) -> Callable[[list[Any]], list[Any] | None]:
    """How ``executable`` replays arguments that nobody needs afterwards."""
    return getattr(executable, "consume", None) or executable.replay
