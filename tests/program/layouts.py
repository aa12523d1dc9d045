"""Layouts of recordings for tests."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.program.layout import Lifetime, lifetimes, own_storage, pack
from pygraph.program.order import Order
from pygraph.program.program import Layout, Slot
from pygraph.program.recording import Recording

__all__ = ["meets", "plan"]


def plan(recording: Recording, slots: Sequence[Slot], order: Order | None = None) -> Layout:
    """Every intermediate placed, in ``order`` (None: as captured)."""
    fresh = own_storage(recording, slots)
    return pack(lifetimes(recording, slots, fresh, order), recording.alignment, fresh)


def meets(one: Lifetime, other: Lifetime) -> bool:
    """True if both may be alive at once."""
    if one.met:
        return bool(one.met >> other.index & 1)
    return one.first <= other.last and other.first <= one.last
