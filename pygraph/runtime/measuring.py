"""A captured variant under measured selection: which of its calls are replayed, and which run uncaptured.

Joins ``selection``, which knows neither regions nor drivers, with both. What a call does, and that it is answered, is
``region``'s subject.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any
from zlib import crc32

import torch

from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import Driver, Executable
from pygraph.runtime.keys import signature
from pygraph.runtime.remembering import Entry, LeftOut
from pygraph.runtime.selection.queue import TRIALS
from pygraph.runtime.selection.records import Decided, TrialReport
from pygraph.runtime.selection.selector import Selector
from pygraph.runtime.staging import WATCHED, Copies, Stageable

__all__ = [
    "CANDIDATES",
    "COPIED",
    "PATCHED",
    "UNCAPTURED",
    "Measured",
    "Site",
    "copying",
    "disturb",
    "left_out",
    "measured",
]

PATCHED, COPIED, UNCAPTURED = "patched", "copied", "uncaptured"
"""The candidates, in the model's order: a region is captured because the model thinks that a replay pays. ``copied``
replays with copies at fixed addresses of the inputs that move, instead of patching the launches that use them."""

CANDIDATES = (PATCHED, COPIED, UNCAPTURED)
"""All there are; a region may have fewer. Decisions among others are not comparable."""

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

    def trim(self) -> None:
        """Give back what uncaptured calls on trial have left for later ones, of which there will be none."""
        self._driver.trim(self._device)

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
    thread asks runs as the last one did, and what is being timed does not count. Where there are ``copies``, the first
    calls are replayed with patched addresses, whatever the selector would say, to see which inputs move.
    """

    def __init__(
        self,
        executable: Executable,
        selector: Selector,
        site: Site,
        record: RegionRecord,
        copies: Copies | None = None,
    ) -> None:
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
        self._copies = copies
        self._left = 0 if copies is None else WATCHED
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
            if self._copies is not None:
                self._copies.close()
        self._executable.close()

    def _ask(self) -> None:
        if not self._asking.acquire(blocking=False):
            self._clashed = True
            return
        try:
            if self._clashed:
                self._clashed = False
                self._selector.spoil()
            if self._copies is not None and not self._copies.choose():
                self._selector.withdraw(COPIED)
            candidate, calls = self._selector.step()
            if self._copies is not None and not self._copies.switch(candidate == COPIED):
                self._selector.spoil()
            self._passed_over = candidate == UNCAPTURED
            self._unsure = calls == 1 or calls >= _PERIOD
            self._left = min(calls, _PERIOD)
            if self._publish() and not self._passed_over:
                self._site.trim()
        finally:
            self._publish()
            self._asking.release()

    def _publish(self) -> bool:
        """Put trials that have ended into the record; whether calls ran uncaptured in one of them."""
        reports, tried = self._selector.reports, False
        while self._published < len(reports):
            report = reports[self._published]
            self._record.trials.append(_plain(report, self._number))
            self._published += 1
            tried |= any(block.candidate == UNCAPTURED for block in report.blocks)
        return tried


def measured(
    executable: Executable,
    site: Site,
    record: RegionRecord,
    key: Hashable,
    entry: Entry | None = None,
    *,
    changed: bool = False,
    inputs: Sequence[Stageable] = (),
    asked: bool = False,
    uncaptured: float | None = None,
) -> Measured:
    """``executable`` under measured selection; ``record`` gets the trials, and counts this capture already.

    ``uncaptured``: seconds that an uncaptured run took the host, which tell whether a trial can afford another one.
    Replays with copies of ``inputs`` were compared, and are a candidate if there are any: the model's choice, if they
    were ``asked`` for.
    What ``entry`` has of an earlier trial among the same candidates is used without a new one, unless the program is
    known to have ``changed`` since: then it is what the new trial begins with. What is decided goes there.
    """
    copies = Copies(executable, inputs, record, limited=not asked) if inputs else None
    seed, candidates = site.seed(record.name, key), [name for name in CANDIDATES if name != COPIED or inputs]
    if asked and inputs:
        candidates.sort(key=lambda name: name != COPIED)
    past = None if entry is None else entry.past(candidates)
    if entry is not None and past is not None and not changed:
        record.trials.append(entry.trial(record.captures, seed))
    selector = Selector(
        candidates,
        perf_counter,
        site.drain,
        seed=seed,
        queue=TRIALS,
        past=past,
        changed=changed,
        remember=None if entry is None else partial(_keep, entry),
        expected={UNCAPTURED: uncaptured} if uncaptured else None,
    )
    site.selector = weakref.ref(selector)  # weak, since the selector holds the site
    return Measured(executable, selector, site, record, copies)


def copying(executable: Executable, site: Site, record: RegionRecord, inputs: Sequence[Stageable]) -> Measured:
    """``executable`` with copies of those of ``inputs`` that move, as was asked for: there is no trial."""
    selector = Selector([COPIED], perf_counter, site.drain, queue=TRIALS)
    return Measured(executable, selector, site, record, Copies(executable, inputs, record, limited=False))


def left_out(entry: Entry, site: Site, record: RegionRecord, key: Hashable) -> LeftOut:
    """What runs uncaptured, without a capture, as ``entry`` has it; ``record`` gets the trial that decided so."""
    assert entry.stored is not None
    past = entry.stored.decided
    trial = entry.trial(0, site.seed(record.name, key))
    if all(_file(other) != _file(trial) for other in record.trials):  # sizes are forgotten, and met again
        record.trials.append(trial)
    return LeftOut(site, past, perf_counter, lambda pace: _keep(entry, replace(past, pace=pace)))


def _file(trial: dict[str, Any]) -> str | None:
    """The file that a trial without a capture was read from."""
    return None if trial["capture"] else str(trial["stored"]["path"])


def _keep(entry: Entry, decided: Decided) -> None:
    """Store a decision. That takes a moment, which no block on trial is to be charged with."""
    entry.keep(decided)
    disturb()


def disturb() -> None:
    """Something took time that no call takes again: whichever trial is under way, what it is timing does not count."""
    with _adding:
        found = list(_alive)
    for each in found:
        each.spoil()


def _plain(report: TrialReport, number: int) -> dict[str, Any]:
    """A report in types that JSON has, with the capture that it is of, and what counted of each candidate."""
    samples = {name: {"blocks": one.blocks, "median": one.median} for name, one in report.samples.items()}
    return {"capture": number, **report.as_dict(), "samples": samples}
