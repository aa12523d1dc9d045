"""What is decided by timing kernels: kept once for all sides of a program, and timed by one process at a time.

Inductor's part in it is in ``choosing``; here are the file of decisions, the lock, and how sides compare.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pygraph.cache import locked, read_json, write_atomically

__all__ = ["Choices", "QuietGpu", "choice_notes", "counted"]

Chosen = Mapping[str, Mapping[str, str]]
"""By side: the configuration in use of each kernel that had several, by the kernel's key."""


class Choices:
    """Decisions by key in a JSON file. The first one made stands, whoever makes it; each is on disk at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Any | None:
        """What was decided, or None."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> Any:
        """Decide, unless it has been decided already; returns what stands. Raises OSError."""
        with locked(self._path.with_suffix(".lock")):
            known = self._read()
            if key not in known:
                known[key] = value
                write_atomically(self._path, json.dumps(known, indent=1) + "\n")
            return known[key]

    def _read(self) -> dict[str, Any]:
        found = read_json(self._path)
        return found if isinstance(found, dict) else {}


class QuietGpu:
    """The right to be alone on the GPU, which one process has at a time: a lock on a file.

    It belongs to the process, not to a thread: a backward's kernels are chosen in a thread of autograd while the one
    that made the call, and holds the lock, waits for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._file: IO[str] | None = None
        self._holders = 0
        self._pausing = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for it and hold it; may be nested. Raises OSError."""
        with self._mutex:
            self._holders += 1
            self._settle()
        try:
            yield
        finally:
            with self._mutex:
                self._holders -= 1
                self._settle()

    def pause(self) -> None:
        """Whoever holds it does so again from ``resume`` on; those who come in between hold it all the same."""
        with self._mutex:
            self._pausing = self._holders
            self._settle()

    def resume(self) -> None:
        """End a pause: wait for it where it was held. Raises OSError."""
        with self._mutex:
            self._pausing = 0
            self._settle()

    def _settle(self) -> None:
        """Have the lock if and only if somebody holds it who does not pause."""
        if self._holders > self._pausing and self._file is None:
            self._file = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        elif self._holders <= self._pausing and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None


def counted(chosen: Chosen) -> dict[str, dict[str, int]]:
    """By side, how many of its kernels run as they do on the first side (``shared``), and how many do not (``own``)."""
    first: Mapping[str, str] = next(iter(chosen.values()), {})
    found = {}
    for side, kernels in chosen.items():
        shared = sum(first.get(key) == config for key, config in kernels.items())
        found[side] = {"shared": shared, "own": len(kernels) - shared}
    return found


def choice_notes(chosen: Chosen) -> list[str]:
    """A sentence for each side with choices that are not the first side's."""
    first, notes = next(iter(chosen), ""), []
    for side, counts in counted(chosen).items():
        if not counts["own"]:
            continue
        among = sum(counts.values())
        other = sum(key in chosen[first] and chosen[first][key] != config for key, config in chosen[side].items())
        note = f"{side}: {counts['own']} of {among} configurations of kernels are not {first}'s"
        notes.append(f"{note}: {other} of the same kernels" if other else f"{note}, which has no such kernels")
    return notes
