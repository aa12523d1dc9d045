"""The queue of regions that want a trial: one region of the process is on trial at a time.

Another region's trial would change what is measured. It also knows what trials have lost, since the budget is one for
all of a program's regions. Knows tokens and seconds only, neither regions nor trials.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

__all__ = ["TRIALS", "TrialQueue"]

_REMEMBERED = 64
"""Trials whose losses are known: the last ones."""


class TrialQueue:
    """Gives one slot to tokens in the order in which they came; safe to use from several threads.

    Regions that wait ask again and again. One that no longer asks, since its program is done, loses its place or the
    slot once another has asked ``patience`` times in the meantime.
    """

    def __init__(self, patience: int = 256) -> None:
        self._patience = patience
        self._lock = Lock()
        self._holder: object | None = None
        self._waiting: dict[object, int] = {}
        self._losses: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def enter(self, token: object) -> bool:
        """Whether ``token`` has the slot from now on; it waits in line if not. A holder keeps it by asking again."""
        with self._lock:
            if self._holder is token:
                self._forgive()
                return True
            asked = self._waiting.get(token, 0) + 1
            self._waiting[token] = asked
            first = self._holder is None and next(iter(self._waiting)) is token
            if not first and asked <= self._patience:
                return False
            del self._waiting[token]
            self._holder = token
            self._forgive()
            return True

    def leave(self, token: object) -> None:
        """Give the slot, or the place in line, back."""
        with self._lock:
            self._waiting.pop(token, None)
            if self._holder is token:
                self._holder = None
                self._forgive()

    def charge(self, when: float, lost: float) -> None:
        """A trial that ended at ``when`` has lost so much; both in seconds."""
        with self._lock:
            self._losses.append((when, lost))

    def charged(self, since: float) -> float:
        """Seconds that trials which ended after ``since`` have lost."""
        with self._lock:
            return sum(lost for when, lost in self._losses if when > since)

    def _forgive(self) -> None:
        """Whoever waits starts to count anew how often it has asked in vain."""
        self._waiting = dict.fromkeys(self._waiting, 0)


TRIALS = TrialQueue()
"""The queue of this process."""
