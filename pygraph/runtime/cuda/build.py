"""The native half of the CUDA driver: what it is built from, and where the CUDA headers are looked for."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.native_build import Loader, NativeLibrary

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
        includes=_headers(),
    )


load = Loader(library)


def _headers() -> tuple[Path, ...]:
    """The directories of the CUDA headers: a toolkit's, or those that torch's and Triton's wheels bring together."""
    for folders in (*((folder,) for folder in _toolkits()), tuple(_wheels())):
        if all(any((folder / name).exists() for folder in folders) for name in _NEEDED):
            return folders
    raise CaptureError(
        "native-unavailable", "no CUDA headers were found; install Triton's wheel, or set CUDA_HOME to the toolkit"
    )


_NEEDED = ("cuda.h", "cuda_runtime_api.h", "crt/host_config.h")


def _toolkits() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    compiler = shutil.which("nvcc")
    if compiler is not None:
        yield Path(compiler).resolve().parent.parent / "include"
    yield Path("/usr/local/cuda/include")


def _wheels() -> Iterator[Path]:
    """The runtime's wheel lacks ``crt``, which Triton's has. Of both, what belongs to torch is found first."""
    major = (torch.version.cuda or "").partition(".")[0]
    for root in _packages("nvidia"):
        yield from (root / f"cu{major}" / "include", root / "cuda_runtime" / "include")
    for root in _packages("triton"):
        yield root / "backends" / "nvidia" / "include"


def _packages(name: str) -> list[Path]:
    """Where a package lies that need not be installed; it is not imported."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
