"""What was decided on a region in earlier processes: the key that it is kept under, and what runs by it.

How decisions lie on disk is ``selection.store``'s subject, what is decided ``selection``'s, what a call does
``region``'s.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, Protocol

import torch

from pygraph.runtime import counters
from pygraph.runtime.digest import bits
from pygraph.runtime.driver import Driver
from pygraph.runtime.identity import versions
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.records import Decided
from pygraph.runtime.selection.selector import past_watch
from pygraph.runtime.selection.store import Store, Stored

__all__ = ["FOLDER", "Entry", "Fitting", "LeftOut", "Memory", "call_digest", "content_digest", "memory_of"]

FOLDER = "decisions"
"""Where decisions lie within the cache directory."""


_NO_CALLS: dict[str, Any] = {"lost": 0.0, "budget": 0.0, "calls": 0, "dropped": (), "blocks": (), "looks": ()}
"""What a trial without calls cost, and shows."""


class Fitting(Protocol):
    """Tells calls of one variant from others."""

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a call is of that variant."""
        ...


class Memory:
    """Decisions on the calls of one region, in ``store``; ``candidates`` are all that this version knows."""

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        driver: Driver,
        options: RegionOptions,
        store: Store,
        candidates: Sequence[str],
    ) -> None:
        self._driver, self._store = driver, store
        self._fn, self._content = fn, ""
        self._fixed = {
            "candidates": " ".join(candidates),
            "options": f"alignment={options.alignment} reuse_workspace={options.reuse_workspace}",
            **versions(),
        }

    def entry(self, args: Sequence[Any]) -> Entry | None:
        """What is known of calls like this one; None if the region's content cannot be told."""
        self._content = self._content or content_digest(self._fn) or ""
        if not self._content:
            return None
        devices = [arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu"]
        machine = self._driver.identity(devices[0] if devices else None)
        key = {**self._fixed, "content": self._content, "call": call_digest(args), "device": machine}
        return Entry(self._store, key, self._store.load(key))


@dataclass
class Entry:
    """One key, and what is stored under it; ``stored`` is None where nothing was decided yet."""

    store: Store
    key: dict[str, str]
    stored: Stored | None

    def past(self, candidates: Sequence[str]) -> Decided | None:
        """What was decided on just these candidates."""
        if self.stored is None or self.stored.decided.candidates != tuple(candidates):
            return None
        return self.stored.decided

    def decided_on(self, candidate: str) -> bool:
        """Whether it was decided on ``candidate``."""
        return self.stored is not None and self.stored.decided.decision == candidate

    def keep(self, decided: Decided) -> None:
        """Store ``decided``. It is as old as what is stored already if it came of the same trial."""
        before = self.stored
        same = before is not None and before.decided.trials == decided.trials
        made = before.made if before is not None and same else None
        self.stored = self.store.save(self.key, decided, made) or before

    def trial(self, capture: int, seed: int) -> dict[str, Any]:
        """What is stored, in the form that trials have in a record: one without calls. ``capture`` 0: none was made."""
        assert self.stored is not None
        counters.add("recalled")
        decided = self.stored.decided
        samples = {name: {"blocks": one.blocks, "median": one.median} for name, one in decided.samples.items()}
        return {
            "capture": capture,
            "candidates": decided.candidates,
            "decision": decided.decision,
            "reason": decided.reason,
            "detail": decided.detail,
            "per_call": dict(decided.per_call),
            **_NO_CALLS,
            "seed": seed,
            "samples": samples,
            "stored": {"path": str(self.stored.path), "age": self.stored.age, "trials": decided.trials},
        }


class LeftOut:
    """Stands where a capture would: calls of the variant run uncaptured, since that was decided, until ``over``.

    The clock is read each ``period`` calls, as after any decision: once the program's pace has changed for good, it is
    over, unless no trial is left. ``remember`` is told the pace as soon as it is known, if it was not.
    Thread-safe: of threads that come at once, one looks at the clock.
    """

    def __init__(
        self,
        site: Fitting,
        past: Decided,
        clock: Callable[[], float],
        remember: Callable[[float], None],
        options: SelectionOptions | None = None,
    ) -> None:
        chosen = options or SelectionOptions()
        self.over = False
        self._site, self._clock, self._remember = site, clock, remember
        self._period = chosen.period
        self._watch = past_watch(past, chosen) if past.trials < chosen.trials else None
        self._known = past.pace is not None
        self._asking = Lock()
        self._left = 0

    def grants(self, args: Sequence[Any], *, alone: bool) -> bool:
        """Whether a call is to run uncaptured, without anything else being asked. Where the key knows this variant
        ``alone``, one call in many is looked at."""
        if self.over:
            return False
        self._left -= 1
        looking = self._left < 0 and self._asking.acquire(blocking=False)
        if looking:
            try:
                self._look()
            finally:
                self._asking.release()
        return not self.over and (self._site.fits(args) if looking or not alone else True)

    def _look(self) -> None:
        self._left = self._period - 1
        watch = self._watch
        if watch is None:
            return
        self.over = watch.observe(self._clock())
        if not self._known and watch.reference is not None:
            self._known = True
            self._remember(watch.reference / self._period)


def memory_of(
    fn: Callable[[list[Any]], Sequence[Any]], driver: Driver, options: RegionOptions, candidates: Sequence[str]
) -> Memory | None:
    """The memory of a region around ``fn``; None if nothing is measured, or nothing kept."""
    if not options.measure or options.verify_always or options.cache_dir is None:
        return None
    try:
        folder = Path(options.cache_dir).expanduser() / FOLDER
    except RuntimeError:  # of a user without a home
        return None
    return Memory(fn, driver, options, Store(folder), candidates)


def content_digest(fn: Callable[[list[Any]], Sequence[Any]]) -> str | None:
    """A digest of what ``fn`` runs, equal in all processes; None where that is in no file, or depends on a closure.

    It covers the module that ``fn`` is defined in, as text, and the name of ``fn`` therein. A module of Inductor's
    holds the source of every kernel, Triton and C++, with its options, grids and sizes, and the calls of operators and
    of external kernels, so that two programs whose kernels have the same names and do other things differ. Of the
    module it covers all functions, since what is measured is the time of the whole program. Lines that are comments
    are left out: they hold paths, and numbers that count what was compiled before.

    It does not cover what the module only names: the insides of custom operators, libraries (their versions are
    parts of a key of their own), the values of constants. A decision that is wrong for that reason is noticed as any
    other drift; it makes no result wrong.
    """
    if not isinstance(fn, FunctionType) or fn.__closure__:
        return None
    source = _source_digest(fn.__code__.co_filename)
    return source and hashlib.sha256(f"{source} {fn.__qualname__}".encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _source_digest(path: str) -> str | None:
    """Of a Python file without the lines that are comments. Where a string of several lines holds some, they stay."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    found = hashlib.sha256()
    within = False
    for line in text.splitlines():
        if within or not line.lstrip().startswith("#"):
            found.update(line.encode("utf-8", "surrogatepass") + b"\n")
        within ^= (line.count("'''") + line.count('"""')) % 2 == 1
    return found.hexdigest()


def call_digest(args: Sequence[Any]) -> str:
    """A digest of sizes, strides, dtypes and kinds of device, and of all other arguments by type and bits.

    Neither addresses, nor storage offsets, nor numbers of devices: none of them is the same in the next process.
    """
    facts = [
        ("tensor", tuple(arg.size()), arg.stride(), str(arg.dtype), arg.device.type)
        if isinstance(arg, torch.Tensor)
        else bits(arg)
        for arg in args
    ]
    return hashlib.sha256(json.dumps(facts, default=repr).encode()).hexdigest()
