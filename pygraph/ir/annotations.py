"""The standard annotations of nodes and regions, and the record of what becomes of a region's parameters.

Custom passes make further ``MetaKey``s of their own; every annotation is printed and parsed.
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
"""Node: the tags of its operator that matter to capture, comma separated (set by the frontend)."""
MADE_FROM = MetaKey("made_from", tuple)
"""Node: what it was made from, if an earlier pass of the compiler made it: operator, function and module of each (set
by the frontend); see ``sources``."""
CAPTURABLE = MetaKey("capturable", bool)
"""Node: whether it may be part of a captured region (set by legality)."""
EAGER = MetaKey("eager", bool)
"""Node: whether a region may call it between two segments, though it cannot be captured (set by legality)."""
REASON = MetaKey("reason", str)
"""Node: the code of the reason why it is not capturable. Region: why it is, or is not, selected."""
DETAIL = MetaKey("detail", str)
"""Node or region: the reason in words."""
PLACEMENT = MetaKey("placement", str)
"""Node: what placement did to it."""
REGION = MetaKey("region", int)
"""Node: the region that it belongs to (set by partitioning)."""
SELECTED = MetaKey("selected", bool)
"""Region: whether it is worth a graph (set by selection)."""


class Source(NamedTuple):
    """An operator of the user's program, and the function and the module that it was written in."""

    op: str
    function: str
    module: str


def sources(node: KernelNode) -> tuple[Source, ...]:
    """The operators of the user's program that ``node`` computes: itself, and those that an earlier pass of the
    compiler made it from (attention from products and a softmax)."""
    own = Source(node.op, node.loc.function if node.loc else "", node.module)
    return (own, *(Source(*made) for made in node.meta.get(MADE_FROM) or ()))


def unit_of(node: KernelNode) -> int | KernelNode:
    """The node that ``node`` becomes when each region is contracted to one: the index of its region, or itself."""
    region = node.meta.get(REGION)
    return node if region is None else region


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a region gets the address of one value that it reads from outside: ``static`` or ``patched``, and why."""

    decision: str
    reason: str


@dataclass(slots=True, eq=False)
class Region:
    """Nodes captured together. Membership is the nodes' REGION annotation; this holds what is said of the whole."""

    parameters: dict[Value, Parameter] = field(default_factory=dict)
    meta: Meta = field(default_factory=Meta)
