"""The truth about a program's candidates: what a call takes with each of them forced, without any trial.

What the programs are is in ``scenarios``, what trials make of them in ``selection``.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any
from unittest import mock

from benchmarks.scenarios import CALLERS, After, Delay, Program, Slowed, arguments, drain, wait
from pygraph.regions import driver_for
from pygraph.runtime import measuring
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region
from pygraph.runtime.selection.records import Grant
from pygraph.runtime.selection.selector import FOREVER

__all__ = ["WITHIN", "Row", "Subject", "as_fast", "rounds", "summary", "sure"]

WITHIN = 0.02
"""A candidate is as good as the fastest one if it takes no longer by more than this fraction."""
_LEAD = 16
"""Calls before each block, which do not count."""
_BLOCK, _FEWEST, _MOST = 0.02, 64, 1024
"""Seconds that a block of the fastest candidate takes, and the least and the most calls in it."""
_PROBE = 32
"""Calls from which that many are reckoned."""
_WARM = 0.02
"""Seconds of calls that bring up the device's clock, and give the allocator its memory."""
_ADJUSTMENTS = 3
"""Times that a handicap is set: what it adds to a call depends on what it overlaps with."""

Step = Callable[[], Any]
Truth = Mapping[str, Mapping[str, float]]
Row = dict[str, float]
"""Seconds per call of each candidate, in blocks that followed each other."""


class _Always:
    """Stands in for a selector: all calls use ``candidate``."""

    def __init__(self, candidate: str) -> None:
        self._candidate = candidate
        self.reports: tuple[Any, ...] = ()

    def step(self) -> Grant:
        """What is used, for good."""
        return Grant(self._candidate, FOREVER)

    def spoil(self) -> None:
        """Nothing is being timed."""

    def withdraw(self, candidate: str) -> None:
        """Nothing is tried."""

    def close(self) -> None:
        """Nothing is going on."""


class Subject:
    """A program on a device: new regions of it, and in ``steps`` a call for each candidate, with that one forced.

    Of the forced replays in ``regions``, ``patched`` is a region that does not measure, ``copied`` one that has this
    candidate and no selector; ``uncaptured`` is the function itself. The handicap, ``delay``, comes after every replay;
    without one, nothing does. Raises RuntimeError where nothing captures.
    """

    def __init__(self, program: Program, device: str) -> None:
        self.program, self.device = program, device
        driver: Any = driver_for(device)
        if driver is None:
            raise RuntimeError(f"no driver captures on {device}")
        self.delay = Delay(device, program.slowed)
        self._driver = Slowed(driver, self.delay) if program.slowed else driver
        self._arguments = arguments(program, device)
        self.regions: dict[str, Region] = {}
        self.steps: dict[str, Step] = {name: self._forced(name) for name in program.candidates}
        self.warm()
        if program.slowed:
            self._handicap()

    def region(self, name: str, *, measure: bool) -> Region:
        """A new region, captured by the last call that it had, with everything done that was submitted."""
        region = Region(self.program.fn, self._driver, name=name, options=RegionOptions(measure=measure))
        for _ in range(RegionOptions().capture_after):
            region(self._arguments())
        drain(self.device)
        if not region.record.captures:
            raise RuntimeError(f"{self.program.name} was not captured: {region.record.reason}")
        return region

    def calling(self, region: Region) -> Step:
        """A call of ``region``."""
        return lambda: region(self._arguments())

    def warm(self) -> None:
        """Calls for a moment, so that nothing is cold that is not the trial's."""
        gc.collect()
        end = time.perf_counter() + _WARM
        while time.perf_counter() < end:
            self.steps["uncaptured"]()
            wait(self.device)

    def close(self) -> None:
        """Free what was captured."""
        for region in self.regions.values():
            region.close()

    def _forced(self, candidate: str) -> Step:
        if candidate == "uncaptured":
            return lambda: self.program.fn(self._arguments())
        always = mock.patch.object(measuring, "Selector", return_value=_Always(candidate))
        with always if candidate == "copied" else contextlib.nullcontext():
            self.regions[candidate] = self.region(candidate, measure=candidate == "copied")
        return self.calling(self.regions[candidate])

    def _handicap(self) -> None:
        steady = CALLERS["steady"](self.device)
        for _ in range(_ADJUSTMENTS):
            found = summary(rounds(self, steady, range(3)))
            missing = self.program.ratio * found["uncaptured"]["us"] - found["patched"]["us"]
            self.delay.seconds = max(0.0, self.delay.seconds + missing / 1e6)


def rounds(subject: Subject, after: After, seeds: Sequence[int]) -> list[Row]:
    """A round for each of ``seeds``: a block of each candidate, drained at both ends, in random order.

    What is random in the caller is the same in all blocks of a round.
    """
    probes = {name: _timed(subject, step, after, _PROBE, 0) for name, step in subject.steps.items()}
    calls = min(max(_BLOCK / min(probes.values()), _FEWEST), _MOST)
    even = math.ceil(calls / 16) * 16
    found = []
    for seed in seeds:
        order = Random(seed).sample(list(subject.steps), len(subject.steps))
        found.append({name: _timed(subject, subject.steps[name], after, even, seed) for name in order})
    return found


def _timed(subject: Subject, step: Step, after: After, calls: int, seed: int) -> float:
    random = Random(seed)
    for call in range(_LEAD):
        step()
        after(call, random)
    drain(subject.device)
    start = time.perf_counter()
    for call in range(calls):
        step()
        after(call, random)
    wait(subject.device)
    return (time.perf_counter() - start) / calls


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of each candidate: the median in µs; its ratio to the fastest one, as median, least and largest of the rounds;
    and the part of the rounds in which it was ``near`` what was fastest there.

    Ratios are taken within rounds, since programs and machines drift between them.
    """
    names = sorted(rows[0])
    middle = {name: statistics.median(row[name] / row[names[0]] for row in rows) for name in names}
    best = min(names, key=lambda name: middle[name])
    found = {}
    for name in names:
        ratios = [row[name] / row[best] for row in rows]
        found[name] = {
            "us": statistics.median(row[name] for row in rows) * 1e6,
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "largest": max(ratios),
            "near": sum(row[name] <= (1 + WITHIN) * min(row.values()) for row in rows) / len(rows),
        }
    return found


def as_fast(truth: Truth, candidate: str) -> bool:
    """Whether ``candidate`` takes no longer than the fastest one, but for what is not counted."""
    return truth[candidate]["ratio"] <= 1 + WITHIN


def sure(truth: Truth, candidate: str) -> bool:
    """Whether all rounds agree on that."""
    return truth[candidate]["near"] == as_fast(truth, candidate)
