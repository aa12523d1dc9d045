"""The program order that placement leaves: as few turns between host and device as the dependences allow.

Host work that waits for nothing comes first, then one upload, then the device's work, then host work that waits for
that, and so on. Only the order is decided here; regions are partitioning's business.
"""

from __future__ import annotations

from dataclasses import replace

from pygraph.ir import PLACEMENT, UPLOAD, Graph, KernelNode
from pygraph.passes.analysis import Dependences, dependence_lists
from pygraph.passes.judge_devices import is_on_host
from pygraph.passes.placement_facts import is_copy_out
from pygraph.passes.verdict import devices_of

__all__ = ["ranks", "sink_copies"]


def ranks(graph: Graph) -> dict[KernelNode, int]:
    """The turn of each node: even turns are the host's, odd ones the device's, and a turn waits for those before it.

    Each node gets the earliest turn that its dependences allow. A node without tensors runs in the turn of what it
    needs. An upload starts a turn of the device: everything it waits for is in a turn before.
    """
    found: list[int] = []
    for node, before in zip(graph.nodes, dependence_lists(graph).before, strict=True):
        latest = max((found[place] for place in before), default=0)
        found.append(_turn(node, latest))
    return dict(zip(graph.nodes, found, strict=True))


def _turn(node: KernelNode, latest: int) -> int:
    if node.op == UPLOAD:
        return latest + 1 if latest % 2 == 0 else latest + 2
    devices = list(devices_of((*node.inputs, *node.outputs)))
    if not devices:
        return latest
    return latest + (latest % 2 != (0 if _runs_on_host(node) else 1))


def _runs_on_host(node: KernelNode) -> bool:
    """Whether the CPU does the work: it makes or writes CPU tensors, or touches nothing else."""
    changed = (*node.outputs, *(node.inputs[position] for position in node.effects.writes))
    if any(is_on_host(value) for value in changed):
        return True
    return all(device.is_host for device in devices_of(node.inputs)) and not any(devices_of(node.outputs))


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
    turn = ranks(graph)
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
