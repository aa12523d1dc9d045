"""The operator that placement uses to bring CPU values to the device: ``pygraph::upload``, several tensors at once.

Importing this module registers it. It stays outside of captured regions, since the host reads the sources each call.
It is defined without ``torch.library.custom_op``, whose checks and autograd take 23 µs a call (of 33, for one number on
a CPU): its results share nothing with its sources, and below AOTAutograd nothing is differentiated any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from pygraph import compat

STAGED_BYTES = 64 * 1024
"""Tensors up to this size, in bytes, go through pinned memory, so that the host does not wait for the device."""

FEW = 8
"""Up to so many small tensors are copied one by one; more share one copy, which costs the host more for each."""

_ALIGNMENT = 16

_LIBRARY = torch.library.Library("pygraph", "DEF")
_LIBRARY.define(
    "upload(Tensor[] xs, Device device) -> Tensor[]",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides],
)


@torch.library.impl(_LIBRARY, "upload", "CompositeExplicitAutograd")
def upload(xs: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """A copy of each of ``xs`` on ``device``, with its layout and a storage of its own.

    In a capture of the caller's, numbers become part of it; for a tensor of any dimension it raises RuntimeError, as an
    uncompiled copy does.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return [_captured(x, device) for x in xs]
    small = [i for i, x in enumerate(xs) if on_gpu and x.nbytes <= STAGED_BYTES]
    staged = frozenset(small)
    if len(small) <= FEW:
        return [_copy(x, device, pinned=i in staged) for i, x in enumerate(xs)]
    results = [torch.empty_like(x, device=device) for x in xs]
    for i, x in enumerate(xs):
        if i not in staged:
            results[i].copy_(x)
    _copy_staged([results[i] for i in small], [xs[i] for i in small], device)
    return results


@functools.cache
def make_compilable() -> None:
    """Let AOTAutograd and Inductor meet the operator. What runs it does without: torch looks for the source of a fake
    implementation in every module that is loaded."""
    torch.library.register_fake(
        "pygraph::upload", lambda xs, device: [torch.empty_like(x, device=device) for x in xs], lib=_LIBRARY
    )
    if not compat.absent(compat.make_fallback):  # else Inductor does it when it meets the operator, where it may
        compat.make_fallback(torch.ops.pygraph.upload.default)


def _captured(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """By a kernel that holds the number: replays of the caller's graph have no other one, as where an operator takes a
    CPU tensor of no dimensions itself. (Pinned memory of ours would be somebody else's by then.)"""
    result = torch.empty_like(x, device=device)
    return result.copy_(x) if x.dim() else result.fill_(x.item())


def _copy(x: torch.Tensor, device: torch.device, *, pinned: bool) -> torch.Tensor:
    """Copied from pageable memory, the host waits for all that the stream was given before; pinned memory is ours, and
    torch does not hand it out again before the copy is done. The caller may write to ``x`` right away in either case.
    """
    if not pinned:
        return torch.empty_like(x, device=device).copy_(x)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)


def _copy_staged(results: list[torch.Tensor], xs: list[torch.Tensor], device: torch.device) -> None:
    """Through one pinned buffer: one copy to the device, one fused copy to the results' own memory."""
    starts, total = [], 0
    for x in xs:
        starts.append(total)
        total += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    for start, x in zip(starts, xs, strict=True):
        _window(host, start, x).copy_(x)
    there = host.to(device, non_blocking=True)
    torch._foreach_copy_(results, [_window(there, start, x) for start, x in zip(starts, xs, strict=True)])


def _window(buffer: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The part of a byte buffer that holds the elements of ``like``, in its shape."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
