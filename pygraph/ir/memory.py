"""A buffer's content as pieces, each a slice of what some launch wrote: the memory of interpreted launches."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Piece", "RangedMemory"]


class Piece(NamedTuple):
    """Bytes ``start`` to ``end`` of a buffer: the bytes from ``origin`` on of ``content``."""

    start: float
    end: float
    origin: float
    content: object

    def cut(self, start: float, end: float) -> Piece:
        """The part of this piece between ``start`` and ``end``."""
        low, high = max(start, self.start), min(end, self.end)
        return Piece(low, high, self.origin + low - self.start, self.content)


class RangedMemory:
    """Bytes 0 to infinity, which at first hold ``content``."""

    __slots__ = ("_pieces",)

    def __init__(self, content: object) -> None:
        self._pieces = [Piece(0.0, math.inf, 0.0, content)]

    def read(self, start: float, end: float) -> tuple[object, ...]:
        """What lies between ``start`` and ``end``: (distance from start, length, origin, content) of each piece."""
        found = _joined(_within(self._pieces, start, end)) if start < end else []
        return tuple((piece.start - start, piece.end - piece.start, piece.origin, piece.content) for piece in found)

    def write(self, start: float, end: float, content: object) -> None:
        """Replace what lies between ``start`` and ``end``."""
        if start >= end:
            return
        before, after = _within(self._pieces, 0.0, start), _within(self._pieces, end, math.inf)
        self._pieces = [*before, Piece(start, end, 0.0, content), *after]

    def pieces(self) -> tuple[Piece, ...]:
        """The whole content, in the fewest pieces."""
        return tuple(_joined(self._pieces))


def _within(pieces: list[Piece], start: float, end: float) -> list[Piece]:
    return [piece.cut(start, end) for piece in pieces if piece.start < end and start < piece.end]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Adjacent pieces of one content become one, so that equal contents look equal however they came about."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.content == piece.content and piece.origin - last.origin == piece.start - last.start:
            joined[-1] = last._replace(end=piece.end)
        else:
            joined.append(piece)
    return joined
