"""Inductor's scheduler as steering sees it: hooks, dependences between scheduled nodes, what they launch.

Answers differ from Inductor's own only while a listener is active on the thread and for main graphs.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pygraph import compat

__all__ = [
    "Listener",
    "draws",
    "indexed",
    "install_scheduler_hooks",
    "is_lowering",
    "is_tuple_getitem",
    "launches",
    "memory_allows",
    "origins",
    "scheduled_parts",
    "scheduler_listener",
    "scheduler_predecessors",
    "uncapturable_structure",
]

MEMORY_BUDGET = 1.1
"""How far a new order may raise Inductor's estimate of peak memory; the bound that Inductor itself uses."""


class Listener(Protocol):
    """What the hooks ask while a main graph is scheduled."""

    def should_partition(self, snode: Any) -> str | None:
        """The reason why a scheduled node stays outside, or None."""
        ...

    def reorder(self, snodes: list[Any]) -> list[Any]:
        """The final order of the scheduled nodes."""
        ...

    def record(self, partitions: Sequence[Sequence[Any]], outside: Sequence[bool], maps: list[Any]) -> list[Any]:
        """The partition maps to keep with the compiled graph."""
        ...


_active = threading.local()
_expecting: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def scheduler_listener(listener: Listener) -> Iterator[None]:
    """Have the hooks on this thread ask ``listener``."""
    previous = getattr(_active, "listener", None)
    _active.listener = listener
    try:
        yield
    finally:
        _active.listener = previous


def _listener() -> Listener | None:
    if isinstance(compat.inductor_virtualized.graph, compat.SubgraphLowering):
        return None
    return getattr(_active, "listener", None)


@functools.cache
def install_scheduler_hooks() -> None:
    """Hook into Inductor's scheduler, once for the process. Without a listener nothing changes."""
    scheduler: Any = compat.Scheduler
    ask, grouped, partition = scheduler.should_partition, scheduler.process_grouped_nodes, scheduler.graph_partition
    generate = scheduler._codegen

    def should_partition(self: Any, node: Any) -> str | None:
        listener = _listener()
        return ask(self, node) if listener is None else listener.should_partition(node)

    def process_grouped_nodes(self: Any) -> None:
        grouped(self)
        listener = _listener()
        if listener is not None and not getattr(self, "_multi_stream_nodes", False):
            self.nodes = listener.reorder(self.nodes)

    def graph_partition(self: Any) -> tuple[Any, Any]:
        partitions, signatures = partition(self)
        listener = _listener()
        if listener is not None:
            graph: Any = compat.inductor_virtualized.graph
            outside = [signature.skip_cudagraph for signature in signatures]
            graph.partition_maps = listener.record(partitions, outside, graph.partition_maps)
        return partitions, signatures

    def _codegen(self: Any, nodes: list[Any]) -> None:
        if _listener() is not None:
            _expect_sizes(compat.inductor_virtualized.graph.wrapper_code)
        generate(self, nodes)

    scheduler.should_partition = should_partition
    scheduler.process_grouped_nodes = process_grouped_nodes
    scheduler.graph_partition = graph_partition
    scheduler._codegen = _codegen


def _expect_sizes(wrapper: Any) -> None:
    """Have the code of a program or of a partition check the sizes of its inputs, as without partitions.

    torch 2.13 writes such a check before the first use of an input, from a list that it fills too late for partitions,
    and not at all for what lies outside of them. An input that Dynamo does not guard (the memory behind views that
    overlap, one of them written) would then be used with whatever size it has. Where there is no list (2.11), checks
    come first of all, and are complete.
    """
    if hasattr(wrapper, "_pending_input_asserts") and compat.inductor_config.size_asserts and wrapper not in _expecting:
        _expecting.add(wrapper)
        wrapper.codegen_input_size_asserts()


def scheduled_parts(snode: Any) -> list[Any]:
    """The unfused nodes that a scheduled node consists of."""
    parts = list(snode.get_nodes())
    if parts == [snode]:
        return parts
    return [inner for part in parts for inner in scheduled_parts(part)]


def scheduler_predecessors(snodes: Sequence[Any]) -> list[list[int]]:
    """For each scheduled node the positions of those that it must follow, Inductor's ordering edges included."""
    maker = {name: i for i, snode in enumerate(snodes) for name in snode.get_buffer_names()}
    found = []
    for i, snode in enumerate(snodes):
        needed = {maker[dep.name] for dep in snode.unmet_dependencies if dep.name in maker}
        found.append(sorted(needed - {i}))
    return found


def memory_allows(before: list[Any], after: list[Any]) -> bool:
    """Whether Inductor's estimate of peak memory stays within its own budget for reordering. No, where it has none."""
    if compat.absent(compat.prepare_planning_info) or compat.absent(compat.estimate_peak_memory):
        return False
    graph = compat.inductor_virtualized.graph
    scheduler = graph.scheduler
    outputs = type(before[0].unmet_dependencies)(graph.get_output_names())
    inputs = type(outputs)(graph.graph_inputs.keys())
    peak, freeable = compat.prepare_planning_info(
        before, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    )
    reordered, _ = compat.estimate_peak_memory(after, freeable, outputs)
    return bool(reordered <= peak * MEMORY_BUDGET)


def origins(part: Any) -> list[Any]:
    """The FX nodes that an unfused scheduled node computes, sorted by name.

    Inductor's origins of an external kernel are its own FX node and those of operands that were not realized when it
    was lowered; the buffers realized for it, which are nodes of their own, carry the latter. A buffer that was made on
    behalf of the kernel itself (a copy into other strides) carries all of them: then nothing is taken away. What takes
    one of several results of a kernel computes what the kernel does.

    A buffer that is realized because an external kernel, or a copy to another device, needs it gets the origin of that,
    too, although what it computes is not in it: at most a copy in other strides, which nothing speaks against.
    """
    node = part.node
    while isinstance(node, compat.MultiOutput):
        node = node.inputs[0]
    found = getattr(node, "origins", None) or ()
    if isinstance(node, compat.ComputedBuffer):
        where = part.get_device()
        found = [origin for origin in found if not _is_external(origin) and not _is_elsewhere(origin, where)] or found
    if isinstance(node, compat.ExternKernel):
        operands = {origin for read in node.get_read_writes().reads for origin in _buffer_origins(read.name)}
        found = [origin for origin in found if origin not in operands] or found
    return sorted(found, key=lambda origin: str(origin.name))


def _is_external(origin: Any) -> bool:
    """Whether an FX node is computed by an external kernel."""
    kernel = compat.ExternKernel
    operations = compat.inductor_virtualized.graph.operations
    return any(isinstance(one, kernel) and getattr(one, "origin_node", None) is origin for one in operations)


def _is_elsewhere(origin: Any, device: Any) -> bool:
    """Whether the result of an FX node lies on another kind of device than ``device``."""
    value = origin.meta.get("val")
    return isinstance(value, torch.Tensor) and device is not None and value.device.type != device.type


def _buffer_origins(name: str) -> Sequence[Any]:
    buffer = compat.inductor_virtualized.graph.try_get_buffer(name)
    return getattr(buffer, "origins", None) or ()


def launches(part: Any) -> bool:
    """Whether an unfused scheduled node runs anything at all."""
    return not isinstance(part, compat.NopKernelSchedulerNode) and not isinstance(part.node, compat.MultiOutput)


def uncapturable_structure(part: Any, device: str) -> str | None:
    """Why what Inductor made of a node cannot be captured, whatever it was made from; None when it can."""
    node = part.node
    if isinstance(node, compat.DeviceCopy):
        return "device-copy"
    if isinstance(node, (compat.Conditional, compat.WhileLoop)):
        return "control-flow"
    if isinstance(node, compat.DynamicScalar):
        return "host-read"
    if getattr(node, "unbacked_bindings", None):
        return "dynamic-shape"
    where = part.get_device()
    if where is not None and where.type != device:
        return "unsupported-device"
    return None


def draws(node: Any) -> bool:
    """Whether an FX node, made by Inductor's own passes, draws random numbers from a generator."""
    op = node.target
    if not isinstance(op, compat.OpOverload):
        return False
    seeds = op.name().startswith("prims::inductor_seed")
    return seeds or torch.Tag.nondeterministic_seeded in op.tags


def is_lowering(node: Any) -> bool:
    """Whether an FX node calls no operator, but what Inductor has written to lower what a pattern matched."""
    return getattr(node.target, "_inductor_lowering_function", False) is True


def indexed(node: Any) -> Any:
    """The node that a getitem takes one result of; any other node itself."""
    return indexed(node.args[0]) if is_tuple_getitem(node) and node.args else node


def is_tuple_getitem(node: Any) -> bool:
    """Whether an FX node only takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem
