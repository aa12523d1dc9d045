"""What the native half of the host driver is built from."""

from __future__ import annotations

from pathlib import Path

from pygraph.runtime.native_build import Loader, NativeLibrary

__all__ = ["library", "load"]


def library() -> NativeLibrary:
    """What is built."""
    source = Path(__file__).resolve().with_name("native.cpp")
    return NativeLibrary("host", source, libraries=("c10", "torch_cpu", "torch_python"))


load = Loader(library)
