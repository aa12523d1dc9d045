"""The native half of the host driver: what it is built from. How is ``native_build``'s."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from pygraph.runtime.native_build import NativeLibrary

__all__ = ["library", "load"]

_SOURCES = ("native.cpp", "launches.h", "tensors.h")


@functools.cache
def load() -> ModuleType:
    """The native module, built at first use. Raises CaptureError (``native-unavailable``) when it cannot be."""
    return library().load()


def library() -> NativeLibrary:
    """What is built."""
    return NativeLibrary(
        module="_pygraph_host",
        label="host",
        directory=Path(__file__).resolve().parent,
        sources=_SOURCES,
        libraries=("c10", "torch_cpu", "torch_python"),
    )
