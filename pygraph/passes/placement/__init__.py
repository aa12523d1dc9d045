"""Placement: CPU values that block capture are made on the device, uploaded in batches, or fetched at the end.

One CPU scalar among a kernel's operands cuts a region in two. Legality has marked the nodes that it refuses only for
their devices. Here equal CPU operators merge, and operators that are exact on the device move there (``moves``). The
remaining CPU operands are uploaded, and copies to the host sink to the end (``transfers``). Changed nodes are judged
again. Nothing moves if the caller could observe it (``facts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import CAPTURABLE, REASON, Graph, Stage
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.legality.rules import Target, annotate, target_of
from pygraph.passes.placement.moves import merge_equal, move_factories
from pygraph.passes.placement.transfers import batch_uploads, sink_copies

__all__ = ["Placement"]

_DEVICE_REASONS = frozenset({"cpu-operator", "cpu-operand", "cpu-scalar", "device-copy"})
"""Reasons that placement can remove. Other nodes are not judged again: legality may have had more options."""


@dataclass(frozen=True)
class Placement(Pass):
    """Move CPU values to the device where regions can use them. The caller cannot observe the difference.

    before:  arange@cpu ─ _to_copy✗ ─ add ─ mul✗ (%s@cpu) ─ _to_copy@cpu ─ gelu
                          %w@cpu ─ _to_copy✗ ─ mm
    after:   upload0✗ (%s, %w) ─ arange@cuda ─ add ─ mul ─ mm ─ gelu ─ _to_copy@cpu

    Factories, and exact operators on their results, run on the device. CPU scalars, parameters and inputs are uploaded
    in batches at each call. Equal CPU computations run, and are uploaded, once. Copies to the host that are only
    returned come last. Random factories never move. If the CPU is captured, nothing changes.
    """

    name: ClassVar[str] = "placement"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage] = Stage.PLACED

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Rewrite ``graph``, and mark changed nodes again as capturable or not."""
        target = target_of(graph, ctx.device)
        if target.device.is_host:
            return PassResult(False)
        before = _captured(graph)
        tally = Counter(merged=merge_equal(graph))
        tally.update(move_factories(graph, target))
        changed = _judge_again(graph, target)
        sunk = sink_copies(graph)
        tally.update(batch_uploads(graph, target))
        changed |= _judge_again(graph, target)
        sunk += sink_copies(graph)  # uploads bring the nodes into an order of turns, where copies come early
        tally["sunk"] = len(set(sunk))
        modified = changed or tally.total() > 0
        return PassResult(modified, tuple(_notes(tally, _captured(graph) - before)))


def _captured(graph: Graph) -> int:
    return sum(1 for node in graph.nodes if node.meta.get(CAPTURABLE))


def _judge_again(graph: Graph, target: Target) -> bool:
    """Judge new nodes, and nodes refused only for their devices; return true if an annotation changed."""
    changed = [
        annotate(node, target)
        for node in graph.nodes
        if CAPTURABLE not in node.meta or (node.meta.get(REASON) or "") in _DEVICE_REASONS
    ]
    return any(changed)


def _notes(tally: Counter[str], gained: int) -> Iterator[str]:
    if tally["merged"]:
        yield f"CPU nodes that computed what another one does: {tally['merged']} removed"
    if tally["moved"] or tally["made"]:
        yield f"CPU nodes moved to the device: {tally['moved']}, made there beside the CPU's own: {tally['made']}"
    if tally["uploaded"]:
        yield f"CPU tensors uploaded for each call: {tally['uploaded']}, in batches: {tally['batches']}"
    if tally["copies"]:
        yield f"single copies to the device that fell away: {tally['copies']}"
    if tally["sunk"]:
        yield f"copies to the host, and work on them, moved to the end: {tally['sunk']}"
    if gained:
        yield f"nodes that can be captured now: {gained} more"
