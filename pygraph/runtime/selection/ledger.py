"""The ledger of a trial: what each candidate's calls cost, what the trial has lost by that, what it may lose yet.

All in seconds. Which blocks are run, and what follows from them, is the trial's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pygraph.runtime.selection.records import Block
from pygraph.runtime.selection.statistics import Difference, difference, lower_median, mild_median, spread

__all__ = ["BASELINE_CALLS", "BASELINE_GROUPS", "Ledger"]

BASELINE_GROUPS = 8
BASELINE_CALLS = 2
"""Calls in each group of the baseline: even, so that callers of period 2 look steady."""

_STRAY, _STRAY_DEVIATIONS = 0.1, 6.0
"""A block that takes longer than its candidate's others by this fraction, and by so many standard deviations, holds a
stray pause."""
_STRAY_EARLY = 2.0
"""The same as a factor, while only single calls tell what is usual."""
_SYNCED = 0.25
"""The part of another probe's wait below which a caller has waited for the device by itself."""
_RECENT = 5
"""Blocks of a candidate that tell what is usual: programs drift."""
_LEAST_NOISE, _MOST_NOISE = 0.03, 0.15


class Ledger:
    """Accounts for a trial of ``candidates``, the incumbent first, that may lose the time of ``allowed`` calls.

    ``idle_drain``: seconds that a drain of an idle device takes. ``overhead``: those that the trial's own work took.
    ``noise``: the standard deviation of the log-ratio of two calls, as the baseline suggests.
    """

    def __init__(self, candidates: Sequence[str], allowed: float) -> None:
        self.blocks: list[Block] = []
        self.rounds: list[dict[str, Block]] = []
        self.calls = 0
        self.idle_drain = 0.0
        self.overhead = 0.0
        self.noise = _MOST_NOISE
        self._candidates = tuple(candidates)
        self._allowed = allowed
        self._baseline: list[float] = []
        self._probes: dict[str, list[Block]] = {name: [] for name in candidates}
        self._timed: dict[str, list[tuple[int, float]]] = {name: [] for name in candidates}
        self._run: dict[str, int] = dict.fromkeys(candidates, 0)
        self._drained: dict[str, int] = dict.fromkeys(candidates, 0)
        self._astray: dict[str, int] = {}
        self._ratios: dict[str, float] = {}
        self._alone: dict[str, float] = {}
        self._compared: dict[tuple[str, str], Difference] = {}
        self._scatter = 0.0
        self._base = 0.0

    def add(self, block: Block) -> None:
        """Enter a block, whatever became of it. The baseline is what ran anyway, and loses nothing."""
        self._enter(block)
        self._base = self._measured_base()

    def _enter(self, block: Block) -> None:
        self.blocks.append(block)
        self.calls += block.calls + block.dropped
        if block.purpose == "baseline":
            self._baseline.append(block.per_call)
            self.noise = _noise(self._baseline)
            return
        self._run[block.candidate] += block.calls + block.dropped
        self._drained[block.candidate] += 1
        if not block.kept:
            return
        if block.purpose == "probe":
            self._probes[block.candidate].append(block)
            self._alone[block.candidate] = max(one.seconds - one.per_call for one in self._probes[block.candidate])
            self._ratios[block.candidate] = self._probed(block.candidate) / self._probed(self._candidates[0])
        else:
            self._timed[block.candidate].append((block.calls, block.per_call))

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
        return found

    def strays(self, block: Block) -> bool:
        """Whether ``block`` took so much longer than its candidate's others that something else must have happened.

        Never three times in a row: then it is the candidate that has become slower.
        """
        recent = self._timed[block.candidate][-_RECENT:]
        limit = _STRAY_EARLY * max(probe.per_call for probe in self._probes[block.candidate])
        if recent:
            shorter = min([block.calls, *(calls for calls, _ in recent)])
            deviation = max(self.noise, self._scatter) / math.sqrt(2 * shorter)
            limit = lower_median([seconds for _, seconds in recent]) * (1 + max(_STRAY, _STRAY_DEVIATIONS * deviation))
        row = self._astray.get(block.candidate, 0) + 1 if block.per_call > limit else 0
        self._astray[block.candidate] = row % 3
        return row % 3 > 0

    def estimate(self, candidate: str) -> float:
        """Seconds per call of ``candidate``, on the scale of the incumbent's; of one that has not run, the latter's."""
        return self._base * self._ratios.get(candidate, 1.0)

    def _measured_base(self) -> float:
        """The incumbent's seconds per call. Before it has run blocks: the mean of the baseline but its slowest groups,
        which is too little where the host runs ahead, so that the budget errs on the safe side."""
        incumbent = self._candidates[0]
        if len(self._timed[incumbent]) >= 2:
            return lower_median([seconds for _, seconds in self._timed[incumbent]])
        calm = sorted(self._baseline)[: max(1, len(self._baseline) * 3 // 4)]
        before = sum(calm) / len(calm) if calm else 0.0
        return max(before, self._probed(incumbent)) if self._probes[incumbent] else before

    def _probed(self, candidate: str) -> float:
        return min(probe.per_call for probe in self._probes[candidate])

    def tail(self, candidate: str) -> float:
        """Seconds that a drain waits after a single call of ``candidate``, if that is the call that comes now: many
        callers do one thing on even calls and another on odd ones. 0 before it was probed. A probe after which the
        caller happened to wait for the device itself tells nothing."""
        probes = self._probes[candidate]
        if not probes:
            return 0.0
        alike = [probe.waited for probe in probes if (probe.start - self.calls) % 2 == 0]
        longest = max(probe.waited for probe in probes)
        return alike[-1] if alike and alike[-1] > _SYNCED * longest else longest

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
        return self._allowed * self._base

    @property
    def lost(self) -> float:
        """Seconds lost so far: what calls took beyond the fastest candidate's time, the drains, and the trial's own
        work."""
        base = self._base
        best = min(self._ratios.values(), default=1.0)
        slower = sum(self._run[name] * (ratio - best) for name, ratio in self._ratios.items())
        drains = sum(self._drained[name] * (alone + self.idle_drain) for name, alone in self._alone.items())
        return self.overhead + base * slower + drains

    def uncertainty(self, names: Sequence[str]) -> dict[str, float]:
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

    def exposure(self, names: Sequence[str]) -> float:
        """What may have been lost so far, seconds: what is known, and a standard error of ``names`` more."""
        return self.lost + max(error * self._run[name] for name, error in self.uncertainty(names).items())

    def risk(self, names: Sequence[str]) -> float:
        """Seconds that a call of each of ``names`` may lose: as estimated, and a standard error more."""
        return self.excess(names) + max(self.uncertainty(names).values())

    def excess(self, names: Sequence[str]) -> float:
        """Seconds that one call of each of ``names`` loses against the fastest candidate."""
        best = min(self._ratios.values(), default=1.0)
        return self._base * sum(self._ratios.get(name, 1.0) - best for name in names)

    def drains(self, names: Sequence[str]) -> float:
        """Seconds that a drain after a block of each of ``names`` loses: n calls between drains take n times the time
        per call, what a single one takes more, and the drain itself."""
        return sum(self._alone.get(name, 0.0) + self.idle_drain for name in names)


def _log_ratio(one: Block, two: Block) -> float:
    return math.log(one.per_call / two.per_call)


def _noise(baseline: Sequence[float]) -> float:
    """Within bounds, since a host that runs ahead of the device makes the noise look larger than it is."""
    seen = spread([math.log(seconds) for seconds in baseline]) * math.sqrt(2 * BASELINE_CALLS)
    return min(max(seen, _LEAST_NOISE), _MOST_NOISE)
