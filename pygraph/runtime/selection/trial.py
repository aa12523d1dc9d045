"""One trial: blocks of a region's real calls under each candidate, in rounds of random order, until one is decided on.

It says which candidate the next calls use and reads the clock in between; the calls are the region's, and when there
is a trial at all is the selector's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from random import Random

from pygraph.runtime.selection.ledger import BASELINE_CALLS, BASELINE_GROUPS, Ledger
from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.records import Block, Grant, Look, Standing, TrialReport

__all__ = ["Trial"]

_FIRST = 16
"""Calls in the blocks of the first round, unless a candidate is so slow that fewer have to do."""
_GROWTH = 4
_EARLY_SHARE, _SHARE = 5.0, 3.0
"""A round may lose one part in so many of what the budget has left: of the first four rounds, of the others."""
_PROBES = 6
"""Single calls of a candidate, of which two have to run as asked for."""
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
    budget of ``options``. ``step`` is called on the entry of a call whenever the calls of the last grant are used up;
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
    ) -> None:
        self.report: TrialReport | None = None
        self._candidates = tuple(candidates)
        self._left = list(candidates)
        self._clock, self._drain, self._options = clock, drain, options
        self._seed, self._random = seed, Random(seed)
        self._ledger = Ledger(candidates, options.fraction * options.horizon * share)
        self._looks: list[Look] = []
        self._dropped: list[str] = []
        self._row = 0
        self._cap = options.longest
        self._spent = 0.0
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
        self._drain()
        start = self._clock()
        self._drain()
        self._ended = self._clock()
        self._ledger.idle_drain = self._ended - start
        for name in self._candidates:
            yield from self._probe(name)
        for _ in range(2 * self._options.looks[-1]):
            if not self._go_on():
                return
            yield from self._round(self._length())
        self._finish("undecided", f"no difference was certain after {len(self._ledger.rounds)} rounds")

    def _baseline(self) -> _Steps:
        """Time the incumbent as it is, without drains: how long a call takes, about, and how much that varies."""
        name, ledger = self._candidates[0], self._ledger
        start = self._clock()
        for _ in range(BASELINE_GROUPS):
            yield Grant(name, BASELINE_CALLS)
            end = self._clock()
            seconds = max(end - start, _LEAST)
            ledger.add(Block(name, "baseline", ledger.calls, 0, BASELINE_CALLS, seconds, 0.0))
            start = end

    def _probe(self, name: str) -> _Steps:
        """Two single calls, so that one that is much too slow is found at the cost of a call or two."""
        ledger = self._ledger
        probed = 0
        for _ in range(_PROBES):
            block = yield from self._block(name, "probe", 0, 1)
            probed += block.kept
            slow = name != self._candidates[0] and probed > 0
            if slow and ledger.lost + ledger.excess([name]) + ledger.drains([name]) > ledger.budget:
                self._drop(name)
                return
            if probed == 2:
                return
        self._finish("disturbed", f"calls with {name} did not run as asked for")

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
            self._look(self._options.alpha / len(self._options.looks))

    def _block(self, name: str, purpose: str, dropped: int, calls: int) -> Generator[Grant, None, Block]:
        """Run and time a block. The device is drained on entry, and again at the end."""
        self._spoiled = False
        began, tail = self._ledger.calls, self._ledger.tail(name) if dropped else 0.0
        start = self._clock()
        self._ledger.overhead += start - self._ended
        if dropped:
            yield Grant(name, dropped)
            start = self._clock()
        yield Grant(name, calls)
        submitted = self._clock()
        self._drain()
        end = self._ended = self._clock()
        idle = min(self._ledger.idle_drain, end - submitted)
        seconds = max(end - start - idle, _LEAST)
        block = Block(name, purpose, began, dropped, calls, seconds, end - submitted - idle, tail)
        if self._spoiled or (purpose == "round" and self._ledger.strays(block)):
            block = replace(block, kept=False)
        self._ledger.add(block)
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

        They grow from round to round, and are few where a candidate is so slow that the round would lose much.
        """
        rounds = len(self._ledger.rounds)
        wanted = min(self._cap, _FIRST * _GROWTH ** min(rounds, 8))
        excess = self._ledger.risk(self._left)
        room = (self._ledger.budget - self._ledger.exposure(self._left)) / (_EARLY_SHARE if rounds < 4 else _SHARE)
        if excess * wanted > room:
            wanted = max(2, int(room / excess))
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
        ledger = self._ledger
        return ledger.exposure(self._left) + 3 * ledger.risk(self._left) + ledger.drains(self._left) <= ledger.budget

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
                    return f"{name} takes {gain:.1%} longer than {look.leader}, at least {least:.1%}"
        return name

    def _look(self, alpha: float) -> None:
        """Eliminate what is slower than the leader beyond chance; keep the model's choice if nothing is much faster."""
        self._spent += alpha
        pairs = len(self._candidates) * (len(self._candidates) - 1) // 2
        side = alpha / pairs / 2
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
        self.report = TrialReport(
            candidates=self._candidates,
            decision=self._choice(),
            reason=reason,
            detail=detail,
            per_call={block.candidate: ledger.estimate(block.candidate) for block in ledger.blocks},
            lost=ledger.lost,
            budget=ledger.budget,
            calls=ledger.calls,
            seed=self._seed,
            dropped=tuple(self._dropped),
            blocks=tuple(ledger.blocks),
            looks=tuple(self._looks),
        )
