"""``pygraph.Session``: regions with their own memory budget, which are frozen, measured and freed together.

    with pygraph.Session(memory_limit="2GiB") as session:
        decode = torch.compile(model, backend="pygraph")
        session.prepare(decode, {(0, 0): [1, 2, 4, 8]}, args=(tokens,))
        session.freeze()          # calls of other sizes run uncaptured from now on, and are counted
        serve(decode)

A program belongs to the session that is entered when it is compiled: at its first call, on that thread. Other programs
have a separate owner, whose limit is the option ``memory_limit``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pygraph.preparation import prepare
from pygraph.report.facts import bytes_text
from pygraph.runtime import live
from pygraph.settings import bytes_of

__all__ = ["RegionMemory", "Session", "SessionMemory"]


@dataclass(frozen=True)
class RegionMemory:
    """Memory of a region's captures.

    Args:
        captures: number of captures
        instances: bytes of the device that the captures take outside of torch's allocator, at most
        workspace: bytes of intermediates that each replay of the latest capture takes from torch's allocator
    """

    captures: int
    instances: int
    workspace: int


@dataclass(frozen=True)
class SessionMemory:
    """Memory of a session. Prints as a table.

    Args:
        regions: memory of each region, by its name in reports
        limit: bytes of a device that all instances may take; None if the session sets no limit
    """

    regions: Mapping[str, RegionMemory]
    limit: int | None

    @property
    def instances(self) -> int:
        """Bytes of all instances."""
        return sum(region.instances for region in self.regions.values())

    def __str__(self) -> str:
        rows = [
            f"{name}: {each.captures} captured, {bytes_text(each.instances)}, {bytes_text(each.workspace)} in a replay"
            for name, each in self.regions.items()
        ]
        limit = "" if self.limit is None else f" of {bytes_text(self.limit)}"
        return "\n".join([*rows, f"in all: {bytes_text(self.instances)}{limit}"])


class Session:
    """Owner of the regions of programs that are compiled while the session is entered. Leaving the block closes it.

    Args:
        memory_limit: bytes of a device that all its captures may take, as a number or text such as ``"512MiB"`` or
            ``"2GiB"``; the least recently used are freed. None: a tenth of the device's memory. A program's own option
            ``memory_limit`` overrides it
        log: logger for lines about the session's regions; default: ``pygraph.runtime``

    Raises OptionError for a limit that is not a number of bytes, and RuntimeError if entered twice or after ``close``.
    """

    def __init__(self, *, memory_limit: int | str | None = None, log: logging.Logger | None = None) -> None:
        self._owner = live.Owner(None if memory_limit is None else bytes_of("memory_limit", memory_limit))
        if log is not None:
            self._owner.log = log
        self._entered: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> Session:
        if self._entered is not None or self._owner.closed:
            raise RuntimeError("a session is entered once")
        self._entered = self.owning()
        self._entered.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
        self.close()

    def owning(self) -> contextlib.AbstractContextManager[None]:
        """Own the programs that this thread compiles within the block. Leaving the block does not close the session."""
        return live.owned_by(self._owner)

    def prepare(self, compiled: Callable[..., Any], sizes: Any, **options: Any) -> Any:
        """Run ``pygraph.prepare``. Programs that it compiles belong to the session, also with ``background``."""
        with self.owning():
            return prepare(compiled, sizes, **options)

    def freeze(self) -> None:
        """Stop capturing: calls of other sizes run uncaptured. For each size, the first call that would have been
        captured is logged, and counted as ``refused.frozen``. Trials of other launch orders end."""
        self._owner.frozen = True

    def thaw(self) -> None:
        """Allow captures again."""
        self._owner.frozen = False

    def memory(self) -> SessionMemory:
        """Current memory of the session's captures."""
        found: dict[str, RegionMemory] = {}
        for region in self._owner.regions:
            record = region.record
            before = found.get(record.name, RegionMemory(0, 0, 0))
            found[record.name] = RegionMemory(
                before.captures + len(region.captures()),
                before.instances + record.held_bytes,
                max(before.workspace, record.workspace_bytes),
            )
        return SessionMemory(found, self._owner.memory_limit)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of the session's regions, by name, as in ``pygraph.region_counters``."""
        return live.counters_of(self._owner.regions)

    def release(self) -> int:
        """Free the session's captures, and return their number. Later calls capture again, unless the session is
        frozen: a service that wakes up calls ``thaw`` and ``prepare``."""
        return sum(region.release() for region in self._owner.regions)

    def close(self) -> None:
        """Free the session's captures for good: its programs run uncaptured from now on."""
        self._owner.closed = True
        for region in self._owner.regions:
            region.close()
