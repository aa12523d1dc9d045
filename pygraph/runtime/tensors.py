"""Arguments of a call: their bytes, fingerprints of these bytes, and copies at other addresses.

Bits are compared, not values: a NaN equals itself, and ``-0.0`` is not ``0.0``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import struct
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import TensorLayout

_CHUNK = 1 << 22
"""Words (8 bytes) that are mixed at a time, which takes three times their memory."""
_MULTIPLIERS = ((0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9), (0x14D049BB133111EB, 0x2545F4914F6CDD1D))


def span(tensor: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
    """The bytes from the first to the last element of ``tensor`` (or of its whole storage), as a flat uint8 view."""
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    start, length = tensor.storage_offset() * size, extent(tensor)
    if whole and length:
        start, length = 0, storage.nbytes()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, start, (length,), (1,)) if length else view


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to one past the last element; 0 when there is none."""
    return tensor.nbytes if tensor.is_contiguous() else TensorLayout.of(tensor).nbytes


def digest(tensor: torch.Tensor) -> bytes:
    """A fingerprint of the elements' bits in logical order, whatever the strides."""
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The ``digest`` of each tensor. Waits for a device once."""
    found = [b""] * len(tensors)
    sums: dict[torch.device, dict[int, torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous()
        nbytes = flat.numel() * flat.element_size()
        if nbytes and flat.device.type == "cpu":
            memory = (ctypes.c_char * nbytes).from_address(flat.data_ptr())
            found[index] = hashlib.sha256(memory).digest()
        elif nbytes:
            sums.setdefault(flat.device, {})[index] = words_digest(span(flat))
    for on_device in sums.values():
        for index, pair in zip(on_device, torch.stack([*on_device.values()]).tolist(), strict=True):
            found[index] = struct.pack("<2q", *pair)
    return found


def fingerprint(args: Sequence[Any]) -> bytes:
    """The fingerprint of all arguments of a call."""
    of_tensors = iter(digests([arg for arg in args if isinstance(arg, torch.Tensor)]))
    found = (next(of_tensors) if isinstance(arg, torch.Tensor) else repr(bits(arg)).encode() for arg in args)
    return b"".join(found)


def words_digest(data: torch.Tensor) -> torch.Tensor:
    """The digest of flat uint8 ``data``, computed on its device: two sums of mixed words, modulo 2**64."""
    tail = data.numel() % 8
    if tail:
        data = torch.cat((data, data.new_zeros(8 - tail)))
    words = data.clone().view(torch.int64) if data.storage_offset() % 8 else data.view(torch.int64)
    sums: list[torch.Tensor] = []
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        index = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
        for first, second in _MULTIPLIERS:
            mixed = (index * first).bitwise_xor_(chunk).mul_(second)
            mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
            sums.append(mixed.sum())  # another odd factor would not improve it
    return torch.stack(sums).view(-1, len(_MULTIPLIERS)).sum(0)


def same_bytes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """True if the tensors of each pair, of one layout, hold the same bytes from their first to their last element.
    Waits for a device once."""
    differ: dict[torch.device, list[torch.Tensor]] = {}
    for a, b in pairs:
        left, right = span(a), span(b)
        places = (left.data_ptr(), right.data_ptr(), left.storage_offset(), right.storage_offset(), left.numel())
        if not any(place % 8 for place in places):
            left, right = left.view(torch.int64), right.view(torch.int64)  # 8 times as fast, in an eighth of the memory
        if left.device.type != "cpu":
            differ.setdefault(left.device, []).append((left != right).any())
        elif not torch.equal(left, right):
            return False
    return not any(bool(torch.stack(found).any()) for found in differ.values())


def bits(value: object) -> tuple[str, object]:
    """A Python value in a form that is equal only for the same type and the same bits."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    return (type(value).__name__, value)


# -- copies ---------------------------------------------------------------------------------------------------------

_LINE = 64
_GUARD = 0xA5


@dataclass(frozen=True, slots=True)
class Block:
    """Arguments (by position) that reach into the same bytes ``low`` to ``high`` of one device's memory. The block
    covers the whole storage of those in ``whole``: their storage offset was baked into the capture."""

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
        """True if no guard byte next to a copy was overwritten."""
        devices: dict[torch.device, list[torch.Tensor]] = {}
        for guard in self.guards:
            devices.setdefault(guard.device, []).append(guard)
        return all(bool((torch.cat(guards) == _GUARD).all()) for guards in devices.values())


def blocks(args: Sequence[Any], sensitive: Collection[int] = ()) -> tuple[Block, ...]:
    """Blocks of the bytes of tensor arguments, merged if they overlap. Empty tensors are in no block."""
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


def take(args: Sequence[Any], chosen: Iterable[Block], together: Collection[Block] = ()) -> Snapshot:
    """Copy the ``chosen`` blocks of ``args``, to addresses that are congruent to theirs modulo a cache line. Each has a
    storage of its own, except that blocks ``together``, none of them ``whole``, share one per device. Raises
    CaptureError ``argument-misaligned``, and what an allocation raises."""
    copied: dict[int, Any] = {}
    guards: list[torch.Tensor] = []
    storages: dict[object, list[Block]] = {}
    for block in chosen:
        storages.setdefault(block.device if block in together else block, []).append(block)
    for members in storages.values():
        starts, end = list[int](), 0
        for block in members:
            starts.append(end + (block.low - end) % _LINE + (0 if block.whole else _LINE))
            end = starts[-1] + block.nbytes
        buffer = torch.full((end + _LINE,), _GUARD, dtype=torch.uint8, device=members[0].device)
        end = 0
        for block, start in zip(members, starts, strict=True):
            guards.append(buffer[end:start])
            end = start + block.nbytes
            for position in block.members:
                arg, whole = args[position], position in block.whole
                if id(arg) not in copied:
                    copied[id(arg)] = _place(arg, buffer, start - block.low, whole)
        guards.append(buffer[end:])
    return Snapshot([copied.get(id(arg), arg) for arg in args], tuple(guards))


def _place(arg: torch.Tensor, buffer: torch.Tensor, distance: int, whole: bool) -> torch.Tensor:
    """A tensor like ``arg``, filled with the bytes of ``arg`` (or its whole storage). Byte ``distance`` of ``buffer``
    corresponds to address 0."""
    source = span(arg, whole=whole)
    begin = distance + source.data_ptr()
    buffer[begin : begin + source.numel()].copy_(source)
    offset, rest = divmod(distance + arg.data_ptr(), arg.element_size())
    if rest:
        raise CaptureError("argument-misaligned", f"an address of {arg.dtype} is no multiple of its element's size")
    with torch.inference_mode(arg.is_inference()):
        view = torch.empty(0, dtype=arg.dtype, device=arg.device)
    return view.set_(buffer.untyped_storage(), offset, arg.size(), arg.stride())


# -- globals of a region's function -----------------------------------------------------------------------------------


@contextlib.contextmanager
def rebound(fn: types.FunctionType, substitute: Callable[[str, Any], Any]) -> Iterator[Callable[[list[Any]], Any]]:
    """``fn`` with each global replaced by the result of ``substitute`` for its name and value, until the block is left.

    Functions that share its globals are rebound, too. Leaving breaks the cycle between them and their globals: objects
    from ``substitute``, such as gigabytes of copies, would otherwise stay until Python collects garbage.
    """
    copied: dict[str, Any] = {}
    try:
        for name, value in fn.__globals__.items():
            own = isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__
            copied[name] = _over(value, copied) if own else substitute(name, value)
        yield _over(fn, copied)
    finally:
        copied.clear()


def module_constants(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The tensors among the globals of ``fn``, by name; none for a callable without globals."""
    return {name: value for name, value in getattr(fn, "__globals__", {}).items() if isinstance(value, torch.Tensor)}


def _over(fn: types.FunctionType, module: dict[str, Any]) -> types.FunctionType:
    """``fn`` with ``module`` as its globals."""
    copy = types.FunctionType(fn.__code__, module, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
