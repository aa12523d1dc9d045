"""The machine that times depend on, as text that processes agree on."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

__all__ = ["cpu_model", "kernel_driver"]


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
