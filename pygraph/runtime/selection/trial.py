"""One trial: blocks of a region's real calls under each candidate, in rounds of random order, until one is decided on.

It says which candidate the next calls use and reads the clock in between; the calls are the region's, and when there
is a trial at all is the selector's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from random import Random

from pygraph.runtime.selection.ledger import Ledger, Outlook
from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.records import TELLING, Block, Grant, Look, Standing, TrialReport
from pygraph.runtime.selection.statistics import least_of_cold

__all__ = ["Trial"]

_GROUP = 2
"""Calls between two looks before any block is timed: even, so that callers of period 2 look steady."""
_SETTLING, _PATIENCE = 8, 24
"""Groups of calls that run before anything is timed, and how many at most until nothing interferes with one."""
_BASELINES = (8, 8, 4, 2, 1, 1, 1)
"""Groups in the baseline, fewer where something interferes again and again."""
_REST = 64
"""Calls between two looks whether earlier trials' losses are long enough ago."""
_FIRST = 16
"""Calls in the blocks of the first round, unless a candidate is so slow that fewer have to do."""
_GROWTH = 4
_EARLY_SHARE, _SHARE = 5.0, 3.0
"""A round may lose one part in so many of what the budget has left: of the first four rounds, of the others."""
_PROBES = 6
"""Single calls of a candidate, of which two have to run as asked for."""
_COLD_LOOKS = 0.05
"""The part of the chance of being wrong that goes to looks at single calls."""
_LEAST = 1e-9
"""Seconds that any block takes at least: clocks are coarse."""
_LENGTHS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 64, 80, 96, 100, 120)
"""Calls in a block: multiples of the periods that callers have (accumulated gradients, a sync now and then)."""
_CAP = 16
"""Pauses make blocks shorter, but not than this."""

_Steps = Generator[Grant, None, None]


class Trial:
    """A trial of ``candidates``, in the model's order: the first is its choice.

    ``clock`` gives seconds; ``drain`` waits until the device has done everything submitted. ``share`` scales the
    budget of ``options``; what other trials have lost since a time, in seconds, as ``earlier`` tells, is taken off it.
    ``expected``: seconds that a call of a candidate takes at least. ``known``: seconds per call of the first candidate
    in an earlier trial; where it still takes as long, nothing is tried.
    ``step`` is called on the entry of a call whenever the calls of the last grant are used up;
    it gives None once the trial is over, and ``report`` is there from then on. What ``drain`` raises, ``step`` raises.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        clock: Callable[[], float],
        drain: Callable[[], None],
        *,
        options: SelectionOptions,
        seed: int,
        share: float = 1.0,
        earlier: Callable[[float], float] | None = None,
        expected: Mapping[str, float] | None = None,
        known: float | None = None,
    ) -> None:
        self.report: TrialReport | None = None
        self._candidates = tuple(candidates)
        self._left = list(candidates)
        self._clock, self._drain, self._options = clock, drain, options
        self._seed, self._random = seed, Random(seed)
        self._ledger = Ledger(candidates, options.fraction * options.horizon * share, expected)
        self._earlier, self._known = earlier, known
        self._looks: list[Look] = []
        self._dropped: list[str] = []
        self._outlook = Outlook(0.0, 0.0, 0.0)
        self._row = 0
        self._cap = options.longest
        self._pairs = max(1, len(candidates) * (len(candidates) - 1) // 2)
        self._spent = _COLD_LOOKS * options.alpha
        self._side = self._spent / 2 / self._pairs  # there are two looks at single calls of a candidate
        self._part = (options.alpha - self._spent) / len(options.looks)
        self._spoiled = False
        self._ended = 0.0
        self._steps = self._run()

    def step(self) -> Grant | None:
        """Which candidate the next calls use, and how many of them, this one included; None once it is decided."""
        return next(self._steps, None) if self.report is None else None

    def spoil(self) -> None:
        """Calls since the last step were not as granted: what they took does not count."""
        self._spoiled = True

    def abort(self, reason: str, detail: str = "") -> None:
        """End the trial on the model's choice of the candidates that are left. Nothing happens if it is over."""
        if self.report is None:
            self._finish(reason, detail or "stopped from outside")

    def _run(self) -> _Steps:
        yield from self._baseline()
        if self.report is None and self._unchanged():
            self._finish("unchanged", f"calls with {self._candidates[0]} take as long as in the trial before")
        if self.report is None:
            yield from self._rest()
        for name in self._candidates[1:]:
            if self.report is None:
                yield from self._probe(name)
        for _ in range(2 * self._options.looks[-1]):
            if not self._go_on():
                return
            yield from self._round(self._length())
        if self.report is None:
            self._finish("undecided", f"no difference was certain after {len(self._ledger.rounds)} rounds")

    def _baseline(self) -> _Steps:
        """Time the incumbent in many calls in a row, and in single ones that show what draining takes."""
        name, found = self._candidates[0], None
        drains, settling = 0, _SETTLING
        for groups in _BASELINES:
            if not (yield from self._calm(settling)):
                break
            found, drains, settling = (yield from self._window(groups)), drains + 2, 1
            if found is not None:
                break
        if found is None:
            self._finish("disturbed", f"calls with {name} never came in a row: others came in between")
            return
        yield from self._probe(name)
        if self.report is None:
            self._ledger.open(*found, drains)

    def _calls(self, calls: int) -> Generator[Grant, None, bool]:
        """Run the incumbent; whether all calls were as granted."""
        self._spoiled = False
        yield Grant(self._candidates[0], calls)
        self._ledger.calls += calls
        return not self._spoiled

    def _calm(self, settling: int) -> Generator[Grant, None, bool]:
        """Wait, at no cost, until the incumbent is warm and undisturbed; False where others take turns with it."""
        for group in range(1, _PATIENCE + 1):
            calm = yield from self._calls(_GROUP)
            if calm and group >= settling:
                return True
        return False

    def _window(self, groups: int) -> Generator[Grant, None, tuple[Block, list[float]] | None]:
        """Calls in a row between two drains, their first one dropped, and the seconds of each group of them; None if
        they were disturbed."""
        self._drain()
        start = self._clock()
        self._drain()
        entered = self._clock()
        self._ledger.idle_drain = entered - start
        began = self._ledger.calls
        times: list[float] = []
        clean = yield from self._calls(1)
        first = submitted = self._clock()
        while clean and len(times) < groups:
            clean = yield from self._calls(_GROUP)
            now = self._clock()
            times.append(max(now - submitted, _LEAST))
            submitted = now
        self._drain()
        end = self._ended = self._clock()
        if not clean or self._spoiled:
            return None
        idle = min(self._ledger.idle_drain, end - submitted)
        seconds = max(end - first - idle, _LEAST)
        waited, lead = end - submitted - idle, first - entered
        return Block(self._candidates[0], "baseline", began, 1, groups * _GROUP, seconds, waited, lead), times

    def _unchanged(self) -> bool:
        """Whether the incumbent takes as long as it did in the trial before, both timed between drains: then it is
        what the caller does between calls that has changed, and says nothing of the candidates."""
        known, drift = self._known, self._options.drift
        return known is not None and 1 / drift <= self._ledger.base / known <= drift

    def _rest(self) -> _Steps:
        """Wait while more than half of the budget went to other trials of late; what they lost is taken off it."""
        ledger, options, earlier = self._ledger, self._options, self._earlier
        if earlier is None:
            return
        whole, rested = ledger.budget, 0
        while True:
            ledger.debt = earlier(self._clock() - options.horizon * ledger.base)
            if ledger.debt <= whole / 2 or rested > options.horizon:
                break
            yield from self._calls(_REST)
            rested += _REST
        if rested:
            self._drain()
            ledger.drained()
        self._ended = self._clock()

    def _probe(self, name: str) -> _Steps:
        """Two single calls, so that one that is much too slow is found at the cost of a call or two, or of none."""
        ledger, incumbent = self._ledger, name == self._candidates[0]
        probed, foreseen = 0, None if incumbent else ledger.foreseen(name)
        if foreseen is not None and foreseen[1] > 0:
            self._leave(name, *foreseen)
            return
        for _ in range(_PROBES):
            if not incumbent and not ledger.affords_call(name):
                self._drop(name)
                return
            block = yield from self._block(name, "probe", 0, 1)
            probed += block.kept
            if block.kept and not incumbent:
                self._leave_if_much_slower(name)
            if probed == 2 or name not in self._left:
                return
        self._finish("disturbed", f"calls with {name} did not run as asked for")

    def _leave_if_much_slower(self, name: str) -> None:
        """Eliminate what single calls show to be slower than the incumbent beyond doubt: rounds would only cost."""
        ratios = self._ledger.single(name)
        least = least_of_cold(ratios, self._ledger.noise, self._side) if len(ratios) > 1 else -math.inf
        if least > 0:
            self._leave(name, sum(ratios) / len(ratios), least)

    def _leave(self, name: str, ratio: float, least: float) -> None:
        """Eliminate ``name`` before any round, with its log-ratio to the incumbent and the least that it may be."""
        standing = Standing(name, ratio, least, math.inf)
        self._looks.append(Look(0, self._side, self._candidates[0], (standing,), (name,)))
        self._left.remove(name)

    def _round(self, calls: int) -> _Steps:
        """A block of each candidate left, in random order; it counts if each of them does."""
        order = self._random.sample(self._left, len(self._left))
        blocks = {}
        for name in order:
            block = yield from self._block(name, "round", 1, calls)
            blocks[name] = block
            if not block.kept or self._ledger.lost > self._ledger.budget:
                break
        clean = len(blocks) == len(order) and all(block.kept for block in blocks.values())
        self._adapt(clean, calls)
        if not clean:
            return
        self._ledger.close_round(blocks)
        if len(self._ledger.rounds) in self._options.looks:
            self._look(self._part)

    def _block(self, name: str, purpose: str, dropped: int, calls: int) -> Generator[Grant, None, Block]:
        """Run and time a block. The device is drained on entry, and again at the end."""
        self._spoiled = False
        began = self._ledger.calls
        start = entered = self._clock()
        self._ledger.thought(entered - self._ended)
        if dropped:
            yield Grant(name, dropped)
            start = self._clock()
        yield Grant(name, calls)
        submitted = self._clock()
        self._drain()
        end = self._ended = self._clock()
        idle = min(self._ledger.idle_drain, end - submitted)
        seconds = max(end - start - idle, _LEAST)
        waited, lead = end - submitted - idle, start - entered
        tail = self._ledger.tail(name, began, lead) if dropped else 0.0
        block = Block(name, purpose, began, dropped, calls, seconds, waited, lead, tail)
        if self._spoiled or (purpose == "round" and self._ledger.strays(block)):
            block = replace(block, kept=False)
        self._ledger.add(block, end - entered)
        return block

    def _adapt(self, clean: bool, calls: int) -> None:
        """Blocks that are not free of pauses have to be shorter; they grow again when pauses become rare."""
        self._row = self._row + 1 if clean else 0
        if not clean:
            self._cap = max(_CAP, calls // 2)
        elif self._row % 4 == 0:
            self._cap = min(self._options.longest, self._cap * 2)

    def _length(self) -> int:
        """Calls for the blocks of the next round: even, since many callers have period 2, and chosen at random
        among some that are multiples of other periods.

        They grow from round to round, and are few where a candidate is so slow that the round would lose much; but not
        so few that most of what it loses are its ends.
        """
        rounds, (left, risk, ends) = len(self._ledger.rounds), self._outlook
        wanted = min(self._cap, _FIRST * _GROWTH ** min(rounds, 8))
        room = max(left / (_EARLY_SHARE if rounds < 4 else _SHARE), min(ends, left / 2))
        if risk * wanted > room:
            wanted = max(2, int(room / risk))
        fitting = [length for length in _LENGTHS if wanted * 0.6 <= length <= wanted]
        return self._random.choice(fitting) if fitting else wanted // 2 * 2

    def _go_on(self) -> bool:
        """Whether there is something left to find out, and something to lose by it."""
        if self.report is not None:
            return False
        while len(self._left) > 1 and not self._affordable():
            costly = max(self._left, key=self._ledger.estimate)
            if len(self._left) == 2 or costly == self._left[0]:
                self._out_of_budget()
                return False
            self._drop(costly)
        if len(self._left) == 1:
            self._settle()
        return self.report is None

    def _affordable(self) -> bool:
        """Whether the shortest round stays within the budget."""
        self._outlook = self._ledger.outlook(self._left)
        return 3 * self._outlook.risk <= self._outlook.left

    def _drop(self, name: str) -> None:
        self._left.remove(name)
        self._dropped.append(name)

    def _out_of_budget(self) -> None:
        """A last look, with all that is left of alpha, and the model's choice if that shows nothing."""
        if len(self._ledger.rounds) >= 2:
            self._look(self._options.alpha - self._spent)
        if self.report is not None:
            return
        if len(self._left) == 1:
            self._settle()
            return
        self._finish("budget", f"the budget was spent after {len(self._ledger.rounds)} rounds, with nothing certain")

    def _settle(self) -> None:
        """One candidate is left: it is faster than those that were eliminated; of those dropped nobody knows."""
        beaten = [name for name in self._candidates if name not in self._left and name not in self._dropped]
        if not beaten:
            self._finish("budget", f"too costly to be tried: {', '.join(self._dropped)}")
            return
        self._finish("faster", "; ".join(self._verdict(name) for name in beaten))

    def _verdict(self, name: str) -> str:
        for look in reversed(self._looks):
            for standing in look.standings:
                if standing.candidate == name and name in look.eliminated:
                    gain, least = math.expm1(standing.ratio), math.expm1(standing.least)
                    tried = any(block.candidate == name for block in self._ledger.blocks)
                    told = "" if tried else ", by the run before the trial"
                    return f"{name} takes {gain:.1%} longer than {look.leader}, at least {least:.1%}{told}"
        return name

    def _look(self, alpha: float) -> None:
        """Eliminate what is slower than the leader beyond chance; keep the model's choice if nothing is much faster."""
        self._spent += alpha
        side = alpha / self._pairs / 2
        first = self._left[0]
        leader = min(self._left, key=lambda name: 0.0 if name == first else self._ledger.compare(name, first).mean)
        standings = tuple(self._standing(name, leader, side) for name in self._left if name != leader)
        slower = tuple(standing.candidate for standing in standings if standing.least > 0)
        self._looks.append(Look(len(self._ledger.rounds), side, leader, standings, slower))
        self._left = [name for name in self._left if name not in slower]
        if len(self._left) == 1:
            self._settle()
        elif all(self._no_gain(name) for name in self._left[1:]):
            margin = f"{self._options.margin:.1%}"
            self._finish("equivalent", f"nothing is faster than {self._left[0]} by more than {margin}")

    def _standing(self, name: str, leader: str, side: float) -> Standing:
        found = self._ledger.compare(name, leader)
        return Standing(name, found.mean, found.least(side), found.most(side))

    def _no_gain(self, name: str) -> bool:
        """Whether ``name`` is not faster than the model's choice by more than the margin, but for a chance of 1 %."""
        return self._ledger.compare(self._left[0], name).most(0.01) < self._options.margin

    def _choice(self) -> str:
        """The model's choice, unless it was eliminated: then what looks fastest of what is left."""
        if self._left[0] == self._candidates[0]:
            return self._left[0]
        return min(self._left, key=self._ledger.estimate)

    def _finish(self, reason: str, detail: str) -> None:
        ledger = self._ledger
        if reason in TELLING:
            ledger.thought(self._clock() - self._ended)
        self.report = TrialReport(
            candidates=self._candidates,
            decision=self._choice(),
            reason=reason,
            detail=detail,
            per_call={block.candidate: ledger.estimate(block.candidate) for block in ledger.blocks if ledger.base},
            lost=ledger.lost,
            budget=ledger.budget,
            calls=ledger.calls,
            seed=self._seed,
            dropped=tuple(self._dropped),
            blocks=tuple(ledger.blocks),
            looks=tuple(self._looks),
            overhead=ledger.overhead,
        )
