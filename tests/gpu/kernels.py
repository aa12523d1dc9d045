"""Triton kernels as a user writes them: in a module, so that their source can be read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled(x, weight, y, scale, count, BLOCK: tl.constexpr):
    """``y = x * weight * scale``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at, inside) * tl.load(weight + at, inside) * scale, inside)
