"""Copies of a call's tensor arguments at other addresses, with the same aliasing, alignment and strides.

Arguments that share bytes share them in the copy; each copy stands between guard bytes. Used by ``comparison``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.digest import extent, span

__all__ = ["Block", "Snapshot", "blocks", "take"]

_LINE = 64
_GUARD = 0xA5


@dataclass(frozen=True, slots=True)
class Block:
    """Arguments (by position) that reach into the same bytes ``low`` to ``high`` of one device's memory.

    Those in ``whole`` are there with all of their storage: their storage offset was baked into the capture.
    """

    device: torch.device
    low: int
    high: int
    members: tuple[int, ...]
    whole: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes that a copy takes, without guards."""
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``args`` with some blocks replaced by copies, and the guard bytes around those."""

    args: list[Any]
    guards: tuple[torch.Tensor, ...]

    @property
    def intact(self) -> bool:
        """Whether nobody wrote beside a copy."""
        return all(bool((guard == _GUARD).all()) for guard in self.guards)


def blocks(args: Sequence[Any], sensitive: Collection[int] = ()) -> tuple[Block, ...]:
    """The bytes that tensor arguments reach into, merged where they overlap. Empty tensors are in no block."""
    found: list[Block] = []
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and extent(arg):
            whole = position in sensitive
            low = arg.untyped_storage().data_ptr() if whole else arg.data_ptr()
            high = low + (arg.untyped_storage().nbytes() if whole else extent(arg))
            found.append(Block(arg.device, low, high, (position,), frozenset({position} if whole else ())))
    found.sort(key=lambda block: (str(block.device), block.low, block.members))
    merged: list[Block] = []
    for block in found:
        last = merged[-1] if merged else None
        if last is None or last.device != block.device or block.low >= last.high:
            merged.append(block)
            continue
        high, members = max(last.high, block.high), tuple(sorted(last.members + block.members))
        merged[-1] = Block(block.device, last.low, high, members, last.whole | block.whole)
    return tuple(merged)


def take(args: Sequence[Any], chosen: Iterable[Block]) -> Snapshot:
    """Copy the ``chosen`` blocks of ``args``. Raises CaptureError ``argument-misaligned`` where an element's own size
    does not divide its address, and what an allocation raises."""
    copied: dict[int, Any] = {}
    guards: list[torch.Tensor] = []
    for block in chosen:
        buffer, start = _reserve(block, guards)
        for position in block.members:
            arg = args[position]
            if id(arg) not in copied:
                copied[id(arg)] = _place(arg, block, buffer, start, position in block.whole)
    return Snapshot([copied.get(id(arg), arg) for arg in args], tuple(guards))


def _reserve(block: Block, guards: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Memory for a block, congruent to it modulo a cache line, and the byte at which the block begins."""
    start = block.low % _LINE + (0 if block.whole else _LINE)
    buffer = torch.empty(start + block.nbytes + _LINE, dtype=torch.uint8, device=block.device)
    for guard in (buffer[:start], buffer[start + block.nbytes :]):
        guards.append(guard.fill_(_GUARD))
    return buffer, start


def _place(arg: torch.Tensor, block: Block, buffer: torch.Tensor, start: int, whole: bool) -> torch.Tensor:
    """A tensor like ``arg`` in ``buffer``, filled with what ``arg`` (or its whole storage) holds."""
    source = span(arg, whole=whole)
    origin = arg.untyped_storage().data_ptr() if whole else arg.data_ptr()
    begin = start + origin - block.low
    buffer[begin : begin + source.numel()].copy_(source)
    offset, rest = divmod(start + arg.data_ptr() - block.low, arg.element_size())
    if rest:
        raise CaptureError("argument-misaligned", f"an address of {arg.dtype} is no multiple of its element's size")
    view = torch.empty(0, dtype=arg.dtype, device=arg.device)
    return view.set_(buffer.untyped_storage(), offset, arg.size(), arg.stride())
