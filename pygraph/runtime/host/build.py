"""The native half of the host driver: what it is built from. How is ``native_build``'s."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from pygraph.runtime.native_build import NativeLibrary

__all__ = ["build", "library_path", "load"]

MODULE = "_pygraph_host"
SOURCES = ("native.cpp", "launches.h", "tensors.h")


@functools.cache
def load() -> ModuleType:
    """The native module, built at first use. Raises CaptureError (``native-unavailable``) when it cannot be."""
    return _library().load()


def build(directory: Path | None = None) -> Path:
    """The compiled library, compiled into ``directory`` (the user's cache by default) unless it is there already."""
    return _library().build(directory)


def library_path(directory: Path | None = None) -> Path:
    """Where the library for this interpreter, this torch, this compiler and these sources lies."""
    return _library().path(directory)


def _library() -> NativeLibrary:
    libraries = ("c10", "torch_cpu", "torch_python")
    return NativeLibrary(MODULE, "host", Path(__file__).resolve().parent, SOURCES, libraries)
