"""Effects of a node besides computing its outputs from its inputs. Operands are positions in the flattened operands."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FLAGS", "NAMED", "PURE", "Effects"]

FLAGS = ("sync", "dynamic", "barrier")
"""Boolean effects, in the order of their text."""
NAMED = ("rng", "collective")
"""Effects that name a resource; nodes with the same resource stay in order."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of one node. Operands are positions in ``KernelNode.inputs``.

    Args:
        writes: operands whose memory the node writes
        aliases: pairs ``(output, operand)`` that share memory: views and in-place results
        reads: operands whose memory the node reads; None: all
        rng: generator from which the node draws, or may draw (``cpu``, ``cuda:0``); such nodes keep their order
        sync: the host waits for the device, or reads a device value
        dynamic: shapes of the outputs depend on data
        collective: process group of a collective; collectives of one group keep their order
        barrier: no node may move across this one, in either direction
    """

    writes: tuple[int, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    reads: tuple[int, ...] | None = None
    rng: str | None = None
    sync: bool = False
    dynamic: bool = False
    collective: str | None = None
    barrier: bool = False


PURE = Effects()
"""Effects of a node that only computes outputs in new memory: it may be moved, duplicated or removed freely."""
