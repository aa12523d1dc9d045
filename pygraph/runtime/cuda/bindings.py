"""The CUDA driver's own functions, through ``cuda.bindings``: loaded at first use, error codes turned into errors.

This module knows nothing of captures or programs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from pygraph.errors import CaptureError

__all__ = [
    *("add_conditional", "add_edges", "call", "has_conditionals", "load", "read_edges", "replace_edges"),
    "succeeded",
]

_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


@functools.cache
def load() -> ModuleType:
    """The driver's functions. Raises CaptureError (``bindings-unavailable``) without ``cuda.bindings``."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CaptureError("bindings-unavailable", f"cuda.bindings cannot be imported: {error}") from error
    module: ModuleType = driver
    return module


def read_edges(graph: int) -> list[tuple[int, int, bytes]]:
    """The edges of a graph, as (earlier node, later node, 8 bytes of data). The data are the port of the earlier node,
    the port of the later node, the type, and 5 unused bytes.

    This calls the CUDA driver's own function (12.3 or newer): before 13.3, ``cuda.bindings`` returns data in memory
    that is already freed. Raises CaptureError (``driver-error``) if the driver cannot list the edges.
    """
    try:
        query = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    except (OSError, AttributeError) as error:
        raise CaptureError("driver-error", f"the CUDA driver does not tell the edges of a graph: {error}") from error
    query.restype = ctypes.c_int
    query.argtypes = [*[ctypes.c_void_p] * 4, ctypes.POINTER(ctypes.c_size_t)]
    length = ctypes.c_size_t()
    failed = query(graph, None, None, None, ctypes.byref(length))
    count = length.value
    earlier, later, data = (ctypes.c_uint64 * count)(), (ctypes.c_uint64 * count)(), (ctypes.c_char * (8 * count))()
    if count and not failed:
        failed = query(graph, earlier, later, data, ctypes.byref(length))
    if failed:
        raise CaptureError("driver-error", "cuGraphGetEdges fails")
    facts = data.raw
    return [(earlier[i], later[i], facts[8 * i : 8 * i + 8]) for i in range(min(count, length.value))]


def replace_edges(graph: int, edges: Sequence[tuple[int, int]]) -> None:
    """Replace all edges of a graph by ``edges`` (earlier, later): the later node waits until the earlier one has
    completed. Raises CaptureError (``driver-error``)."""
    before = read_edges(graph)
    data = b"".join(data for *_, data in before)
    _change_edges("cuGraphRemoveDependencies_v2", graph, [edge[:2] for edge in before], data)
    add_edges(graph, edges)


def add_edges(graph: int, edges: Sequence[tuple[int, int]]) -> None:
    """Add ``edges`` (earlier, later) that a graph does not have yet: the later node waits until the earlier one has
    completed. Raises CaptureError (``driver-error``)."""
    _change_edges("cuGraphAddDependencies_v2", graph, edges, None)


def _change_edges(name: str, graph: int, edges: Sequence[tuple[int, int]], data: bytes | None) -> None:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.restype = ctypes.c_int
    function.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_size_t]
    array = ctypes.c_uint64 * len(edges)
    earlier, later = array(*(edge[0] for edge in edges)), array(*(edge[1] for edge in edges))
    if edges and function(graph, earlier, later, data, len(edges)):
        raise CaptureError("driver-error", f"{name} fails")


class _ConditionalParams(ctypes.Structure):
    """CUgraphNodeParams of a conditional node."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("condition", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("graphs", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("rest", ctypes.c_char * 200),
        ("reserved2", ctypes.c_longlong),
    )


_CONDITIONAL = 13
"""CU_GRAPH_NODE_TYPE_CONDITIONAL."""


_WITH_ELSE = 12_080
"""First CUDA version (12.8) in which a branch may have two bodies."""


@functools.cache
def has_conditionals() -> bool:
    """True if the CUDA driver has conditional nodes, and branches with two bodies."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        made = hasattr(load(), "cuGraphConditionalHandleCreate")
    except (OSError, AttributeError, CaptureError):
        return False
    return made and not failed and version.value >= _WITH_ELSE


def add_conditional(graph: int, context: int, handle: int, *, loop: bool, bodies: int) -> tuple[int, list[int]]:
    """Add a conditional node to a graph, without edges: WHILE for a ``loop``, else IF. Returns the node, and the
    empty graphs of its ``bodies``.

    This calls the driver's function with the signature of CUDA 12.3: the arguments of ``cuda.bindings`` differ between
    versions. Raises CaptureError (``host-loop``) if the driver cannot make conditional nodes.
    """
    try:
        add = ctypes.CDLL("libcuda.so.1").cuGraphAddNode_v2
    except (OSError, AttributeError) as error:
        raise CaptureError("host-loop", f"the CUDA driver has no conditional nodes: {error}") from error
    add.restype = ctypes.c_int
    add.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_size_t, ctypes.c_void_p]
    params = _ConditionalParams(type=_CONDITIONAL, handle=handle, condition=int(loop), size=bodies, context=context)
    node = ctypes.c_void_p()
    failed = add(ctypes.byref(node), graph, None, None, 0, ctypes.byref(params))
    if failed:
        raise CaptureError("host-loop", f"the CUDA driver makes no conditional node: error {failed}")
    return int(node.value or 0), [int(params.graphs[number] or 0) for number in range(bodies)]


def succeeded(result: Any) -> bool:
    """True if ``result``, returned by a driver function, begins with the code for success."""
    return int(result[0]) == 0


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function, and return the values after its error code: None, one value, or a tuple. Raises
    MemoryError if the code is out of memory, and CaptureError (``driver-error``) for any other error."""
    result = function(*arguments)
    if not succeeded(result):
        said = f"{function.__name__}: {getattr(result[0], 'name', result[0])}"
        if int(result[0]) == _OUT_OF_MEMORY:
            raise MemoryError(said)
        raise CaptureError("driver-error", said)
    values = result[1:]
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None
