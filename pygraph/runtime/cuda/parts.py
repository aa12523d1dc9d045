"""Makes a captured graph ready for its addresses to be patched: words replaced, cut into segments, instantiated.

What lies in which segment is ``segments``' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.addresses import ALIGNMENT
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.cuda.capture import CudaCapture
from pygraph.runtime.cuda.nodes import CopyNode, GraphNode, KernelNode
from pygraph.runtime.driver import Program
from pygraph.runtime.recording import WORD, Launch

__all__ = ["Part", "anchor_copies", "split", "with_scratch"]


@dataclass(frozen=True)
class Part:
    """One segment's graph and its instance, as handles; both 0 for the first, which torch's own object holds.
    ``handles`` are its nodes' by launch."""

    graph: int
    instance: int
    handles: dict[int, int]


def split(
    driver: ModuleType, graph: torch.cuda.CUDAGraph, nodes: Sequence[GraphNode], bounds: Sequence[tuple[int, int]]
) -> list[Part]:
    """Cut ``graph`` at ``bounds`` (begin and end of each segment, by launch) and instantiate every part.

    Each part is a clone without the nodes of the others; torch's own graph becomes the first. What is instantiated
    here belongs to the caller.

    Instances are uploaded before anybody patches them. A kernel that is patched before its first upload takes 0.3 µs
    longer at every launch from then on (H200, driver 580), as nothing later puts right; one patched after it does not.
    """
    clones = [_clone(driver, graph.raw_cuda_graph(), nodes, *bound) for bound in bounds[1:]]
    begin, end = bounds[0]
    for node in nodes[end:]:
        call(driver.cuGraphDestroyNode, driver.CUgraphNode(node.handle))
    graph.instantiate()
    stream = torch.cuda.current_stream()
    for instance in (graph.raw_cuda_graph_exec(), *(part.instance for part in clones)):
        call(driver.cuGraphUpload, driver.CUgraphExec(instance), driver.CUstream(stream.cuda_stream))
    stream.synchronize()  # the first patch may come at once; a comparison waits for the stream after it anyway
    return [Part(0, 0, {i: nodes[i].handle for i in range(begin, end)}), *clones]


def _clone(driver: ModuleType, graph: int, nodes: Sequence[GraphNode], begin: int, end: int) -> Part:
    """A copy of launches ``begin`` to ``end`` of a graph, instantiated."""
    copy = call(driver.cuGraphClone, driver.CUgraph(graph))
    handles: dict[int, int] = {}
    for index, node in enumerate(nodes):
        found = call(driver.cuGraphNodeFindInClone, driver.CUgraphNode(node.handle), copy)
        if begin <= index < end:
            handles[index] = int(found)
        else:
            call(driver.cuGraphDestroyNode, found)
    instance: Any = call(driver.cuGraphInstantiate, copy, 0)
    return Part(int(copy), int(instance), handles)


def with_scratch(program: Program, nodes: Sequence[GraphNode]) -> tuple[GraphNode, ...]:
    """``nodes`` with parameters in which inert words of other people's memory point at scratch memory.

    Nothing is told to the graph here: a kernel's first patch hands over all of its parameters, before it first runs.
    Raises CaptureError: ``foreign-address`` for a kernel that is never patched, ``invalid-program`` for what is no
    word of a kernel, and without scratch memory.
    """
    recording, made = program.recording, list(nodes)
    sizes = {a.key: a.nbytes for a in recording.allocations}
    patched = {slot.launch for slot in program.slots if sizes[slot.kind, slot.index]}
    for inert in program.inert:
        if not inert.scratch:
            continue
        node, launch = made[inert.launch], recording.launches[inert.launch]
        if not recording.scratch or not isinstance(node, KernelNode) or node.places[inert.word][1] != WORD:
            raise CaptureError("invalid-program", f"word {inert.word} of {launch.name} cannot point at scratch memory")
        if inert.launch not in patched:
            said = f"{launch.name}: word {inert.word} is the only address of its kernel"
            raise CaptureError("foreign-address", said, launch=inert.launch)
        place, word = node.places[inert.word][0], launch.words[inert.word]
        address = recording.scratch + (word - recording.scratch) % ALIGNMENT
        made[inert.launch] = replace(node, blob=_written(node.blob, place, address))
    return tuple(made)


def _written(blob: bytes, place: int, word: int) -> bytes:
    return blob[:place] + word.to_bytes(WORD, "little") + blob[place + WORD :]


def anchor_copies(driver: ModuleType, program: Program, capture: CudaCapture) -> None:
    """Point the operands of copies that will be patched at ordinary memory before the graph is instantiated.

    An instantiated copy node accepts only addresses of the kind of memory that it was made with, and stand-ins are
    mapped while ordinary memory (as a rule) is not. Nothing runs on these addresses: the first replay replaces them.
    """
    moved: dict[int, set[int]] = {}
    for slot in program.slots:
        if isinstance(capture.nodes[slot.launch], CopyNode):
            moved.setdefault(slot.launch, set()).add(slot.word)
    if not moved:
        return
    reach = max(_copied_bytes(program.recording.launches[launch]) for launch in moved)
    reach += -reach % ALIGNMENT
    memory = torch.empty(2 * reach, dtype=torch.uint8, device=torch.device("cuda", capture.device))
    anchor = memory.data_ptr()
    for launch, words in moved.items():
        node = driver.CUgraphNode(capture.nodes[launch].handle)
        params = call(driver.cuGraphMemcpyNodeGetParams, node)
        if 0 in words:
            params.dstDevice, params.dstXInBytes = driver.CUdeviceptr(anchor), 0
        if 1 in words:
            params.srcDevice, params.srcXInBytes = driver.CUdeviceptr(anchor + reach), 0
        call(driver.cuGraphMemcpyNodeSetParams, node, params)


def _copied_bytes(launch: Launch) -> int:
    """Bytes that a copy moves: the first fact of its signature."""
    facts = launch.signature
    return int(facts[0]) if isinstance(facts, tuple) else 0
