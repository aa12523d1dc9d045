"""The CUDA driver: regions captured as CUDA graphs, and replayed with every address a parameter."""

from __future__ import annotations

from pygraph.runtime.cuda import build
from pygraph.runtime.cuda.driver import CudaDriver

__all__ = ["CudaDriver", "build"]
