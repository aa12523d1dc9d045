"""The native half of the CUDA driver: what it is built from, and where the CUDA headers are looked for."""

from __future__ import annotations

import functools
import logging
import os
import re
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

_log = logging.getLogger("pygraph.native")

_INTERFACE = {
    "c10/cuda/CUDACachingAllocator.h": "CUDAAllocator",
    "c10/core/CachingDeviceAllocator.h": "DeviceAllocator",
}
"""Torch's headers that declare its allocator, and the class in each."""


@functools.cache
def load() -> ModuleType:
    """The native module, built at first use. Raises CaptureError (``native-unavailable``) when it cannot be."""
    return library().load()


def library() -> NativeLibrary:
    """What is built. Raises CaptureError (``native-unavailable``) when no CUDA headers are found."""
    _warn_of_methods()
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


def unknown_methods(include: Path) -> list[str]:
    """Virtual methods of torch's allocator, by its headers in ``include``, that ``allocator.h`` does not hand on."""
    handed_on = (Path(__file__).resolve().parent / "allocator.h").read_text(encoding="utf-8")
    declared: list[str] = []
    for header, name in _INTERFACE.items():
        text = re.sub(r"//.*", "", (include / header).read_text(encoding="utf-8"))
        body = re.search(rf"^(?:class|struct)\b[^;{{]*\b{name} : .*?^}};", text, re.DOTALL | re.MULTILINE)
        declared += re.findall(r"\bvirtual\s[^;{]*?(?<!~)\b(\w+)\(", body.group() if body else "")
    return [name for name in dict.fromkeys(declared) if not re.search(rf"\b{name}\([^;]*\boverride\b", handed_on)]


@functools.cache
def _warn_of_methods() -> None:
    """Say once what a release of torch adds to its allocator: a method with a default does nothing, or raises, wherever
    it is called while a region is captured. (Without a default, the compiler refuses.)"""
    unknown = unknown_methods(Path(torch.__file__).resolve().parent / "include")
    if unknown:
        named = ", ".join(unknown)
        _log.warning(
            "pygraph: torch %s's allocator has methods that a capture does not hand on: %s", torch.__version__, named
        )
