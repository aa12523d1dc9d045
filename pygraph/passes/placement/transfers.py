"""What crosses between host and device: CPU values are uploaded in batches, copies to the host come last.

Both look for as few turns between host and device as the dependences allow: host work that waits for nothing comes
first, then one upload, then the device's work, then host work that waits for that, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pygraph.ir import PLACEMENT, UPLOAD, Cost, Graph, KernelNode, TensorType, Value, map_arg
from pygraph.ir.cost import total
from pygraph.passes.analysis import Dependences, dependence_lists
from pygraph.passes.legality.rules import Target, devices_of, is_on_host
from pygraph.passes.placement.facts import (
    Names,
    facts_of,
    has_own_memory,
    host_operands,
    is_copy_in,
    is_copy_out,
    put_after,
)
from pygraph.passes.region_order import Kind, earliest

__all__ = ["Uploads", "batch_uploads", "sink_copies"]


@dataclass(frozen=True, slots=True)
class Uploads:
    """How many CPU values are uploaded, in how many batches, and how many single copies fell away."""

    values: int = 0
    batches: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    """A node of the device that uses a CPU value, which has been what it is since ``since`` (None: since the start).

    ``copy`` is the node itself where it is a copy whose result must stay memory of its own.
    """

    user: KernelNode
    value: Value
    since: KernelNode | None
    copy: KernelNode | None = None


def batch_uploads(graph: Graph, target: Target) -> Uploads:
    """Upload what the device's nodes use from the CPU, batched, as early as the dependences allow.

    before:  %w@cpu ─ _to_copy ─ mm@cuda      %s@cpu ─ mul@cuda
    after:   %w, %s ─ upload0 ─┬─ mm@cuda
                               └─ mul@cuda

    Parameters are uploaded for each call: nothing tells whether the caller has written them in between.
    """
    requests = list(_requests(graph, target))
    if not requests:
        return Uploads()
    singles, copies = _upload_singly(graph, target, requests)
    batches = _merge(graph, singles)
    return Uploads(len(singles), batches, copies)


def _requests(graph: Graph, target: Target) -> Iterator[_Request]:
    facts = facts_of(graph)
    barrier: KernelNode | None = None
    written: dict[Value, KernelNode] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        copied = is_copy_in(node, target)
        for value in [node.inputs[0]] if copied else host_operands(node, target):
            events = [e for e in (value.producer, barrier, written.get(facts.roots[value])) if e is not None]
            since = max(events, key=place.__getitem__, default=None)
            yield _Request(node, value, since, node if has_own_memory(node, facts, target) else None)
        barrier = node if node.effects.barrier else barrier
        written.update({facts.roots[node.inputs[position]]: node for position in node.effects.writes})


def _upload_singly(graph: Graph, target: Target, requests: list[_Request]) -> tuple[list[KernelNode], int]:
    """One upload per value (per copy, where a copy must be memory of its own), right after the value has come to be."""
    names, pinned = Names(graph), facts_of(graph).pinned
    made: dict[tuple[Value, KernelNode | None, KernelNode | None], KernelNode] = {}
    idle: list[KernelNode] = []
    for request in requests:
        key = (request.value, request.since, request.copy)
        if key not in made:
            made[key] = _upload(graph, target, request, names.numbered("single_upload"))
        if _serve(graph, target, request, made[key].output, pinned):
            idle.append(request.user)
    graph.erase(*idle)
    put_after(graph, [(single, since) for (_, since, _), single in made.items()])
    return list(made.values()), len(idle)


def _upload(graph: Graph, target: Target, request: _Request, name: str) -> KernelNode:
    type = _uploaded_type(request.value, target)
    return graph.add(UPLOAD, ((request.value,), target.device), (type,), name=name, loc=request.user.loc)


def _uploaded_type(value: Value, target: Target) -> TensorType:
    """Strides as ``torch.empty_like`` gives them: those of a dense tensor, else row-major."""
    type = value.type
    if not isinstance(type, TensorType):
        raise TypeError(f"only tensors are uploaded, and %{value.name} is none")
    return replace(type, device=target.device, stride=type.stride if _is_dense(type) else None)


def _is_dense(type: TensorType) -> bool:
    """Whether the elements fill their memory without gaps or overlaps; symbolic sizes are taken to."""
    steps = [(stride, size) for stride, size in zip(type.strides, type.shape, strict=True) if size != 1]
    known = [(stride, size) for stride, size in steps if isinstance(stride, int) and isinstance(size, int)]
    expected = 1
    for stride, size in sorted(known) if len(known) == len(steps) else ():
        if stride != expected:
            return False
        expected *= size
    return True


def _serve(graph: Graph, target: Target, request: _Request, uploaded: Value, pinned: frozenset[KernelNode]) -> bool:
    """Give the user what was uploaded for it; return whether it is a copy that has nothing left to do."""
    user, value = request.user, request.value
    if is_copy_in(user, target) and user.output.type == uploaded.type and user not in pinned:
        graph.replace_uses(user.output, uploaded)
        return True

    def change(operand: Value) -> Value:
        return uploaded if operand is value else operand

    attrs = {key: map_arg(arg, change) for key, arg in user.attrs.items()}
    graph.set_args(user, tuple(map_arg(arg, change) for arg in user.args), attrs)
    return False


def _merge(graph: Graph, singles: list[KernelNode]) -> int:
    """One upload for all that belong to the same turn of the device, and the nodes in the order of turns."""
    turn = _turns(graph)
    groups: dict[int, list[KernelNode]] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for single in singles:
        groups.setdefault(turn[single], []).append(single)
    order = sorted(graph.nodes, key=lambda node: (turn[node], node.op != UPLOAD, place[node]))
    names = Names(graph)
    merged = {group[0]: _merge_group(graph, group, names.numbered("upload")) for _, group in sorted(groups.items())}
    gone = frozenset(singles)
    graph.erase(*singles)
    graph.reorder([merged.get(node, node) for node in order if node in merged or node not in gone])
    return len(merged)


def _merge_group(graph: Graph, group: list[KernelNode], name: str) -> KernelNode:
    types = [single.output.type for single in group]
    nbytes = [type.nbytes for type in types if isinstance(type, TensorType)]
    upload = graph.add(
        UPLOAD,
        (tuple(single.inputs[0] for single in group), group[0].args[1]),
        types,
        name=name,
        cost=total([Cost(0, size, size, 0, None) for size in nbytes]),
        loc=group[0].loc,
    )
    graph.set_cost(upload, replace(upload.cost, launches=1))
    for single, uploaded in zip(group, upload.outputs, strict=True):
        graph.replace_uses(single.output, uploaded)
    tensors = "1 CPU tensor" if len(group) == 1 else f"{len(group)} CPU tensors in one batch"
    upload.meta.set(PLACEMENT, f"uploads {tensors} to {group[0].args[1]}")
    return upload


# -- turns -----------------------------------------------------------------------------------------------------------


def _turns(graph: Graph) -> dict[KernelNode, int]:
    """The earliest turn of each node: even turns are the host's, odd ones the device's. A node without tensors runs in
    the turn of what it needs; everything that an upload waits for is in a turn before."""
    times = earliest([_kind(node) for node in graph.nodes], dependence_lists(graph).before)
    return dict(zip(graph.nodes, times, strict=True))


def _kind(node: KernelNode) -> Kind:
    if node.op == UPLOAD:
        return Kind.UPLOAD
    if not any(devices_of((*node.inputs, *node.outputs))):
        return Kind.FREE
    return Kind.OUTSIDE if _runs_on_host(node) else Kind.LAUNCHES


def _runs_on_host(node: KernelNode) -> bool:
    """Whether the CPU does the work: it makes or writes CPU tensors, or touches nothing else."""
    changed = (*node.outputs, *(node.inputs[position] for position in node.effects.writes))
    if any(is_on_host(value) for value in changed):
        return True
    return all(device.is_host for device in devices_of(node.inputs)) and not any(devices_of(node.outputs))


# -- copies to the host ----------------------------------------------------------------------------------------------


def sink_copies(graph: Graph) -> list[KernelNode]:
    """Put copies to the host that are only returned, and pure CPU work on them, at the end; return those that moved.

    before:  mm ─ _to_copy@cpu ─ relu ─ _to_copy@cpu ─ add
    after:   mm ─ relu ─ add ─ _to_copy@cpu ─ _to_copy@cpu

    Nothing may depend on them: neither a value nor a later write of what they read.
    """
    if not any(is_copy_out(node) for node in graph.nodes):
        return []
    sunk = _sinkable(graph, dependence_lists(graph))
    order = [*(node for node in graph.nodes if node not in sunk), *(node for node in graph.nodes if node in sunk)]
    if not sunk or order == list(graph.nodes):
        return []
    tail = graph.nodes[-len(sunk) :]
    moved = [node for node in sunk if node not in tail]
    graph.reorder(order)
    for node in moved:
        node.meta.set(PLACEMENT, "moved to the end")
    return moved


def _sinkable(graph: Graph, dependences: Dependences) -> dict[KernelNode, None]:
    turn = _turns(graph)
    nodes = graph.nodes
    sunk: dict[KernelNode, None] = {}
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        follows = all(nodes[after] in sunk for after in dependences.after[place])
        if follows and (is_copy_out(node) or (turn[node] > 0 and _is_pure_host_work(node))):
            sunk[node] = None
    return dict.fromkeys(reversed(sunk))


def _is_pure_host_work(node: KernelNode) -> bool:
    pure = replace(node.effects, aliases=(), reads=None).is_pure
    return pure and bool(node.outputs) and _runs_on_host(node)
