"""The calling convention of fused kernels, and the library that holds the native half."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.program.recording import Output, OutputKind
from pygraph.runtime.description import Patch, RegionDescription, RegionStep
from pygraph.runtime.host.kernels import Parameter, parameters_of

_C_TYPES = {"i": "int64_t", "f": "float", "r": "const float*"}


def compile_kernel(directory: Path, kinds: str) -> int:
    """The address of a C function that stores each of its parameters, as a double, in what its last one points to."""
    declared = "".join(f"{_C_TYPES[kind]} p{i}, " for i, kind in enumerate(kinds))
    stores = "".join(f"out[{i}] = {'*' if kind == 'r' else ''}p{i};\n" for i, kind in enumerate(kinds))
    source = directory / f"{kinds[:40]}{len(kinds)}.cpp"
    source.write_text(f'#include <cstdint>\nextern "C" void kernel({declared}double* out) {{\n{stores}}}\n')
    return load_kernel(source)


def load_kernel(source: Path) -> int:
    """The address of the function ``kernel`` in a C++ file."""
    library = source.with_suffix(".so")
    subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    _loaded.append(loaded)
    return ctypes.cast(loaded.kernel, ctypes.c_void_p).value or 0


_loaded: list[ctypes.CDLL] = []


def storing(native: Any, launch: Any, outputs: Sequence[Output], nbytes: int, word: int = 0) -> Any:
    """A graph of one launch, which holds the address of the first of its ``outputs`` at ``word``, and of the others
    behind that: ``nbytes`` each."""
    owned = tuple((Patch(0, word + number, 0),) for number in range(len(outputs)))
    step = RegionStep(taken=tuple((number, nbytes) for number in range(len(outputs))))
    described = RegionDescription(owned=owned, steps=(step,), outputs=tuple(outputs))
    return native.HostGraph(described, launches=[launch], segments=[[launch]], exclusive=[])


KINDS = ["", "i", "f", "fi", "if" * 7, "f" * 8, "i" * 20 + "f" * 8, "f" * 8 + "i" * 20, "fri" * 8, "ri" * 100 + "f"]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[:14]}{len(kinds)}")
def test_integers_floats_and_addresses_in_any_order(native: Any, tmp_path: Path, kinds: str) -> None:
    values = [float(17 * (i + 1)) + (0.25 if kind == "f" else 0) for i, kind in enumerate(kinds)]
    held = [torch.tensor([value], dtype=torch.float32) for value in values]
    words = [
        t.data_ptr() if kind == "r" else int(t.view(torch.int32)) if kind == "f" else int(t)
        for t, kind in zip(held, kinds, strict=True)
    ]
    kernel = native.Kernel(compile_kernel(tmp_path, kinds), [*words, 0], [*(kind == "f" for kind in kinds), False])
    output = Output(OutputKind.FRESH, 0, 0, (len(kinds),), (1,), torch.float64)
    graph = storing(native, kernel, [output], 8 * max(len(kinds), 1), len(kinds))
    (out,) = graph.replay([])
    assert out.tolist() == values


def test_too_many_parameters(native: Any) -> None:
    for count, is_float in ((native.MAX_WORDS + 1, False), (native.MAX_FLOATS + 1, True)):
        with pytest.raises(RuntimeError, match="too many kernel parameters"):
            native.Kernel(1, [0] * count, [is_float] * count)


def test_parameters_are_read_from_the_source_of_the_module(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "first = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t', 'const float'], r'''x''')\n"
        "odd = async_compile.cpp_pybinding(['const float*', 'double'], r'''x''')\n"
        "other = async_compile.cpp(r'''x''')\n"
        "computed = async_compile.cpp_pybinding(types, r'''x''')\n"
        "plain = 3\n"
    )
    read, write, integer, real = Parameter.READ, Parameter.WRITE, Parameter.INTEGER, Parameter.FLOAT
    assert parameters_of(str(module)) == {"first": (read, write, integer, real)}
    assert parameters_of(str(tmp_path / "absent.py")) == {}
