"""Ranks of a process group decide together whether they capture a region's collectives.

NCCL wants a collective to be captured by all of its ranks or by none. So each rank says under the number of a call what
it is about to replay, and reads what the others say. All get one result, whenever each asks: the first that has read
all, or has waited for SECONDS, decides for everybody.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from pygraph.compat import before_shutdown, resolve_process_group
from pygraph.program.program import Program
from pygraph.program.recording import is_functional_collective
from pygraph.runtime.answers import in_flight
from pygraph.runtime.events import counts

__all__ = ["VOTES", "Ballot", "Outcome", "collectives_of", "only_collectives", "open_ballot"]

VOTES = (4, 8, 16, 32, 64)
"""Calls of a region at which its ranks vote. A program that communicates is called by all of them in step."""

SECONDS = 30.0
"""Until a rank that says nothing counts as one that never will."""

_opened: Counter[tuple[str, str]] = Counter()
"""How many regions of a name have voted in a group."""

_captured: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many collectives of a process group were captured, and not sent."""

_joined: WeakKeyDictionary[Any, WeakSet[Closable]] = WeakKeyDictionary()
"""Process groups of which replays send collectives that were captured, with the regions that do."""


class Closable(Protocol):
    """What holds captured collectives."""

    def close(self) -> None: ...


class Outcome(str, Enum):
    """What ranks decided."""

    YES = "yes"
    NO = "no"
    LATE = "late"  # a rank said nothing


@dataclass(slots=True)
class Ballot:
    """The votes of a region, which goes by the same ``name`` on each rank of the process group ``group``, and is the
    ``number``-th of this name there. ``held`` counts votes: each is held once, and has one outcome for ever."""

    name: str
    group: str
    number: int = 0
    held: int = 0

    def due(self, call: int) -> bool:
        """Whether ranks vote at a call of the region, by its number."""
        return not self.over and call >= VOTES[self.held]

    @property
    def over(self) -> bool:
        """Whether there are no more votes."""
        return self.held >= len(VOTES)

    def place(self, call: int) -> str:
        """Where this rank is in its program. Ranks that are at the same place pair their collectives alike: it has the
        number of the call, that of all regions' calls, and that of the group's collectives, but for those that were
        captured, which a group does not count when they are replayed."""
        calls = counts["replays"] + counts["uncaptured"]
        group = resolve_process_group(self.group)
        return f"{call} {calls} {_sent(group) - _captured.get(group, 0)}"

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Collectives are captured: they do not count as sent."""
        group = resolve_process_group(self.group)
        before = _sent(group)
        try:
            yield
        finally:
            _captured[group] = _captured.get(group, 0) + _sent(group) - before

    def join(self, region: Closable) -> None:
        """Replays of ``region`` send captured collectives from now on, until the group is shut down: NCCL goes on
        waiting for graphs that hold some of a communicator before it destroys it."""
        _close_before_shutdown()
        _joined.setdefault(resolve_process_group(self.group), WeakSet()).add(region)

    def decide(self, question: str, answer: str | None) -> Outcome:
        """YES if every rank gives the same ``answer`` to ``question`` of this vote; None says no, and does not wait for
        others."""
        group = resolve_process_group(self.group)
        store, prefix = group.get_group_store(), f"pygraph/{self.name}/{self.number}/{self.held}/{question}"
        said = [f"{prefix}/{rank}" for rank in range(group.size())]
        store.set(said[group.rank()], answer or "")
        found = Outcome.NO
        if answer:
            try:
                store.wait(said, timedelta(seconds=SECONDS))
                agreed = all(store.get(key).decode() == answer for key in said)
                found = Outcome.YES if agreed else Outcome.NO
            except RuntimeError:  # a DistStoreError, where the build of torch has it
                found = Outcome.LATE
        decided = Outcome(store.compare_set(prefix, "", found.value).decode())
        return Outcome.NO if decided is Outcome.YES and not answer else decided


@functools.cache
def _close_before_shutdown() -> None:
    """Close the regions of a process group before it is shut down. Has an effect once."""

    def close(group: Any) -> None:
        for region in list(_joined.pop(group, ())):
            region.close()

    before_shutdown(close)


def _sent(group: Any) -> int:
    """Collectives of a process group so far, by its own count."""
    return int(group._get_sequence_number_for_group())


def open_ballot(name: str, group: str) -> Ballot:
    """The votes of another region."""
    _opened[name, group] += 1
    return Ballot(name, group, _opened[name, group])


def only_collectives(program: Program) -> bool:
    """Whether all that replays of ``program`` call are collectives."""
    return all(is_functional_collective(launch.name) for launch in program.calls)


def collectives_of(program: Program) -> tuple[str, str] | None:
    """The group of the collectives that ``program`` calls, and what is said of them: the same on ranks that send the
    same. None if there are none, if they belong to several groups, or to one that does not count them, or if some may
    be under way when a replay begins or ends."""
    calls = [launch for launch in program.calls if is_functional_collective(launch.name)]
    groups = {launch.eager.group for launch in calls if launch.eager is not None and launch.eager.group is not None}
    if len(groups) != 1 or any(in_flight(program)):
        return None
    group = groups.pop()
    try:
        _sent(resolve_process_group(group))
    except RuntimeError:  # a backend that does not count them: nobody could tell where a rank is
        return None
    return group, hashlib.sha256(repr([launch.signature for launch in calls]).encode()).hexdigest()
