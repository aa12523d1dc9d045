"""The operator that placement uses to bring CPU values to the device: ``pygraph::upload``, several tensors at once.

Importing this module registers it. It stays outside of captured regions, since the host reads the sources at each call.
It is defined without ``torch.library.custom_op``, whose checks and autograd take 23 of 33 µs per call for one number on
a CPU: its results share no memory with its sources, and nothing is differentiated below AOTAutograd.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from pygraph import compat

STAGED_BYTES = 64 * 1024
"""Tensors up to this size, in bytes, go through pinned memory, so that the host does not wait for the device."""

FEW = 8
"""Up to this number, small tensors are copied one by one; more share one copy, at a higher host cost per tensor."""

_ALIGNMENT = 16

_LIBRARY = torch.library.Library("pygraph", "DEF")
_LIBRARY.define(
    "upload(Tensor[] xs, Device device) -> Tensor[]",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides],
)


@torch.library.impl(_LIBRARY, "upload", "CompositeExplicitAutograd")
def upload(xs: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """A copy of each of ``xs`` on ``device``, with its layout and a storage of its own.

    In a CUDA graph capture of the caller, numbers become constants of the graph; a tensor with dimensions raises
    RuntimeError, as an uncompiled copy does.
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
    """Register the operator's fake implementation and fallback, for AOTAutograd and Inductor. Programs run without:
    registration is slow, since torch searches every loaded module for the source of a fake implementation."""
    torch.library.register_fake(
        "pygraph::upload", lambda xs, device: [torch.empty_like(x, device=device) for x in xs], lib=_LIBRARY
    )
    if not compat.absent(compat.make_fallback):  # else Inductor makes one when it meets the operator, if it may
        compat.make_fallback(torch.ops.pygraph.upload.default)


def _captured(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``x`` by a kernel that holds the number, which replays of the caller's graph repeat, as for an operator that
    takes a 0-dimensional CPU tensor. (By then, pinned memory of ours would be reused.)"""
    result = torch.empty_like(x, device=device)
    return result.copy_(x) if x.dim() else result.fill_(x.item())


def _copy(x: torch.Tensor, device: torch.device, *, pinned: bool) -> torch.Tensor:
    """Copy ``x`` to ``device``. From pageable memory, the host waits for all earlier work of the stream; torch does not
    reuse our pinned memory before the copy is done. In either case, the caller may write to ``x`` right away.
    """
    if not pinned:
        return torch.empty_like(x, device=device).copy_(x)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)


def _copy_staged(results: list[torch.Tensor], xs: list[torch.Tensor], device: torch.device) -> None:
    """Copy through one pinned buffer: one copy to the device, and one fused copy to the results' own memory."""
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
