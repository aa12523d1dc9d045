"""The machine that times depend on, as text that processes agree on."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


def machine(device: torch.device | None) -> str:
    """All that times on a CUDA device, or on the CPU (None), depend on; without the versions of torch and PyGraph."""
    if device is None:
        return f"{cpu_model()}, {torch.get_num_threads()} threads"
    facts, allocator = torch.cuda.get_device_properties(device), torch.cuda.get_allocator_backend()
    size = f"{facts.multi_processor_count} multiprocessors, {facts.total_memory} bytes"  # of the part that is visible
    return f"{facts.name}, {size}, driver {kernel_driver()}, {allocator}; {cpu_model()}"


@functools.cache
def cpu_model() -> str:
    """The name of the processor, as the system has it."""
    lines = _text("/proc/cpuinfo").splitlines()  # of Linux
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@functools.cache
def kernel_driver() -> str:
    """The version of the NVIDIA driver in the system's kernel, or nothing where that does not show, as in some
    containers. (CUDA's own functions only tell which CUDA it supports.)"""
    text = _text("/sys/module/nvidia/version") or _text("/proc/driver/nvidia/version")
    return text.partition("\n")[0].strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
