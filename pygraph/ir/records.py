"""What the parser read, before it becomes a graph: plain records that keep the tokens errors point at.

``parser`` fills them in, ``builder`` turns them into a ``Graph``; nothing else uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lark import Token as Lexeme

from pygraph.ir.graph import Graph
from pygraph.ir.types import Type

__all__ = [
    "Argument",
    "Clause",
    "GraphRecord",
    "InputRecord",
    "Lexeme",
    "NodeRecord",
    "ParameterRecord",
    "Problem",
    "Reference",
    "RegionRecord",
    "Setting",
    "Subgraph",
    "Word",
]


class Problem(Exception):
    """What is wrong, and with which token. Becomes a ParseError once the text is at hand."""

    def __init__(self, reason: str, lexeme: Lexeme) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lexeme = lexeme


class Word(NamedTuple):
    """A name, bare or quoted, with its token."""

    text: str
    lexeme: Lexeme

    @property
    def is_bare(self) -> bool:
        return self.lexeme.type == "WORD"


class Reference(NamedTuple):
    """``%name`` or ``%name.index``."""

    name: str
    place: int | None
    lexeme: Lexeme


class Argument(NamedTuple):
    """One operand, attribute, annotation or cost field; ``key`` is None for an operand."""

    key: Word | None
    value: object
    is_cost: bool = False


class Clause(NamedTuple):
    """What follows the operands: an effect, ``after``, or the types (kind ``types``)."""

    kind: str
    values: Sequence[object]
    lexeme: Lexeme


class NodeRecord(NamedTuple):
    """One node line. ``results`` is the number after the colon, when there is one."""

    target: Lexeme
    results: Lexeme | None
    op: str
    arguments: Sequence[Argument]
    clauses: Sequence[Clause]
    annotations: Sequence[Argument]


class InputRecord(NamedTuple):
    """One input of the graph, with the words in its braces."""

    lexeme: Lexeme
    type: Type
    items: Sequence[tuple[Word, Word | None]]


class ParameterRecord(NamedTuple):
    """One parameter of a region."""

    value: Reference
    decision: str
    reason: str
    cost_us: float | None


class RegionRecord(NamedTuple):
    """One line of the region table."""

    number: int
    lexeme: Lexeme
    annotations: Sequence[Argument]
    parameters: Sequence[ParameterRecord]


class Setting(NamedTuple):
    """``key = word``, or ``hints = {…}``, in the braces after a graph's name."""

    key: Word
    value: Word | dict[str, int]


class Subgraph(NamedTuple):
    """A subgraph under its key."""

    key: str
    lexeme: Lexeme
    graph: Graph


class GraphRecord(NamedTuple):
    """A whole graph; its subgraphs are built already."""

    name: Lexeme
    settings: Sequence[Setting]
    inputs: Sequence[InputRecord]
    nodes: Sequence[NodeRecord]
    outputs: Sequence[object]
    regions: Sequence[RegionRecord]
    subgraphs: Sequence[Subgraph]
