"""The host driver: Inductor's CPU regions recorded and replayed with the semantics of a CUDA graph."""

from __future__ import annotations

from pygraph.runtime.host import build
from pygraph.runtime.host.driver import HostDriver

__all__ = ["HostDriver", "build", "make_driver"]

make_driver = HostDriver
