"""What a measurement depends on besides the program: the machine and the versions, as text that processes agree on.

Which of it belongs to a device is the drivers' to say; what is done with it is ``remembering``'s.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path

import torch

from pygraph.version import __version__

__all__ = ["cpu_model", "kernel_driver", "versions"]


@functools.cache
def cpu_model() -> str:
    """The name of the processor, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@functools.cache
def kernel_driver() -> str:
    """The version of the NVIDIA driver in the system's kernel, or nothing where that does not show, as in some
    containers. (CUDA's own functions only tell which CUDA it supports.)"""
    for path in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        except OSError:
            continue
    return ""


@functools.cache
def versions() -> dict[str, str]:
    """Versions of all that makes or runs a program here; a package that is not there has none."""
    return {
        "pygraph": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
