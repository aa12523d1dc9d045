"""Copies between host and device: CPU values are uploaded in batches, copies to the host come last.

Both make as few turns between host and device as the dependences allow: host work without dependences on the device,
then one upload, then device work, then host work that waits for it, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from pygraph.ir import PLACEMENT, UPLOAD, Cost, Graph, KernelNode, TensorType, Value
from pygraph.ir.cost import total
from pygraph.passes.analysis import dependence_lists
from pygraph.passes.legality.rules import Target, devices_of, is_on_host
from pygraph.passes.placement.facts import (
    Facts,
    computes_only,
    has_own_memory,
    host_operands,
    is_copy_in,
    is_copy_out,
    put_after,
)
from pygraph.passes.region_order import Kind, earliest


class _Request(NamedTuple):
    """A CPU value to upload, in its state after the node ``since`` (None: at the start).

    ``copy`` is the node that uses it, if that is a copy whose result must not share memory with another copy.
    """

    value: Value
    since: KernelNode | None
    copy: KernelNode | None


def batch_uploads(graph: Graph, target: Target) -> Counter[str]:
    """Upload the CPU values that nodes on the device use, in batches, as early as the dependences allow.

    before:  %w@cpu ─ _to_copy ─ mm@cuda      %s@cpu ─ mul@cuda
    after:   %w, %s ─ upload0 ─┬─ mm@cuda
                               └─ mul@cuda

    Parameters are uploaded at each call, since the caller may have written them in between. Returns how many values are
    ``uploaded``, in how many ``batches``, and how many single ``copies`` were removed.
    """
    requests = list(_requests(graph, target))
    if not requests:
        return Counter()
    singles, copies = _upload_singly(graph, target, requests)
    return Counter(uploaded=len(singles), batches=_merge(graph, singles), copies=copies)


def _requests(graph: Graph, target: Target) -> Iterator[tuple[KernelNode, _Request]]:
    """The nodes on the device that use CPU values, each with a request for one value, in program order."""
    facts = Facts(graph)
    barrier: KernelNode | None = None
    written: dict[Value, KernelNode] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        copied = is_copy_in(node, target)
        for value in [node.inputs[0]] if copied else host_operands(node, target):
            events = [e for e in (value.producer, barrier, written.get(facts.roots[value])) if e is not None]
            since = max(events, key=place.__getitem__, default=None)
            yield node, _Request(value, since, node if has_own_memory(node, facts, target) else None)
        barrier = node if node.effects.barrier else barrier
        written.update({facts.roots[node.inputs[position]]: node for position in node.effects.writes})


def _upload_singly(
    graph: Graph, target: Target, requests: list[tuple[KernelNode, _Request]]
) -> tuple[list[KernelNode], int]:
    """Add one upload per request, right after its ``since``. Returns the uploads, and how many copies were removed."""
    pinned = Facts(graph).pinned
    made: dict[_Request, KernelNode] = {}
    idle: list[KernelNode] = []
    for user, request in requests:
        if request not in made:
            type = request.value.type
            assert isinstance(type, TensorType), request.value.name
            # strides as in torch.empty_like: the source's if it is dense, else row-major
            type = replace(type, device=target.device, stride=type.stride if _is_dense(type) else None)
            made[request] = graph.add(
                UPLOAD, ((request.value,), target.device), (type,), loc=user.loc, module=user.module
            )
        uploaded = made[request].output
        if is_copy_in(user, target) and user.output.type == uploaded.type and user not in pinned:
            graph.replace_uses(user.output, uploaded)
            idle.append(user)
        else:
            graph.replace_operands(user, {request.value: uploaded})
    graph.erase(*idle)
    put_after(graph, {single: request.since for request, single in made.items()})
    return list(made.values()), len(idle)


def _is_dense(type: TensorType) -> bool:
    """True if the elements fill their memory without gaps or overlaps; assumed for symbolic sizes."""
    steps = [(stride, size) for stride, size in zip(type.strides, type.shape, strict=True) if size != 1]
    known = [(stride, size) for stride, size in steps if isinstance(stride, int) and isinstance(size, int)]
    expected = 1
    for stride, size in sorted(known) if len(known) == len(steps) else ():
        if stride != expected:
            return False
        expected *= size
    return True


def _merge(graph: Graph, singles: list[KernelNode]) -> int:
    """Merge uploads of the same turn of the device, and sort the nodes by turn. Returns how many uploads remain."""
    turn = _turns(graph)
    groups: dict[int, list[KernelNode]] = {}
    for single in singles:
        groups.setdefault(turn[single], []).append(single)
    order = sorted(graph.nodes, key=lambda node: (turn[node], node.op != UPLOAD))
    merged = {group[0]: _merge_group(graph, group) for _, group in sorted(groups.items())}
    gone = frozenset(singles)
    graph.erase(*singles)
    graph.reorder([merged.get(node, node) for node in order if node in merged or node not in gone])
    return len(merged)


def _merge_group(graph: Graph, group: list[KernelNode]) -> KernelNode:
    types = [single.output.type for single in group]
    moved = total([Cost(0, type.nbytes, type.nbytes, 0) for type in types if isinstance(type, TensorType)])
    device = group[0].args[1]
    upload = graph.add(
        UPLOAD,
        (tuple(single.inputs[0] for single in group), device),
        types,
        name=next(name for i in count() if graph.owner(name := f"upload{i}") is None),
        cost=replace(moved, launches=1),
        loc=group[0].loc,
        module=group[0].module,
    )
    for single, uploaded in zip(group, upload.outputs, strict=True):
        graph.replace_uses(single.output, uploaded)
    tensors = "1 CPU tensor" if len(group) == 1 else f"{len(group)} CPU tensors in one batch"
    upload.meta.set(PLACEMENT, f"uploads {tensors} to {device}")
    return upload


# -- turns -----------------------------------------------------------------------------------------------------------


def _turns(graph: Graph) -> dict[KernelNode, int]:
    """The earliest turn of each node: even turns are the host's, odd ones the device's. A node without tensors runs in
    the turn of its dependences; all dependences of an upload are in earlier turns."""
    times = earliest([_kind(node) for node in graph.nodes], dependence_lists(graph)[0])
    return dict(zip(graph.nodes, times, strict=True))


def _kind(node: KernelNode) -> Kind:
    if node.op == UPLOAD:
        return Kind.UPLOAD
    if not any(devices_of((*node.inputs, *node.outputs))):
        return Kind.FREE
    return Kind.OUTSIDE if _runs_on_host(node) else Kind.LAUNCHES


def _runs_on_host(node: KernelNode) -> bool:
    """True if the CPU does the work: the node makes or writes CPU tensors, or touches no other tensors."""
    changed = (*node.outputs, *(node.inputs[position] for position in node.effects.writes))
    if any(is_on_host(value) for value in changed):
        return True
    return all(device.is_host for device in devices_of(node.inputs)) and not any(devices_of(node.outputs))


# -- copies to the host ----------------------------------------------------------------------------------------------


def sink_copies(graph: Graph) -> list[KernelNode]:
    """Move copies to the host that are only returned, and pure CPU work on them, to the end; return the moved nodes.

    before:  mm ─ _to_copy@cpu ─ relu ─ _to_copy@cpu ─ add
    after:   mm ─ relu ─ add ─ _to_copy@cpu ─ _to_copy@cpu

    No other node may depend on them, by a value or by a later write of memory that they read.
    """
    if not any(is_copy_out(node) for node in graph.nodes):
        return []
    nodes, turn, after = graph.nodes, _turns(graph), dependence_lists(graph)[1]
    sunk: dict[KernelNode, None] = {}
    for place, node in reversed(list(enumerate(nodes))):
        host_work = turn[node] > 0 and bool(node.outputs) and computes_only(node) and _runs_on_host(node)
        if (host_work or is_copy_out(node)) and all(nodes[later] in sunk for later in after[place]):
            sunk[node] = None
    tail = frozenset(nodes[len(nodes) - len(sunk) :])
    moved = [node for node in reversed(sunk) if node not in tail]
    if moved:
        graph.reorder(sorted(nodes, key=sunk.__contains__))
    for node in moved:
        node.meta.set(PLACEMENT, "moved to the end")
    return moved
