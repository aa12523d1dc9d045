"""The CPU as a target: a program such as Inductor emits, with a small C++ kernel, replayed by the host driver.

Operators are timed as they are called; on a CPU, host time and device time are the same.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pygraph import compat
from pygraph.calibration.targets import CHAINS, CHECKED_CHAINS, CHECKED_WIDES, WIDES, Program
from pygraph.calibration.timing import Effort, Sampler, calls_in, seconds_of
from pygraph.runtime.host import HostDriver

__all__ = ["CpuTarget"]

_ELEMENTS = 16
_HEAD = f'''
import torch
from pygraph.compat import AsyncCompile, dynamo_guards
empty_strided_cpu = dynamo_guards._empty_strided_cpu
async_compile = AsyncCompile()
negate = async_compile.cpp_pybinding(["const float*", "float*"], """
extern "C" void kernel(const float* in, float* out) {{ for (int i = 0; i < {_ELEMENTS}; ++i) out[i] = -in[i]; }}
""")
async_compile.wait(globals())
'''
_ALLOCATE = f"empty_strided_cpu(({_ELEMENTS},), (1,), torch.float32)"


class CpuTarget:
    """``Target`` for the CPU. Raises CaptureError where there is no compiler."""

    kind = "cpu"
    memory = 1 << 28

    def __init__(self, effort: Effort) -> None:
        self.driver = HostDriver()
        self._effort = effort
        self._folder = tempfile.TemporaryDirectory(prefix="pygraph-calibration-")
        self._programs = _load(Path(self._folder.name) / "programs.py")

    def matrices(self) -> Sequence[tuple[str, torch.dtype, str]]:
        """As users' programs have them; most run in float32 here."""
        return [
            ("f32", torch.float32, "highest"),
            ("bf16", torch.bfloat16, "highest"),
            ("f16", torch.float16, "highest"),
        ]

    def chain(self, launches: int) -> Program:
        """One argument, and a buffer for each launch that is dropped after the next."""
        return Program(getattr(self._programs, f"chain_{launches}"), _tensors(1), _tensors(1), launches)

    def wide(self, launches: int) -> Program:
        """One argument for each launch, and one buffer."""
        return Program(getattr(self._programs, f"wide_{launches}"), _tensors(launches), _tensors(launches), launches)

    def host(self, call: Callable[[], Any], launches: int) -> Sampler:  # noqa: ARG002
        """Time per call."""
        return self.device(call)

    def device(self, operator: Callable[[], Any]) -> Sampler:
        """Time per call."""
        operator()
        calls = calls_in(self._effort.block_s, min(seconds_of(operator, 1) for _ in range(3)))
        return lambda: seconds_of(operator, calls) / calls * 1e6


def _tensors(count: int) -> list[torch.Tensor]:
    return [torch.ones(_ELEMENTS) for _ in range(count)]


# -- programs ----------------------------------------------------------------------------------------------------------


def _load(path: Path) -> ModuleType:
    """The module of all programs, its kernel compiled. The driver reads the kernel's parameters from the file."""
    lines = [_HEAD]
    lines += [line for launches in (*CHAINS, *CHECKED_CHAINS) for line in _chain(launches)]
    lines += [line for launches in (*WIDES, *CHECKED_WIDES) for line in _wide(launches)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("pygraph_calibration_programs", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    with compat.inductor_config.patch(compile_threads=1):  # a pool of compiling processes takes longer to start
        spec.loader.exec_module(module)
    return module


def _chain(launches: int) -> Iterator[str]:
    yield f"def chain_{launches}(args):"
    yield "    buf0, = args"
    yield "    args.clear()"
    for i in range(launches):
        yield f"    buf{i + 1} = {_ALLOCATE}"
        yield f"    negate(buf{i}, buf{i + 1})"
        yield f"    del buf{i}"
    yield f"    return (buf{launches},)"


def _wide(launches: int) -> Iterator[str]:
    yield f"def wide_{launches}(args):"
    yield f"    {', '.join(f'arg{i}' for i in range(launches))}, = args"
    yield "    args.clear()"
    yield f"    buf0 = {_ALLOCATE}"
    yield from (f"    negate(arg{i}, buf0)" for i in range(launches))
    yield "    return (buf0,)"
