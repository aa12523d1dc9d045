"""Merging CPU operators that compute the same, so that each value is computed, and uploaded, once.

Which values are uploaded at all is ``placement_uploads``'.
"""

from __future__ import annotations

from pygraph.ir import REASON, Graph, KernelNode, TensorType
from pygraph.passes.placement_facts import Facts, facts_of
from pygraph.passes.placement_rules import is_factory

__all__ = ["merge_equal"]


def merge_equal(graph: Graph) -> int:
    """Use the first of CPU operators with the same operands in place of the others; returns how many went.

    before:  %s ─┬─ mul@cpu ─ sub@cpu ─ mul@cuda          after:  %s ─ mul@cpu ─ sub@cpu ─┬─ mul@cuda
                 └─ mul@cpu ─ sub@cpu ─ mul@cuda                                          └─ mul@cuda

    An optimizer's loop over parameters computes with the same learning rate for each. Only operators that do nothing
    but compute, on tensors that nothing writes to, and whose results nobody could tell from one another.
    """
    facts = facts_of(graph)
    first: dict[str, KernelNode] = {}
    gone: list[KernelNode] = []
    for node in graph.nodes:
        if node.effects.barrier:
            first.clear()
        if not _is_mergeable(node, facts):
            continue
        kept = first.setdefault(_computation(node), node)
        if kept is not node:
            graph.replace_uses(node.output, kept.output)
            gone.append(node)
    graph.erase(*gone)
    return len(gone)


def _is_mergeable(node: KernelNode, facts: Facts) -> bool:
    if node.meta.get(REASON) != "cpu-operator" or not node.op.startswith(("aten.", "prims.")):
        return False
    if not node.effects.is_pure or is_factory(node) or len(node.outputs) != 1 or node in facts.pinned:
        return False
    if any(isinstance(value.type, TensorType) and facts.is_written(value) for value in node.inputs):
        return False
    return not facts.is_observed(node.output)


def _computation(node: KernelNode) -> str:
    """What ``node`` computes, as text: numbers that are equal but not the same (``-0.0``, ``1.0`` and ``1``) differ."""
    return f"{node.op} {node.args!r} {sorted(node.attrs.items(), key=lambda item: item[0])!r} {node.output.type!r}"
