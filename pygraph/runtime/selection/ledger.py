"""The ledger of a trial: what each candidate's calls cost, what the trial has lost by that, what it may lose yet.

All in seconds. Which blocks are run, and what follows from them, is the trial's business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from pygraph.runtime.selection.records import Block
from pygraph.runtime.selection.statistics import Difference, difference, lower_median, mild_median, spread

__all__ = ["Ledger", "Outlook"]

_STRAY, _STRAY_DEVIATIONS = 0.1, 6.0
"""A block that takes longer than its candidate's others by this fraction, and by so many standard deviations, holds a
stray pause."""
_STRAY_EARLY = 2.0
"""The same as a factor, while only single calls tell what is usual."""
_RECENT = 5
"""Blocks of a candidate that tell what is usual: programs drift."""
_LEAST_NOISE, _MOST_NOISE = 0.03, 0.15
_ENOUGH_GROUPS = 4
"""Groups of calls below which their spread tells nothing."""
_COLD = 2.0
"""A first call may take so many times as long as a second one."""
_HITCH = 5e-4
"""Seconds of a run before the trial that may be no part of it: garbage is collected, memory asked of the device."""
_BRIEF = 1e-9
"""Seconds that anything takes at least."""
_BEYOND = 4.0
"""A run before the trial takes at least one part in so many of what it took: it may have been cold, and noisy."""


class Outlook(NamedTuple):
    """What the next round may lose, in seconds: ``left`` of the budget for its calls, by a standard error at least;
    ``risk``, what a call of each candidate may lose, by as much at most; and ``ends``, what the round loses however
    short it is, and the end of the trial."""

    left: float
    risk: float
    ends: float


class Ledger:
    """Accounts for a trial of ``candidates``, the incumbent first, that may lose the time of ``allowed`` calls.

    ``expected``: seconds that a call of a candidate takes at least, as far as is known beforehand. ``idle_drain``:
    seconds that a drain of an idle device takes. ``overhead``: those that the trial's own work took. ``debt``: those of
    the budget that other trials have lost lately. ``noise``: the standard deviation of the log-ratio of two calls.
    """

    def __init__(self, candidates: Sequence[str], allowed: float, expected: Mapping[str, float] | None = None) -> None:
        self.blocks: list[Block] = []
        self.rounds: list[dict[str, Block]] = []
        self.calls = 0
        self.idle_drain = 0.0
        self.overhead = 0.0
        self.debt = 0.0
        self.noise = _MOST_NOISE
        self.base = 0.0
        self._candidates = tuple(candidates)
        self._allowed = allowed
        self._expected = dict(expected or {})
        self._fill = 0.0
        self._baseline, self._window = 0.0, 0
        self._probes: dict[str, list[Block]] = {name: [] for name in candidates}
        self._probing: dict[str, list[float]] = {name: [] for name in candidates}
        self._thoughts: list[float] = []
        self._draining = 0.0
        self._drained: dict[str, list[float]] = {name: [] for name in candidates}
        self._timed: dict[str, list[tuple[int, float]]] = {name: [] for name in candidates}
        self._run: dict[str, int] = dict.fromkeys(candidates, 0)
        self._astray: dict[str, int] = {}
        self._ratios: dict[str, float] = {}
        self._compared: dict[tuple[str, str], Difference] = {}
        self._scatter = 0.0

    def open(self, baseline: Block, groups: Sequence[float], drains: int) -> None:
        """Enter the ``baseline``, once single calls of the incumbent have shown what a drain waits; ``groups``: seconds
        of equal parts of its window; ``drains``: how many there were by then, but for those of single calls.

        A single call between two drains takes no less than one of many, so that a pause in the baseline makes the
        budget no larger than by what host and device overlap. What ran so far ran anyway: only its drains are lost.
        """
        incumbent = self._candidates[0]
        baseline = replace(baseline, tail=self.tail(incumbent, baseline.start, baseline.lead))
        probes = self._probes[incumbent]
        single = sum(probe.seconds for probe in probes) / len(probes)
        self._baseline = self.base = min(baseline.per_call, single)
        self._window = baseline.calls
        self.blocks.insert(0, replace(baseline, kept=baseline.per_call <= single))
        self._fill = max(0.0, min(probe.seconds for probe in probes) - self.base)
        self._ratios[incumbent] = 1.0
        if len(groups) >= _ENOUGH_GROUPS:
            self.noise = _noise(groups, baseline.calls // len(groups))
        self._draining += drains * self._drain(incumbent)

    def thought(self, seconds: float) -> None:
        """Enter what the trial's own work took before a block, or at the end."""
        self.overhead += seconds
        self._thoughts.append(seconds)

    def _thinking(self, blocks: int) -> float:
        """Seconds that the trial's own work before so many blocks takes. There is more of it after each round than
        within, and the more rounds there were."""
        return blocks * max(self._thoughts[-blocks:], default=0.0)

    def drained(self) -> None:
        """Enter a drain after calls of the incumbent that are in no block."""
        self._draining += self._drain(self._candidates[0])

    def add(self, block: Block, elapsed: float) -> None:
        """Enter a probe or a block of a round, whatever became of it; ``elapsed``: seconds between its drains."""
        name = block.candidate
        self.blocks.append(block)
        self.calls += block.calls + block.dropped
        if block.purpose == "probe":
            if block.kept:
                self._probes[name].append(block)
            self._probing[name].append(elapsed if block.kept else self._single(name))
            if block.kept and name in self._candidates[1:]:
                self._ratios[name] = self._probed(name) / self.base
            return
        self._run[name] += block.calls + block.dropped
        if block.kept:
            self._timed[name].append((block.calls, block.per_call))
            self._drained[name].append(self._filled(block, elapsed))
            self.base = self._per_call()
        self._draining += self._drained[name][-1] if block.kept else self._drain(name)

    def close_round(self, blocks: dict[str, Block]) -> None:
        """Enter a round whose blocks all count. Ratios are taken within rounds, since programs change between them."""
        self.rounds.append(blocks)
        self._compared.clear()
        self._scatter = self._scattered()
        reference = next(name for name in self._candidates if name in blocks)
        for name in blocks:
            if name != reference:
                self._ratios[name] = self._ratios[reference] * self._ratio(name, reference)

    def _ratio(self, name: str, other: str) -> float:
        """Of many rounds the mean ratio, of few the middle one, of one and the probes the milder one."""
        shared = [blocks for blocks in self.rounds if name in blocks and other in blocks]
        if len(shared) >= 4:
            return math.exp(self.compare(name, other).mean)
        ratios = [blocks[name].per_call / blocks[other].per_call for blocks in shared]
        if len(ratios) == 1:
            ratios.append(self._probed(name) / self._probed(other))
        return mild_median(ratios)

    def compare(self, name: str, other: str) -> Difference:
        """The log-ratio of the times of ``name`` and ``other``, over the rounds that both ran in."""
        found = self._compared.get((name, other))
        if found is None:
            pairs = [(blocks[name], blocks[other]) for blocks in self.rounds if name in blocks and other in blocks]
            found = self._compared[name, other] = difference(
                [_log_ratio(one, two) for one, two in pairs],
                [one.calls for one, _ in pairs],
                [one.doubt + two.doubt for one, two in pairs],
                self.noise,
            )
            self._compared[other, name] = Difference(-found.mean, found.error, found.freedom, found.allowance)
        return found

    def strays(self, block: Block) -> bool:
        """Whether ``block`` took so much longer than its candidate's others that something else must have happened.

        Never three times in a row: then it is the candidate that has become slower.
        """
        recent = self._timed[block.candidate][-_RECENT:]
        if not recent and block.candidate == self._candidates[0] and self.blocks[0].kept:
            recent = [(self._window, self._baseline)]
        limit = _STRAY_EARLY * max(probe.per_call for probe in self._probes[block.candidate])
        if recent:
            shorter = min([block.calls, *(calls for calls, _ in recent)])
            deviation = max(self.noise, self._scatter) / math.sqrt(2 * shorter)
            limit = lower_median([seconds for _, seconds in recent]) * (1 + max(_STRAY, _STRAY_DEVIATIONS * deviation))
        row = self._astray.get(block.candidate, 0) + 1 if block.per_call > limit else 0
        self._astray[block.candidate] = row % 3
        return row % 3 > 0

    def _per_call(self) -> float:
        """The incumbent's seconds per call: of the calls in its blocks and in the baseline, the lower median."""
        blocks = sorted([(self._baseline, self._window), *((took, n) for n, took in self._timed[self._candidates[0]])])
        run = list(itertools.accumulate(calls for _, calls in blocks))
        return next(took for (took, _), sofar in zip(blocks, run, strict=True) if 2 * sofar >= run[-1])

    def estimate(self, candidate: str) -> float:
        """Seconds per call of ``candidate``, on the scale of the incumbent's; of one that has not run, the latter's."""
        return self.base * self._ratios.get(candidate, 1.0)

    def _probed(self, candidate: str) -> float:
        """Seconds per call as single ones tell: each fills and empties the device as one of the incumbent does, and
        takes no less than its host's or its device's part."""
        if candidate == self._candidates[0]:
            return self._baseline
        return min(max(probe.per_call, probe.seconds - self._fill) for probe in self._probes[candidate])

    def _single(self, candidate: str) -> float:
        """Seconds that a single call of ``candidate`` takes between two drains, as far as that is known."""
        probes, expected = self._probes[candidate], self._expected.get(candidate, 0.0)
        return max(probes[-1].seconds, expected) if probes else max(_COLD * expected, self.base) + self._fill

    def affords_call(self, candidate: str) -> bool:
        """Whether a single call of ``candidate`` stays within the budget, as far as is known what it takes."""
        call = self._single(candidate) - self._best * self.base + self.idle_drain
        return self.lost + call + self._thinking(2) <= self.budget

    def single(self, candidate: str) -> list[float]:
        """Log-ratios to the incumbent's time per call of what is known of single calls of ``candidate``: probes, and
        what a call takes at least as was known beforehand."""
        seen = [probe.per_call for probe in self._probes[candidate]]
        seen += [self._expected[candidate]] if candidate in self._expected else []
        return [math.log(seconds / self.base) for seconds in seen]

    def foreseen(self, candidate: str) -> tuple[float, float] | None:
        """The log-ratio to the incumbent's time per call, and the least that it may be, by what a call of ``candidate``
        took the host before the trial; None where nothing is known.

        No program takes less time per call than one of its regions keeps the host busy, whatever the device does.
        """
        took = self._expected.get(candidate)
        if took is None:
            return None
        least = max(took - _HITCH, _BRIEF) / _BEYOND
        return math.log(took / self.base), math.log(least / self.base)

    def tail(self, candidate: str, start: int, lead: float) -> float:
        """Seconds that the device is busy with a first call of ``candidate`` beyond the ``lead`` that it took to the
        next one, if it is call ``start``: many callers do one thing on even calls and another on odd ones.

        A caller that waits for the device after that call, or pauses, leaves nothing of it; the single calls take as
        long as ever then.
        """
        probes = self._probes[candidate]
        alike = [probe.seconds for probe in probes if (probe.start - start) % 2 == 0]
        single = alike[-1] if alike else max(probe.seconds for probe in probes)
        return min(max(0.0, single - lead), max(probe.waited for probe in probes))

    def _scattered(self) -> float:
        """How much the rounds' ratios of their last to their first candidate vary, taken to a single call; nothing
        before there are four."""
        if len(self.rounds) < 4:
            return 0.0
        ends = [(next(iter(blocks.values())), next(reversed(blocks.values()))) for blocks in self.rounds]
        return spread([_log_ratio(one, two) * math.sqrt(one.calls) for one, two in ends])

    @property
    def budget(self) -> float:
        """Seconds that may be lost in all."""
        return max(0.0, self._allowed * self.base - self.debt)

    @property
    def lost(self) -> float:
        """Seconds lost so far: what calls took beyond the fastest candidate's time, what draining took, and the trial's
        own work. Probes count as they were timed, blocks of rounds by the candidates' ratios."""
        best = self._best
        slower = sum(self._run[name] * (ratio - best) for name, ratio in self._ratios.items())
        return self.overhead + self.base * slower + self._probed_for(best * self.base) + self._draining

    def _probed_for(self, best: float) -> float:
        """Seconds that probes took beyond ``best`` each. One that took much longer than the other of its candidate
        holds a pause."""
        lost = 0.0
        for took in self._probing.values():
            most = _COLD * min(took, default=0.0)
            lost += sum(min(one, most) - best for one in took)
        return max(0.0, lost)

    @property
    def _best(self) -> float:
        return min(self._ratios.values(), default=1.0)

    def outlook(self, names: Sequence[str]) -> Outlook:
        """What a round of ``names`` may lose. n calls between drains take n times the time per call, what a single one
        takes more, the drain itself, and some thought."""
        errors = self._uncertainty(names)
        exposure = self.lost + max(error * self._run[name] for name, error in errors.items())
        excess = self.base * sum(self._ratios.get(name, 1.0) - self._best for name in names)
        ends = sum(self._drain(name) for name in names) + self._thinking(len(names) + 1)
        return Outlook(self.budget - exposure - ends, excess + max(errors.values()), ends)

    def _uncertainty(self, names: Sequence[str]) -> dict[str, float]:
        """A standard error of the seconds per call of each of ``names`` against the first of them, and how far the mean
        is from what is taken for the ratio while there are few rounds."""
        first, *others = names
        if not self.rounds:
            return dict.fromkeys(names, self.noise * self.estimate(first))
        found = {}
        for name in others:
            seen = self.compare(name, first)
            off = abs(math.exp(seen.mean) - self._ratios[name] / self._ratios[first])
            found[name] = (seen.error + off) * self.estimate(first)
        return found

    def _filled(self, block: Block, elapsed: float) -> float:
        """Seconds that ``block`` took beyond so many calls in a row, as far as a cold first call explains it; the rest
        is a pause in the call that was dropped."""
        coldest = _COLD * min(probe.seconds for probe in self._probes[block.candidate]) + self.idle_drain
        return max(0.0, min(elapsed - (block.calls + block.dropped) * block.per_call, coldest - block.per_call))

    def _drain(self, name: str) -> float:
        """As the blocks of rounds show, or while there is none, single calls."""
        if self._drained[name]:
            return median(self._drained[name])
        shortest = min((probe.seconds for probe in self._probes[name]), default=0.0)
        return max(0.0, shortest - self.estimate(name)) + self.idle_drain


def _log_ratio(one: Block, two: Block) -> float:
    return math.log(one.per_call / two.per_call)


def _noise(groups: Sequence[float], calls: int) -> float:
    """Within bounds, since a host that runs ahead of the device makes the noise look larger than it is."""
    seen = spread([math.log(seconds) for seconds in groups]) * math.sqrt(2 * calls)
    return min(max(seen, _LEAST_NOISE), _MOST_NOISE)
