"""Whether a graph keeps the rules of its stage: one table of rules per stage, run in order, first violation raised.

Rules of structure are in ``rules``, of judged and partitioned graphs in ``region_rules``. A rule yields what breaks it.
"""

from __future__ import annotations

from pygraph.errors import VerifyError
from pygraph.ir import region_rules, rules
from pygraph.ir.graph import Graph, Stage
from pygraph.ir.rules import Rule

__all__ = ["RULES", "verify"]

_STRUCTURE: tuple[Rule, ...] = (
    rules.names,
    rules.links,
    rules.outputs,
    rules.order,
    rules.effects,
    rules.types,
    rules.expressions,
    rules.subgraphs,
)
_JUDGED: tuple[Rule, ...] = (*_STRUCTURE, region_rules.judged)
_PARTITIONED: tuple[Rule, ...] = (*_JUDGED, region_rules.membership, region_rules.table, region_rules.quotient)
_INDIRECTED: tuple[Rule, ...] = (*_PARTITIONED, region_rules.parameters)

RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.LIFTED: _STRUCTURE,
    Stage.JUDGED: _JUDGED,
    Stage.PLACED: _JUDGED,
    Stage.PARTITIONED: _PARTITIONED,
    Stage.INDIRECTED: _INDIRECTED,
    Stage.SELECTED: (*_INDIRECTED, region_rules.selected),
}
"""The rules of each stage. What held at an earlier stage still holds."""


def verify(graph: Graph, stage: Stage | None = None) -> None:
    """Check ``graph`` against the rules of ``stage`` (its own when None), and its subgraphs against those of theirs.

    Raises VerifyError for the first rule that is broken, with the first node (in program order) that breaks it.
    """
    at = graph.stage if stage is None else stage
    for rule in RULES[at]:
        for node, reason in rule(graph):
            name = rule.__name__
            raise VerifyError(reason, rule=name, stage=at.value, node=None if node is None else node.name)
    for subgraph in graph.subgraphs.values():
        verify(subgraph)
