"""The native half of the host driver: what it is built from. How is ``native_build``'s."""

from __future__ import annotations

from pathlib import Path

from pygraph.runtime.native_build import Loader, NativeLibrary

__all__ = ["library", "load"]

_SOURCES = ("native.cpp", "launches.h", "tensors.h")


def library() -> NativeLibrary:
    """What is built."""
    return NativeLibrary(
        module="_pygraph_host",
        label="host",
        directory=Path(__file__).resolve().parent,
        sources=_SOURCES,
        libraries=("c10", "torch_cpu", "torch_python"),
    )


load = Loader(library)
