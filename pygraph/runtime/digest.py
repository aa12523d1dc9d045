"""Fingerprints of tensors by their bits.

Bits, not values: a NaN equals itself and ``-0.0`` is not ``0.0``. What is compared with what is ``comparison``'s.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct

import torch

__all__ = ["bits", "digest", "extent", "same_bytes", "span", "words_digest"]

_CHUNK = 1 << 20
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
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def digest(tensor: torch.Tensor) -> bytes:
    """A fingerprint of the elements' bits in logical order, whatever the strides."""
    flat = tensor.detach().contiguous()
    nbytes = flat.numel() * flat.element_size()
    if not nbytes:
        return b""
    if flat.device.type == "cpu":
        memory = (ctypes.c_char * nbytes).from_address(flat.data_ptr())
        return hashlib.sha256(memory).digest()
    return words_digest(span(flat))


def words_digest(data: torch.Tensor) -> bytes:
    """The same for flat uint8 ``data``, computed on its device: two sums of mixed words, modulo 2**64."""
    tail = data.numel() % 8
    if tail:
        data = torch.cat((data, data.new_zeros(8 - tail)))
    words = data.clone().view(torch.int64) if data.storage_offset() % 8 else data.view(torch.int64)
    sums = [torch.zeros((), dtype=torch.int64, device=data.device) for _ in _MULTIPLIERS]
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        index = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
        for lane, (first, second) in enumerate(_MULTIPLIERS):
            mixed = (chunk ^ (index * first)) * second
            mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * first
            sums[lane] += mixed.sum()
    return struct.pack("<2q", *torch.stack(sums).tolist())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same layout hold the same bytes from their first to their last element."""
    left, right = span(a), span(b)
    whole = left.numel() // 8 * 8
    starts = (left.data_ptr(), right.data_ptr(), int(left.storage_offset()), int(right.storage_offset()))
    if not whole or any(start % 8 for start in starts):
        return torch.equal(left, right)
    same = torch.equal(left[:whole].view(torch.int64), right[:whole].view(torch.int64))  # 8 times as fast
    return same and torch.equal(left[whole:], right[whole:])


def bits(value: object) -> tuple[str, object]:
    """A Python value as something that is equal only to the same type and the same bits."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    return (type(value).__name__, value)
