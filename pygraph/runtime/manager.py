"""The regions of one owner (a backend, a test), to be reported on and freed together.

Regions are held weakly: when compiled code is dropped, so are its regions and all that they captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import Driver
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region

__all__ = ["RegionManager"]


class RegionManager:
    """Makes regions that share a driver and options, and remembers them in the order in which they were made."""

    def __init__(self, driver: Driver, options: RegionOptions | None = None) -> None:
        self._driver = driver
        self._options = options or RegionOptions()
        self._regions: WeakSet[Region] = WeakSet()
        self._made = 0

    def make(
        self, fn: Callable[[list[Any]], Sequence[Any]], name: str | None = None, written_hint: Iterable[int] = ()
    ) -> Region:
        """A region around ``fn``, named ``region<n>`` unless a ``name`` is given."""
        region = Region(
            fn, self._driver, name=name or f"region{self._made}", options=self._options, written_hint=written_hint
        )
        self._made += 1
        self._regions.add(region)
        return region

    def records(self) -> list[RegionRecord]:
        """What each region that is still alive says of itself, sorted by name."""
        return [region.record for region in sorted(self._regions, key=lambda region: region.record.name)]

    def close(self) -> None:
        """Free all that was captured; the regions stay usable, uncaptured."""
        for region in list(self._regions):
            region.close()
