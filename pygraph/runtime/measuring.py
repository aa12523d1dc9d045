"""A captured variant under measured selection: which of its calls are replayed, and which run uncaptured.

Joins ``selection``, which knows neither regions nor drivers, with both. What a call does, and that it is answered, is
``region``'s subject.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from statistics import median
from threading import Lock
from time import perf_counter
from typing import Any
from zlib import crc32

import torch

from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import Driver, Executable
from pygraph.runtime.keys import signature
from pygraph.runtime.selection.queue import TRIALS
from pygraph.runtime.selection.records import TrialReport
from pygraph.runtime.selection.selector import Selector

__all__ = ["PATCHED", "UNCAPTURED", "Measured", "Site", "disturb", "measured"]

PATCHED, UNCAPTURED = "patched", "uncaptured"
"""The candidates, in the model's order: a region is captured because the model thinks that a replay pays."""

_PERIOD = 256
"""Calls after which the selector is asked again, whatever it grants: more than a block on trial ever has."""

_alive: weakref.WeakSet[Measured] = weakref.WeakSet()
_adding = Lock()


class Site:
    """What measuring has to know of the call that was captured; nothing of the call is kept.

    ``sensitive``: the arguments whose storage offset was captured. ``selector`` is told of what could not be timed.
    """

    __slots__ = ("_device", "_driver", "_facts", "_sensitive", "selector")

    def __init__(self, driver: Driver, args: Sequence[Any], sensitive: frozenset[int]) -> None:
        devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
        self._device = next((device for device in devices if device.type != "cpu"), None)
        self._driver, self._sensitive = driver, sensitive
        self._facts = signature(args, sensitive)
        self.selector: weakref.ref[Selector] | None = None

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a call is of the variant that was captured."""
        return signature(args, self._sensitive) == self._facts

    def seed(self, name: str, key: Hashable) -> int:
        """The same number in every process for a region's name, the key, and the facts of the call."""
        return crc32(repr((name, key, self._facts)).encode())

    def drain(self) -> None:
        """Wait for the device. Where the caller captures its stream, the block that ends here does not count."""
        if self._driver.synchronise(self._device):
            return
        selector = None if self.selector is None else self.selector()
        if selector is not None:
            selector.spoil()


class Measured:
    """An executable that is used as ``selector`` says.

    The selector is asked on the entry of a call, when the calls that it granted are used up. Only calls that ran are
    counted, so that it does no harm to come by here twice in one call. Thread-safe; a call that comes while another
    thread asks runs as the last one did, and what is being timed does not count.
    """

    def __init__(self, executable: Executable, selector: Selector, site: Site, record: RegionRecord) -> None:
        self.replay = executable.replay
        self._passed_over = False
        self._unsure = False
        self._site = site
        self._executable = executable
        self._consuming = getattr(executable, "consume", None) or executable.replay
        self._selector = selector
        self._record, self._number = record, record.captures
        self._asking = Lock()
        self._clashed = False
        self._left = 0
        self._published = 0
        with _adding:
            _alive.add(self)

    def consume(self, args: list[Any]) -> Sequence[Any] | None:
        """Replay; None, with ``args`` as it was, where that does not fit, or where the call is to run uncaptured.

        Raises what a replay raises, and what waiting for the device raises. Whoever answers the call otherwise spoils
        what is being timed.
        """
        if self._left <= 0:
            self._ask()
        if self._passed_over:
            return None
        outputs: Sequence[Any] | None = self._consuming(args)
        if outputs is not None:
            self._left -= 1
        return outputs

    def awaits_uncaptured(self) -> bool:
        """Whether a call that comes now is to run uncaptured, if it is of this variant."""
        if self._left <= 0:
            self._ask()
        return self._passed_over

    def grants(self, args: Sequence[Any], *, alone: bool) -> bool:
        """Whether a call that is about to run uncaptured is of this variant; it counts as granted if so.

        To find out takes time, of which a call with many arguments has little. So where the key knows this variant
        ``alone``, one call in many is looked at, and none of those that are timed.
        """
        if (self._unsure or not alone) and not self._site.fits(args):
            self._selector.spoil()
            return False
        self._unsure = False
        self._left -= 1
        return True

    def spoil(self) -> None:
        """A call did not run as granted, or something else took time: what is being timed does not count."""
        self._selector.spoil()

    def close(self) -> None:
        """End measuring, and give back everything that the executable holds."""
        self._selector.close()
        with self._asking:
            self._publish()
        self._executable.close()

    def _ask(self) -> None:
        if not self._asking.acquire(blocking=False):
            self._clashed = True
            return
        try:
            if self._clashed:
                self._clashed = False
                self._selector.spoil()
            candidate, calls = self._selector.step()
            self._passed_over = candidate == UNCAPTURED
            self._unsure = calls == 1 or calls >= _PERIOD
            self._left = min(calls, _PERIOD)
        finally:
            self._publish()
            self._asking.release()

    def _publish(self) -> None:
        """Put trials that have ended into the record."""
        reports = self._selector.reports
        while self._published < len(reports):
            self._record.trials.append(_plain(reports[self._published], self._number))
            self._published += 1


def measured(executable: Executable, site: Site, record: RegionRecord, key: Hashable) -> Measured:
    """``executable`` under measured selection; ``record`` gets the trials, and counts this capture already."""
    seed = site.seed(record.name, key)
    selector = Selector([PATCHED, UNCAPTURED], perf_counter, site.drain, seed=seed, queue=TRIALS)
    site.selector = weakref.ref(selector)  # weak, since the selector holds the site
    return Measured(executable, selector, site, record)


def disturb() -> None:
    """Something took time that no call takes again: whichever trial is under way, what it is timing does not count."""
    with _adding:
        found = list(_alive)
    for each in found:
        each.spoil()


def _plain(report: TrialReport, number: int) -> dict[str, Any]:
    """A report in types that JSON has, with the capture that it is of, and the medians (seconds per call) of the
    blocks that counted. Single calls stand in where there is no other block."""
    samples = {}
    for name in report.candidates:
        kept = [block for block in report.blocks if block.candidate == name and block.kept]
        rounds = [block.per_call for block in kept if block.purpose == "round"]
        times = rounds or [block.per_call for block in kept]
        samples[name] = {"blocks": len(times), "median": median(times) if times else None}
    return {"capture": number, **report.as_dict(), "samples": samples}
