"""Captures that the user requests before real calls, by ``pygraph.prepare``, on one thread.

On that thread, a region captures at the second call of its first size, and at the first call of each further size,
whatever its ledger says. It notes each call that was more than a replay.
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
    """Within the block, regions that this thread calls capture. Yields the list of variants or refusals they meet."""
    before, _here.met = _here.met, []
    try:
        yield _here.met
    finally:
        _here.met = before


def is_asked() -> bool:
    """True if this thread prepares captures."""
    return _here.met is not None


def note(met: Met) -> None:
    """Note a call that a region did not merely replay."""
    if _here.met is not None:
        _here.met.append(met)
