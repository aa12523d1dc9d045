"""The native half of the CUDA driver: what it is built from, and where the CUDA headers are looked for."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.native_build import NativeLibrary

__all__ = ["library", "load"]

_SOURCES = (
    "native.cpp",
    "allocator.h",
    "driver_api.h",
    "nodes.h",
    "plan.h",
    "random_order.h",
    "region.h",
    "transient.h",
)

_OLDEST, _NEWEST = (2, 11), (2, 13)
"""Torch releases whose allocator interface the sources are written for: a method that a later one adds would not be
handed on."""


@functools.cache
def load() -> ModuleType:
    """The native module, built at first use. Raises CaptureError (``native-unavailable``) when it cannot be."""
    return library().load()


def library() -> NativeLibrary:
    """What is built. Raises CaptureError (``native-unavailable``) for a torch that it is not written for, and when
    no CUDA headers are found."""
    major, minor = torch.__version__.split(".")[:2]
    if not _OLDEST <= (int(major), int(minor)) <= _NEWEST:
        raise CaptureError("native-unavailable", f"not written for torch {torch.__version__}")
    return NativeLibrary(
        module="_pygraph_cuda",
        label="cuda",
        directory=Path(__file__).resolve().parent,
        sources=_SOURCES,
        libraries=("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch_python"),
        includes=(_headers(),),
    )


def _headers() -> Path:
    """The directory of the CUDA toolkit's headers."""
    for directory in _candidates():
        if (directory / "cuda.h").exists() and (directory / "crt" / "host_config.h").exists():
            return directory
    raise CaptureError("native-unavailable", "no CUDA headers were found; set CUDA_HOME to the toolkit")


def _candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    compiler = shutil.which("nvcc")
    if compiler is not None:
        yield Path(compiler).resolve().parent.parent / "include"
    yield Path("/usr/local/cuda/include")
    site = Path(sysconfig.get_paths()["purelib"])
    yield from sorted(site.glob("nvidia/cu*/include"), reverse=True)
