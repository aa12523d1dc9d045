"""The longest chain of dependent nodes by modelled device time: what no schedule can beat.

Times come from a ``DeviceModel``; nodes whose time is unknown are counted apart, never as free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pygraph.analysis.dependences import dependence_lists
from pygraph.analysis.timing import node_time_us
from pygraph.ir import DeviceModel, Graph, KernelNode

__all__ = ["CriticalPath", "critical_path"]


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain, its time and that of all nodes one after the other, µs; ``unknown`` nodes had no time to count."""

    nodes: tuple[KernelNode, ...]
    time_us: float
    serial_us: float
    unknown: int


def critical_path(graph: Graph, model: DeviceModel, values: Mapping[str, int] | None = None) -> CriticalPath:
    """The critical path of ``graph``; the earliest in program order where several take as long."""
    known = graph.hints if values is None else values
    costs = [node_time_us(node, model, known) for node in graph.nodes]
    lists = dependence_lists(graph)
    finish: list[float] = []
    came_from: list[int | None] = []
    for cost, before in zip(costs, lists.before, strict=True):
        source = max(before, key=lambda p: (finish[p], -p), default=None)
        came_from.append(source)
        finish.append((cost or 0.0) + (0.0 if source is None else finish[source]))
    chain: list[KernelNode] = []
    at = max(range(len(finish)), key=lambda p: (finish[p], -p), default=None)
    time_us = 0.0 if at is None else finish[at]
    while at is not None:
        chain.append(graph.nodes[at])
        at = came_from[at]
    return CriticalPath(tuple(reversed(chain)), time_us, sum(c or 0.0 for c in costs), costs.count(None))
