"""What a region asks which candidate to run: it waits for its turn, is on trial, then watches the decision.

The way in to measured selection. What a trial does is ``trial``'s business, what a candidate is the region's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock, get_ident

from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.queue import TRIALS, TrialQueue
from pygraph.runtime.selection.records import TELLING, Decided, Grant, TrialReport
from pygraph.runtime.selection.trial import Trial
from pygraph.runtime.selection.watch import Watch

__all__ = ["FOREVER", "Selector", "past_watch"]

FOREVER = 1 << 62
"""Calls in a grant that is never asked about again."""

_WAIT = 64
"""Calls between two questions whether it is this region's turn."""
_MAX_SWITCHES = 3
"""Changes of thread in one trial that are taken for a caller that moves; more are callers that interleave."""


def past_watch(past: Decided, options: SelectionOptions) -> Watch:
    """A watch on what was decided before: it compares with the pace of then, where that is known."""
    return Watch(options.drift, None if past.pace is None else past.pace * options.period)


class Selector:
    """Selects among ``candidates``, in the model's order, by the wall time of the program that calls the region.

    The region keeps a count of the calls that it may still make. Whenever that is used up, it calls ``step`` on the
    entry of a call, before anything of the call is submitted, and gets the candidate to use and a new count:

        self._left -= 1
        if self._left < 0:
            self._active, calls = self._selector.step()
            self._left = calls - 1

    ``clock`` gives seconds, ``drain`` waits until the device has done all that was submitted, ``seed`` makes the order
    of blocks repeatable, ``expected`` has the seconds that a call of a candidate takes at least, where that is known.
    ``step`` raises what ``drain`` raises; the region then stays with the model's choice.
    Thread-safe; a thread that comes while another one steps gets the last decision for one call.

    ``past`` is what was decided on the same candidates before, maybe by another process: it is used and watched without
    a trial, or, if the program has ``changed`` since, until there is one. ``remember`` is told what is to outlive this
    process, at the end of a trial and once more when the pace after it is known; it must not raise.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        clock: Callable[[], float],
        drain: Callable[[], None],
        *,
        seed: int = 0,
        options: SelectionOptions | None = None,
        queue: TrialQueue = TRIALS,
        past: Decided | None = None,
        changed: bool = False,
        remember: Callable[[Decided], None] | None = None,
        expected: Mapping[str, float] | None = None,
    ) -> None:
        self.reports: list[TrialReport] = []
        self.decision = candidates[0] if past is None else past.decision
        self._candidates = tuple(candidates)
        self._clock, self._drain, self._seed = clock, drain, seed
        self._options = options or SelectionOptions()
        self._queue, self._token = queue, object()
        self._lock = Lock()
        self._trial: Trial | None = None
        self._watch: Watch | None = None
        self._thread = 0
        self._switches = 0
        self._past, self._remember = past, remember
        self._expected = expected
        self._known = None if past is None else past.per_call.get(past.decision)
        self._spent = 0 if past is None else past.trials
        self._false_alarms = 0
        self._withdrawn: set[str] = set()
        self._settled = len(candidates) == 1 or self._spent >= self._options.trials
        if past is not None and not changed:
            self._watch = past_watch(past, self._options)

    def step(self) -> Grant:
        """The candidate for the next calls, and how many of them, this one included."""
        if not self._lock.acquire(blocking=False):
            self.spoil()
            return Grant(self.decision, 1)
        try:
            return self._step()
        except BaseException:
            self._stop("drain-failed", "waiting for the device raised")
            raise
        finally:
            self._lock.release()

    def spoil(self) -> None:
        """The calls of the last grant did not all run as granted (a capture, another size): they do not count."""
        trial = self._trial
        if trial is not None:
            trial.spoil()

    def withdraw(self, candidate: str) -> None:
        """Leave ``candidate`` out of the trials to come: in this process there is nothing to it. A decision stays."""
        self._withdrawn.add(candidate)

    def close(self) -> None:
        """End what is going on, for good: the decision stays as it is."""
        with self._lock:
            self._stop("closed", "stopped from outside")

    def _step(self) -> Grant:
        if self._settled:
            return Grant(self.decision, FOREVER)
        if self._watch is not None and not self._watch.observe(self._clock()):
            self._note_pace(self._watch)
            return Grant(self.decision, self._options.period)
        self._watch = None
        if not self._queue.enter(self._token):
            if self._trial is not None:
                self._trial.abort("stalled", "too few calls while other regions waited for their trial")
                self._conclude(self._trial)
            return Grant(self.decision, _WAIT)
        grant = self._on_trial()
        return grant or Grant(self.decision, FOREVER if self._settled else self._options.period)

    def _on_trial(self) -> Grant | None:
        """The next step of the trial; None if that was the last one."""
        trial = self._trial or self._start()
        self._check_thread(trial)
        grant = trial.step()
        if grant is None:
            self._conclude(trial)
        return grant

    def _start(self) -> Trial:
        others = [name for name in self._candidates if name != self.decision and name not in self._withdrawn]
        number = self._spent
        self._trial = Trial(
            [self.decision, *others],
            self._clock,
            self._drain,
            options=self._options,
            seed=self._seed + number,
            share=0.5**number,
            earlier=self._queue.charged,
            expected=self._expected,
            known=self._known,
        )
        self._thread, self._switches = get_ident(), 0
        return self._trial

    def _check_thread(self, trial: Trial) -> None:
        """Calls that come from several threads interleaved have no time per call."""
        thread = get_ident()
        if thread == self._thread:
            return
        self._thread = thread
        self._switches += 1
        trial.spoil()
        if self._switches > _MAX_SWITCHES:
            trial.abort("threads", "calls came from several threads")

    def _conclude(self, trial: Trial) -> None:
        """Use what was decided, let the next region have its trial, and watch; or settle, if that was the last."""
        self._queue.leave(self._token)
        self._trial = None
        if trial.report is None:
            return
        report, now = trial.report, self._clock()
        self.reports.append(report)
        self._queue.charge(now, report.lost)
        self.decision = report.decision
        if report.reason == "unchanged":
            self._false_alarms += 1
        else:
            self._spent += 1
            self._past = None  # of another pace, at best
            self._known = report.per_call.get(report.decision)
        limit = self._options.trials
        self._settled = limit <= max(self._spent, self._false_alarms) or report.reason == "threads"
        if report.reason in TELLING:
            self._keep(self._decided(report))
        if not self._settled:
            self._watch = Watch(self._options.drift)
            self._watch.observe(now)

    def _decided(self, report: TrialReport) -> Decided:
        return Decided(
            self._candidates,
            report.decision,
            report.reason,
            report.detail,
            dict(report.per_call),
            report.samples,
            self._spent,
        )

    def _note_pace(self, watch: Watch) -> None:
        """Remember what the watch compares with, once it knows."""
        if self._past is not None and self._past.pace is None and watch.reference is not None:
            self._keep(replace(self._past, pace=watch.reference / self._options.period))

    def _keep(self, decided: Decided) -> None:
        self._past = decided
        if self._remember is not None:
            self._remember(decided)

    def _stop(self, reason: str, detail: str) -> None:
        trial = self._trial
        if trial is not None:
            trial.abort(reason, detail)
            self._conclude(trial)
        self._queue.leave(self._token)
        self._settled, self._watch = True, None
