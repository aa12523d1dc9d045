"""The standard annotations of nodes and regions, and the decisions on a region's parameters.

Custom passes may add ``MetaKey``s of their own; every annotation is printed and parsed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pygraph.ir.node import KernelNode, Meta, MetaKey, Value

__all__ = [
    "CAPTURABLE",
    "DETAIL",
    "EAGER",
    "MADE_FROM",
    "PLACEMENT",
    "REASON",
    "REGION",
    "SELECTED",
    "TAGS",
    "Parameter",
    "Region",
    "Source",
    "sources",
    "unit_of",
]

TAGS = MetaKey("tags", str)
"""Node: the tags of its operator that matter to capture, separated by commas (set by the frontend)."""
MADE_FROM = MetaKey("made_from", tuple)
"""Node: operator, function and module of each node from which an earlier pass of the compiler made it (set by the
frontend); see ``sources``."""
CAPTURABLE = MetaKey("capturable", bool)
"""Node: true if it may be part of a captured region (set by legality)."""
EAGER = MetaKey("eager", bool)
"""Node: true if a region may call it between two segments, though it cannot be captured (set by legality)."""
REASON = MetaKey("reason", str)
"""Node: the code of the reason why it is not capturable. Region: why it is, or is not, selected."""
DETAIL = MetaKey("detail", str)
"""Node or region: the reason in words."""
PLACEMENT = MetaKey("placement", str)
"""Node: change by placement, in words."""
REGION = MetaKey("region", int)
"""Node: the region that it belongs to (set by partitioning)."""
SELECTED = MetaKey("selected", bool)
"""Region: true if it is worth a graph (set by selection)."""


class Source(NamedTuple):
    """An operator of the user's program, with the function and the module that contain it."""

    op: str
    function: str
    module: str


def sources(node: KernelNode) -> tuple[Source, ...]:
    """The operators of the user's program that ``node`` computes: itself, and those from which an earlier pass of the
    compiler made it (attention from products and a softmax)."""
    own = Source(node.op, node.loc.function if node.loc else "", node.module)
    return (own, *(Source(*made) for made in node.meta.get(MADE_FROM) or ()))


def unit_of(node: KernelNode) -> int | KernelNode:
    """Node of the quotient graph that contains ``node``: the index of its region, or ``node`` itself."""
    region = node.meta.get(REGION)
    return node if region is None else region


@dataclass(frozen=True, slots=True)
class Parameter:
    """Decision on the address of one value that a region reads from outside: ``static`` or ``patched``, and why."""

    decision: str
    reason: str


@dataclass(slots=True, eq=False)
class Region:
    """Nodes captured together. REGION of the nodes gives the members; this holds parameters and annotations."""

    parameters: dict[Value, Parameter] = field(default_factory=dict)
    meta: Meta = field(default_factory=Meta)
