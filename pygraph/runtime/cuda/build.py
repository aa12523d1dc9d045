"""The native half of the CUDA driver: its source, its libraries, and the search for CUDA headers."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.native_build import Loader, NativeLibrary

__all__ = ["library", "load"]

_log = logging.getLogger("pygraph.runtime")

_INTERFACE = {
    "c10/cuda/CUDACachingAllocator.h": "CUDAAllocator",
    "c10/core/CachingDeviceAllocator.h": "DeviceAllocator",
}
"""Headers of torch that declare its allocator, with the name of the class in each."""


def library() -> NativeLibrary:
    """The native library. Building it needs CUDA headers."""
    _warn_of_methods()
    return NativeLibrary(
        "cuda",
        Path(__file__).resolve().with_name("native.cpp"),
        libraries=("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch_python"),
        includes=_headers,
    )


load = Loader(library)


def _headers() -> tuple[Path, ...]:
    """The directories of the CUDA headers: those of a toolkit, or of torch's and Triton's wheels together."""
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
    """Include folders of wheels, torch's first: the CUDA runtime's wheel lacks ``crt``, which Triton's has."""
    major = (torch.version.cuda or "").partition(".")[0]
    for root in _packages("nvidia"):
        yield from (root / f"cu{major}" / "include", root / "cuda_runtime" / "include")
    for root in _packages("triton"):
        yield root / "backends" / "nvidia" / "include"


def _packages(name: str) -> list[Path]:
    """Folders of a package, without importing it; none if it is not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []


def unknown_methods(include: Path) -> list[str]:
    """Virtual methods of torch's allocator, by its headers in ``include``, that ``allocator.h`` does not forward."""
    handed_on = (Path(__file__).resolve().parent / "allocator.h").read_text(encoding="utf-8")
    declared: list[str] = []
    for header, name in _INTERFACE.items():
        if not (include / header).exists():  # the compiler will report it
            continue
        text = re.sub(r"//.*", "", (include / header).read_text(encoding="utf-8"))
        body = re.search(rf"^(?:class|struct)\b[^;{{]*\b{name} : .*?^}};", text, re.DOTALL | re.MULTILINE)
        declared += re.findall(r"\bvirtual\s[^;{]*?(?<!~)\b(\w+)\(", body.group() if body else "")
    return [name for name in dict.fromkeys(declared) if not re.search(rf"\b{name}\([^;]*\boverride\b", handed_on)]


@functools.cache
def _warn_of_methods() -> None:
    """Warn once of methods that a release of torch adds to its allocator: one with a default does nothing, or raises,
    when it is called during a capture. (Without a default, the library does not compile.)"""
    unknown = unknown_methods(Path(torch.__file__).resolve().parent / "include")
    if unknown:
        named = ", ".join(unknown)
        _log.warning(
            "pygraph: torch %s's allocator has methods that a capture does not hand on: %s", torch.__version__, named
        )
