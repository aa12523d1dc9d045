"""Keys of the machine and the program on which times depend, as text that is the same in all processes."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch


def machine(device: torch.device | None) -> str:
    """Facts on which times on a CUDA device, or the CPU (None), depend, without the versions of torch and PyGraph."""
    if device is None:
        return f"{cpu_model()}, {torch.get_num_threads()} threads"
    facts, allocator = torch.cuda.get_device_properties(device), torch.cuda.get_allocator_backend()
    size = f"{facts.multi_processor_count} multiprocessors, {facts.total_memory} bytes"  # of the part that is visible
    return f"{facts.name}, {size}, driver {kernel_driver()}, {allocator}; {cpu_model()}"


@functools.cache
def cpu_model() -> str:
    """The name of the processor, as reported by the system."""
    lines = _text("/proc/cpuinfo").splitlines()  # of Linux
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@functools.cache
def kernel_driver() -> str:
    """The version of the NVIDIA driver in the system's kernel, or an empty string if it is not visible, as in some
    containers. (CUDA's own functions only return the CUDA version that it supports.)"""
    text = _text("/sys/module/nvidia/version") or _text("/proc/driver/nvidia/version")
    return text.partition("\n")[0].strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def program_key(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[str, ...] | None:
    """Facts on which calls of an Inductor function depend, except its ``args`` and PyGraph: the text of its module,
    with the source of every kernel, versions, and the machine. None if it is in no file, or depends on a closure.
    Implementations of custom operators are not covered."""
    if not isinstance(fn, FunctionType) or fn.__closure__:
        return None
    source = _source_digest(fn.__code__.co_filename)
    versions = torch.__version__, platform.python_version()
    return None if source is None else (*versions, machine(device_of(args)), source, fn.__qualname__)


def device_of(args: Sequence[Any]) -> torch.device | None:
    """The first device of ``args`` other than the CPU, if any."""
    devices = (arg.device for arg in args if isinstance(arg, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), None)


@functools.lru_cache(maxsize=256)
def _source_digest(path: str) -> str | None:
    """Hash of a Python file without comment lines, which hold paths, and numbers that count earlier compilations."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()
