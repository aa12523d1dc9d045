"""Small copies of a captured graph as kernels, which the CUDA driver patches in half the host time of copy nodes.

The kernel is ``copy.ptx``. What is recorded of a launch goes on saying that it is a copy; only what executes differs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.cuda.edges import Edge, depend, read_edges
from pygraph.runtime.cuda.nodes import CopyNode, GraphNode, KernelNode
from pygraph.runtime.driver import Program
from pygraph.runtime.recording import WORD, Launch

__all__ = ["SMALL", "copied_bytes", "copies_as_kernels"]

SMALL = 64 << 10
"""Bytes of the largest copy that becomes a kernel (64 KiB). On an H200 such a kernel takes 1.14 µs, a copy node 1.09
(4 KiB: 1.04 and 0.98), and its patch 0.2 to 0.3 µs of the host's time, that of a copy node 0.55. What larger ones
lose on the device is more."""

_THREADS = 256
"""Threads of a block."""

_UNITS = (16, 4, 1)
"""Bytes that a thread copies at once: the first of these that both places are aligned to."""

_LAYOUT = ((0, WORD), (WORD, WORD), (2 * WORD, WORD))
"""Destination, source, bytes: the first two are where a copy's words are, which are also its slots'."""

_log = logging.getLogger("pygraph.cuda")
_functions: dict[int, Any] = {}
"""The kernel by CUDA context, None where the driver refused it. Graphs refer to it for as long as they live."""


def copied_bytes(launch: Launch) -> int:
    """Bytes that a copy moves: the first fact of its signature."""
    facts = launch.signature
    return int(facts[0]) if isinstance(facts, tuple) else 0


def copies_as_kernels(
    driver: ModuleType, graph: int, program: Program, nodes: Sequence[GraphNode]
) -> tuple[GraphNode, ...]:
    """``nodes``, which are those of ``graph`` by launch, after small copies in it were replaced by kernels.

    That is done to copies of at most SMALL bytes of which both operands are patched: those lie in memory of this
    device, as a constant need not. Edges stay; a copy with an edge that waits for less than completion is left alone,
    and so are all where the driver does not tell edges, or refuses the kernel. Needs a current context.
    Raises CaptureError (``driver-error``), with the graph in no defined state, where a node cannot be replaced.
    """
    small = _small(program, nodes)
    edges = read_edges(graph) if small else None
    if edges is None:
        return tuple(nodes)
    early = {node for edge in edges if any(edge.data[:3]) for node in (edge.earlier, edge.later)}
    small = [launch for launch in small if nodes[launch].handle not in early]
    function = _function(driver) if small else None
    if function is None:
        return tuple(nodes)
    made = {launch: _add(driver, graph, function, program.recording.launches[launch]) for launch in small}
    _exchange(driver, graph, edges, {nodes[launch].handle: node.handle for launch, node in made.items()})
    return tuple(made.get(launch, node) for launch, node in enumerate(nodes))


def _small(program: Program, nodes: Sequence[GraphNode]) -> list[int]:
    """The launches that are worth it, as far as their operands and sizes tell."""
    words: dict[int, set[int]] = {}
    for slot in program.slots:
        words.setdefault(slot.launch, set()).add(slot.word)
    return [
        launch.index
        for launch, node in zip(program.recording.launches, nodes, strict=True)
        if isinstance(node, CopyNode) and words.get(launch.index) == {0, 1} and 0 < copied_bytes(launch) <= SMALL
    ]


# -- in the graph -------------------------------------------------------------------------------------------------


def _add(driver: ModuleType, graph: int, function: Any, launch: Launch) -> KernelNode:
    """Add the kernel that does what ``launch`` does. It depends on nothing yet."""
    to, source = launch.words
    nbytes = copied_bytes(launch)
    blob = b"".join(word.to_bytes(WORD, "little") for word in (to, source, nbytes))
    held = ctypes.create_string_buffer(blob, len(blob))
    pointers = (ctypes.c_void_p * len(_LAYOUT))(*(ctypes.addressof(held) + offset for offset, _ in _LAYOUT))
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func, params.sharedMemBytes = function, 0
    params.gridDimX, params.gridDimY, params.gridDimZ = _blocks(to, source, nbytes), 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = _THREADS, 1, 1
    params.kernelParams = ctypes.addressof(pointers)
    handle = call(driver.cuGraphAddKernelNode, driver.CUgraph(graph), [], 0, params)
    return KernelNode(int(handle), blob, _LAYOUT, _LAYOUT)


def _blocks(to: int, source: int, nbytes: int) -> int:
    """Blocks for which each thread copies once, where replays are aligned as the capture was. Any number is right."""
    unit = next(unit for unit in _UNITS if not (to | source) % unit)
    return -(-nbytes // (unit * _THREADS))


def _exchange(driver: ModuleType, graph: int, edges: Sequence[Edge], made: Mapping[int, int]) -> None:
    """Give nodes ``made`` the edges of those that they replace, which are destroyed."""
    for edge in edges:
        ends = [made.get(node, node) for node in (edge.earlier, edge.later)]
        if ends != [edge.earlier, edge.later]:
            depend(driver, graph, *map(driver.CUgraphNode, ends))
    for node in made:
        call(driver.cuGraphDestroyNode, driver.CUgraphNode(node))


# -- the kernel ---------------------------------------------------------------------------------------------------


def _function(driver: ModuleType) -> Any:
    """The kernel in the current context; None, noted once, where the driver refuses it."""
    context = int(call(driver.cuCtxGetCurrent))
    if context not in _functions:
        _functions.setdefault(context, _load(driver))
    return _functions[context]


def _load(driver: ModuleType) -> Any:
    image = Path(__file__).with_name("copy.ptx").read_bytes() + b"\0"
    try:
        with _relaxed(driver):
            return call(driver.cuModuleGetFunction, call(driver.cuModuleLoadData, image), b"pygraph_copy")
    except CaptureError as error:
        _log.debug("pygraph: small copies stay copy nodes, which take longer to patch: %s", error.detail)
        return None


@contextlib.contextmanager
def _relaxed(driver: ModuleType) -> Iterator[None]:
    """Loading code allocates, which would break the captures of other threads that forbid that."""
    mode = call(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, mode)
