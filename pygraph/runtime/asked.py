"""Captures that the user asks for ahead of real calls, by ``pygraph.prepare``, on one thread.

A region captures there at the second call of its first size, and at the first call of each further one, whatever its
ledger says; and it tells of each call that it did not merely replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeAlias

from pygraph.runtime.provenance import Refusal
from pygraph.runtime.variants import Variant

Met: TypeAlias = Variant | Refusal
"""The variant of a call that ran uncaptured or was captured, or why the call has none."""


class _Here(threading.local):
    met: list[Met] | None = None


_here = _Here()


@contextlib.contextmanager
def asking() -> Iterator[list[Met]]:
    """Regions capture what this thread calls. Yields the list of what they meet."""
    before, _here.met = _here.met, []
    try:
        yield _here.met
    finally:
        _here.met = before


def is_asked() -> bool:
    """True if this thread prepares captures."""
    return _here.met is not None


def note(met: Met) -> None:
    """A region did not merely replay a call."""
    if _here.met is not None:
        _here.met.append(met)
