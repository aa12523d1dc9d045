"""The stages that a graph goes through. The verifier has one rule table per stage; passes state theirs.

Operators: LIFTED → JUDGED → PLACED → PARTITIONED → INDIRECTED → SELECTED. Launches: RECORDED → SCHEDULED.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Stage"]


class Stage(Enum):
    """How far a graph has come. The value is the name in ``.pgir`` text."""

    LIFTED = "lifted"
    JUDGED = "judged"
    PLACED = "placed"
    PARTITIONED = "partitioned"
    INDIRECTED = "indirected"
    SELECTED = "selected"
    RECORDED = "recorded"
    SCHEDULED = "scheduled"

    @property
    def of_launches(self) -> bool:
        """Whether nodes are recorded kernel launches rather than operators."""
        return self in (Stage.RECORDED, Stage.SCHEDULED)

    def reached(self, other: Stage) -> bool:
        """Whether a graph at this stage satisfies what holds at ``other``."""
        order = list(Stage)
        return self.of_launches == other.of_launches and order.index(self) >= order.index(other)
