"""The fused C++ kernels of a compiled module: their C parameters, and the address of their entry point.

Only kernels that Inductor bound with ``cpp_pybinding`` are known; their parameters are read from the module's source.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import cast

from pygraph.errors import CaptureError
from pygraph.runtime.nondeterminism import nondeterministic_kernels

_SYMBOL = "kernel"
"""The ``extern "C"`` function that each of Inductor's kernel libraries exports."""


class Parameter(Enum):
    """Kind of a C parameter."""

    INTEGER = "integer"
    FLOAT = "float"
    READ = "read"
    """``const T*``: memory that is only read."""
    WRITE = "write"
    """``T*``: memory that is written, and may be read (partial stores, accumulation, results read back)."""

    @property
    def is_pointer(self) -> bool:
        """True if the parameter is an address."""
        return self in (Parameter.READ, Parameter.WRITE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused kernel. ``library`` keeps its code loaded; ``entry`` is the address of its function. Equal code has
    an equal ``file``: Inductor names a library by the hash of its source."""

    name: str
    parameters: tuple[Parameter, ...]
    file: str
    entry: int
    library: ctypes.CDLL
    nondeterministic: bool
    """True if its results may differ between runs."""


def is_native_function(value: object) -> bool:
    """True if ``value`` is the kernel of a shared library that Inductor compiled."""
    if not isinstance(value, types.BuiltinFunctionType) or not isinstance(value.__self__, types.ModuleType):
        return False
    return value.__name__ == _SYMBOL and str(getattr(value.__self__, "__file__", "")).endswith(".so")


def find_kernel(name: str, value: types.BuiltinFunctionType, source: str) -> Kernel:
    """The kernel bound to the global ``name`` of the module in the file ``source``.

    Raises CaptureError (``unknown-kernel``) if the module does not list its parameters.
    """
    parameters = parameters_of(source).get(name)
    if parameters is None:
        raise CaptureError("unknown-kernel", f"{name}: its C parameters are not in {source}")
    path = Path(str(cast(types.ModuleType, value.__self__).__file__))
    library = ctypes.CDLL(str(path))
    entry = ctypes.cast(getattr(library, _SYMBOL), ctypes.c_void_p).value
    if entry is None:
        raise CaptureError("unknown-kernel", f"{name}: {path} has no entry point")
    return Kernel(name, parameters, path.name, entry, library, name in nondeterministic_kernels(source))


@functools.lru_cache(maxsize=256)
def parameters_of(source: str) -> Mapping[str, tuple[Parameter, ...]]:
    """The C parameters of each kernel that the module in the file ``source`` binds, by the kernel's global name. The
    module contains ``name = async_compile.cpp_pybinding(argtypes, source)``.

    A kernel with a parameter of an unknown C type is left out. Empty if the file cannot be read as Python.
    """
    try:
        tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return types.MappingProxyType({})
    found: dict[str, tuple[Parameter, ...]] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(name)],
                value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[ast.List(argtypes), *_]),
            ):
                found.pop(name, None)
                parameters = [_parameter(each.value) if isinstance(each, ast.Constant) else None for each in argtypes]
                if None not in parameters:
                    found[name] = tuple(p for p in parameters if p is not None)
    return types.MappingProxyType(found)


def _parameter(argtype: object) -> Parameter | None:
    """The kind of a parameter of C type ``argtype``; None for an unknown type."""
    words = str(argtype).replace("*", " * ").split()
    if words and words[-1] == "*" and words.count("*") == 1:
        return Parameter.READ if words[0] == "const" else Parameter.WRITE
    plain = " ".join(word for word in words if word != "const")
    return {"int64_t": Parameter.INTEGER, "long": Parameter.INTEGER, "float": Parameter.FLOAT}.get(plain)
