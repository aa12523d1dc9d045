"""Known operators and their signatures: a table of torch's operators, and those that this process knows in addition.

    (self, other, *, alpha?) -> 1 same: aten.add.Tensor aten.sub.Tensor …

``operators.txt`` has a line for each signature, and ``any`` before operators without one (``make operators`` writes
it). Once the frontend is imported, its look-up adds custom operators, and the signatures of the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pygraph.ir.node import CONSTANT, UPLOAD

__all__ = ["ANY", "Signature", "listed", "register_lookup", "signature_of"]


@dataclass(frozen=True, slots=True)
class Signature:
    """Arguments and results of an operator.

    Args:
        positional: names of arguments that may be given by position, in order
        keywords: names of keyword-only arguments
        optional: names of arguments that may be left out
        results: number of results; None if it depends on the call
        fewer: true if a mask among the arguments may leave out results
        kind: kind of an elementwise operator: ``same`` keeps floating-point types, ``bool`` returns booleans,
            ``shape`` does neither. Empty for other operators; ``any`` if the arguments are unknown
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    results: int | None = None
    fewer: bool = False
    kind: str = ""

    def __str__(self) -> str:
        if self.kind == "any":
            return "any"
        names = [*self.positional, *(["*", *self.keywords] if self.keywords else [])]
        shown = ", ".join(name + "?" * (name in self.optional) for name in names)
        results = "*" if self.results is None else f"{self.results}{'?' * self.fewer}"
        return f"({shown}) -> {results} {self.kind}".rstrip()

    @staticmethod
    def parse(text: str) -> Signature:
        """The signature written ``text``."""
        if text == "any":
            return ANY
        inside, _, after = text.removeprefix("(").partition(") -> ")
        results, _, kind = after.partition(" ")
        marked = inside.split(", ") if inside else []
        names = [name.removesuffix("?") for name in marked]
        end = names.index("*") if "*" in names else len(names)
        optional = frozenset(name.removesuffix("?") for name in marked if name.endswith("?"))
        count = None if results == "*" else int(results.removesuffix("?"))
        return Signature(tuple(names[:end]), tuple(names[end + 1 :]), optional, count, results.endswith("?"), kind)


ANY = Signature(kind="any")
"""Signature of an operator that takes and returns anything."""

_lookups: list[Callable[[str], Signature | None]] = []
_known: dict[str, Signature] = {}


def register_lookup(lookup: Callable[[str], Signature | None]) -> None:
    """Have ``lookup`` asked for signatures before the table. It returns None for an operator that it does not know."""
    _lookups.append(lookup)
    _known.clear()


def signature_of(op: str) -> Signature | None:
    """The signature of ``op``, or None if neither the table nor this process knows it."""
    if op not in _known:
        of_table = listed().get(op)
        found = next((signature for lookup in _lookups if (signature := lookup(op)) is not None), of_table)
        if found is None:  # until its library is imported
            return None
        _known[op] = found if of_table is None else replace(found, kind=of_table.kind)
    return _known[op]


@cache
def listed() -> dict[str, Signature]:
    """The operators of torch and of PyGraph, by name."""
    found = {
        CONSTANT: Signature((), ("target",), frozenset(), 1),
        UPLOAD: Signature(("xs", "device"), (), frozenset()),
    }
    for line in Path(__file__).with_name("operators.txt").read_text(encoding="utf-8").splitlines():
        signature, _, names = line.rpartition(": ")
        if not line.startswith("#"):
            found.update(dict.fromkeys(names.split(), Signature.parse(signature)))
    return found
