"""The regions of this process that are alive, and what is done to all of them at once: retry, release, make room."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from pygraph.runtime.native_build import retry_failed

if TYPE_CHECKING:
    from pygraph.runtime.region import Region


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture that may be freed.

    Args:
        device: Where it is replayed.
        used: The number of its last replay, in the order of all replays.
        evict: Frees it, until its calls are captured again.
    """

    device: torch.device
    used: int
    evict: Callable[[], None]


_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
_numbers = itertools.count()


def enter(region: Region) -> None:
    """Know ``region`` for as long as it is alive."""
    _regions[next(_numbers)] = region


def regions() -> list[Region]:
    """All regions that are alive, oldest first. Other threads may make some meanwhile."""
    return [region for region in (known() for known in _regions.valuerefs()) if region is not None]


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
    """Free the least recently used half of the captures on ``device``, of those that were not replayed since the replay
    with the number ``before``. Returns how many these were."""
    known = (capture for region in regions() for capture in region.captures() if capture.device == device)
    idle = sorted((one for one in known if before is None or one.used <= before), key=lambda one: one.used)
    chosen = idle[: (len(idle) + 1) // 2]
    for capture in chosen:
        capture.evict()
    return len(chosen)
