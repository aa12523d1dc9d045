"""The live regions of this process, and operations on many of them at once: retry, release, make room.

Each region has an owner: the session that is entered where its program is compiled, or the default owner.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from pygraph.runtime.native_build import retry_failed
from pygraph.runtime.reasons import OVER_LIMIT

if TYPE_CHECKING:
    from pygraph.runtime.region import Region
    from pygraph.runtime.variants import Variant


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture that may be freed.

    Args:
        variant: The variant whose calls it replays.
        evict: Called with a reason; frees it until its calls are captured again.
    """

    variant: Variant
    evict: Callable[[str], None]


_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(eq=False)
class Owner:
    """Regions that share a memory limit.

    Args:
        memory_limit: Bytes of a device that their captures may take; None: the driver's limit.
        frozen: Nothing more is captured.
        closed: Its regions capture nothing, including those that are made from now on.
        log: Logger for its regions.
    """

    memory_limit: int | None = None
    frozen: bool = False
    closed: bool = False
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("pygraph.runtime"))

    @property
    def regions(self) -> list[Region]:
        """Its live regions, oldest first."""
        return [region for region in regions() if region.owner is self]


EVERYBODY = Owner()
"""The owner of regions that are made outside of all sessions."""


@dataclass(slots=True)
class _Block:
    """A ``with`` block of a thread: programs compiled in it belong to ``owner``, until it is ``left``."""

    owner: Owner
    outer: _Block | None = None
    left: bool = False


_innermost: ContextVar[_Block | None] = ContextVar("pygraph_owner", default=None)


def _block() -> _Block | None:
    found = _innermost.get()
    while found is not None and found.left:  # on another thread
        found = found.outer
    return found


def owner() -> Owner:
    """The owner of programs that are compiled in the current context."""
    block = _block()
    return EVERYBODY if block is None else block.owner


@contextlib.contextmanager
def owned_by(owner: Owner) -> Iterator[None]:
    """Within the block, programs that this thread compiles belong to ``owner``. It may be left on another thread."""
    block = _Block(owner, _block())
    _innermost.set(block)
    try:
        yield
    finally:
        block.left = True
        _innermost.set(_block())


def enter(region: Region) -> None:
    """Register ``region`` for as long as it is alive."""
    _regions[next(_numbers)] = region


def regions() -> list[Region]:
    """All live regions, oldest first. Other threads may make more meanwhile."""
    return [region for region in (known() for known in _regions.valuerefs()) if region is not None]


def counters_of(among: Iterable[Region]) -> dict[str, dict[str, int]]:
    """The counters of each region, by name; counters of regions with one name are added up."""
    found: dict[str, Counter[str]] = {}
    for region in among:
        name, counted = region.counters
        found.setdefault(name, Counter()).update(counted)
    return {name: dict(sorted(counted.items())) for name, counted in found.items()}


def retry(*, every: bool = False) -> int:
    """Make regions eligible for captures again whose captures were refused for a reason that may pass, at their next
    call. Returns how many there were.

    Regions do that by themselves, after 64 calls or 30 seconds at most, unless they were left uncaptured for good.
    A native library that could not be built is built again. ``every``: those too that were refused for a reason that
    lasts, such as a comparison that failed.
    """
    retry_failed()
    return sum(region.retry(every=every) for region in regions())


def release() -> int:
    """Free all captures of this process. Returns how many there were.

    Programs go on: their next calls run uncaptured, and are captured again as those of a new program are. Of several
    ranks with captured collectives, all have to release theirs between the same calls.
    """
    return sum(region.release() for region in regions())


def shed(device: torch.device, before: int | None = None) -> int:
    """Free the least recently used half of the captures on ``device``, only of those not replayed since the replay with
    the number ``before``, if given. Returns how many were freed."""
    idle = [capture for capture in _by_use(device, regions()) if before is None or capture.variant.used <= before]
    chosen = idle[: (len(idle) + 1) // 2]
    for capture in chosen:
        capture.evict("out-of-memory")
    return len(chosen)


def held_bytes(device: torch.device, owner: Owner | None = None) -> int:
    """Bytes of ``device`` that captures on it take: of all regions, or of those of an ``owner``."""
    mine = regions() if owner is None else owner.regions
    return sum(region.record.held_bytes for region in mine if region.device == device)


def make_room(device: torch.device, nbytes: int, limit: int, spared: Variant, owner: Owner) -> bool:
    """Free the least recently used captures of ``owner`` on ``device``, except that of ``spared``, until ``nbytes``
    more fit into ``limit``. Returns False, with nothing freed, if freeing all of them would not be enough.

    One thread captures at a time, so other threads can only make more room meanwhile.
    """
    excess = held_bytes(device, owner) + nbytes - limit
    chosen: list[Capture] = []
    for capture in _by_use(device, owner.regions) if excess > 0 else ():
        if capture.variant is not spared and excess > 0:
            chosen.append(capture)
            excess -= capture.variant.held_bytes
    if excess > 0:
        return False
    for capture in chosen:
        capture.evict(OVER_LIMIT)
    return True


def _by_use(device: torch.device, among: list[Region]) -> list[Capture]:
    """The captures of regions on ``device`` that may be freed, the least recently used first."""
    known = (capture for region in among if region.device == device for capture in region.captures())
    return sorted(known, key=lambda capture: capture.variant.used)
