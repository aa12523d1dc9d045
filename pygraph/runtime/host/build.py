"""Source and libraries of the host driver's native half."""

from __future__ import annotations

from pathlib import Path

from pygraph.runtime.native_build import Loader, NativeLibrary

_SOURCE = Path(__file__).resolve().with_name("native.cpp")


def library() -> NativeLibrary:
    """The native library."""
    return NativeLibrary("host", _SOURCE, libraries=("c10", "torch_cpu", "torch_python"))


load = Loader(library)
