"""The symbolic domain of the interpreter: contents are uninterpreted terms, equal when computed in the same way.

A term is named by a digest of how it came about, so that equality is exact and cheap however deep it is. Where a tensor
lives is no part of its content: moving it between devices leaves its term as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pygraph.ir.interp import UNREAD, Call, Operand, Results, SubgraphText
from pygraph.ir.node import Value
from pygraph.ir.printer import literal_text
from pygraph.ir.types import Device

__all__ = ["SymbolicDomain", "Term"]

_PLACES = ("device", "non_blocking", "pin_memory")
"""Attributes that say where a result lives, not what it is."""


class Term:
    """``head(parts…)``. Parts are terms, literals and tuples of them; equal heads and parts make equal terms."""

    __slots__ = ("digest", "head", "parts")

    def __init__(self, head: str, *parts: object) -> None:
        self.head = head
        self.parts = parts
        self.digest = blake2b(
            f"{head}({_digest_text(parts)})".encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Term) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return _shown(self, 3)


def _digest_text(part: object) -> str:
    if isinstance(part, Term):
        return f"~{part.digest}"
    if isinstance(part, tuple):
        return f"[{', '.join(map(_digest_text, part))}]"
    return literal_text(part)


def _shown(part: object, depth: int) -> str:
    if isinstance(part, tuple):
        return f"[{', '.join(_shown(item, depth) for item in part)}]"
    if not isinstance(part, Term):
        return literal_text(part)
    if not depth:
        return f"{part.head}#{part.digest[:6]}"
    return f"{part.head}({', '.join(_shown(item, depth - 1) for item in part.parts)})"


class SymbolicDomain:
    """Contents as terms. Any operator can be interpreted."""

    def given(self, value: Value, content: object) -> object:
        """The content of an input: what the caller gave, else a term that stands for it."""
        return Term("input", value.name) if content is None else content

    def view(self, content: object, call: Call, result: int) -> object:
        """What a view of memory with that content holds."""
        return Term("view", result, self._term(call), content)

    def put(self, content: object, path: Sequence[tuple[Call, int]], new: object) -> object:
        """The content of memory after ``new`` was written through a chain of views."""
        if not path:
            return new
        steps = tuple(Term("step", result, self._term(call)) for call, result in path)
        return Term("put", content, steps, new)

    def call(self, call: Call) -> Results:
        """Results, and what is written to each written operand."""
        if call.is_move:
            return Results(dict(enumerate(operand.content for operand in call.operands)), {})
        term = self._term(call)
        outputs = {index: Term("result", index, term) for index in range(call.results)}
        written = {position: Term("written", position, term) for position in call.writes}
        return Results(outputs, written)

    def event(self, call: Call) -> str:
        """What the call did, for comparing sequences of effects. Empty for a move between devices."""
        return "" if call.is_move else self._term(call).digest

    def _term(self, call: Call) -> Term:
        args = tuple(_part(arg) for arg in call.args)
        attrs = tuple((key, _part(arg)) for key, arg in sorted(call.attrs.items()) if key not in _PLACES)
        draw = () if call.draw is None else call.draw
        return Term(call.op, args, attrs, draw)


def _part(arg: object) -> object:
    if isinstance(arg, Operand):
        return Term("unread") if arg.content is UNREAD else arg.content
    if isinstance(arg, SubgraphText):
        return Term("subgraph", arg.text)
    if isinstance(arg, Device):
        return Term("device")
    return tuple(map(_part, arg)) if isinstance(arg, tuple) else arg
