"""The CUDA driver: regions captured as CUDA graphs, and replayed with every address as a parameter."""

from __future__ import annotations

import torch

from pygraph.runtime.cuda import build
from pygraph.runtime.cuda.driver import CudaDriver

__all__ = ["CudaDriver", "build", "make_driver"]


def make_driver() -> CudaDriver | None:
    """The driver; None if torch sees no CUDA device."""
    return CudaDriver() if torch.cuda.is_available() else None
