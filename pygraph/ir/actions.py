"""What the parser does as it recognises each rule of ``grammar.lark``: literals and types become themselves, the rest
records for ``builder``. Method names are the grammar's rule names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
from lark import Transformer

from pygraph.ir import dims
from pygraph.ir.builder import build_graph, sigil_name, split_reference
from pygraph.ir.graph import Graph
from pygraph.ir.lexical import LITERAL_WORDS, unquote
from pygraph.ir.node import GraphRef, Token
from pygraph.ir.records import (
    Argument,
    Clause,
    GraphRecord,
    InputRecord,
    Lexeme,
    NodeRecord,
    ParameterRecord,
    Problem,
    Reference,
    RegionRecord,
    Setting,
    Subgraph,
    Word,
)
from pygraph.ir.types import (
    Device,
    Dim,
    DType,
    OpaqueType,
    ScalarType,
    TensorType,
    Type,
    as_dim,
    symbol,
)

__all__ = ["Actions"]

Children = list[Any]
"""What lark hands to an action: the results of the actions below it, and tokens. The grammar says which."""

_DTYPES = {dtype.value: dtype for dtype in DType}
_SCALARS = ("int", "float", "bool")


def _text(lexeme: Lexeme) -> str:
    try:
        return unquote(str(lexeme))
    except ValueError as error:
        raise Problem(str(error), lexeme) from None


def _integer(lexeme: Lexeme) -> int:
    try:
        return int(lexeme)
    except ValueError:
        raise Problem("this integer has too many digits", lexeme) from None


def _expression(lexeme: Lexeme, make: Callable[..., sympy.Expr], *args: Any, **options: bool) -> sympy.Expr:
    """``make(*args)``, with everything that sympy may raise on senseless arguments turned into a Problem."""
    try:
        made = make(*args, **options)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise Problem(f"not an expression: {error}", lexeme) from None
    if not isinstance(made, sympy.Expr):
        raise Problem("not an arithmetic expression", lexeme)
    return made


class _Expressions:
    """Sums, products, powers, functions and symbols."""

    def constant(self, children: Children) -> sympy.Expr:
        return _expression(children[0], dims.number, str(children[0]))

    def symbol(self, children: Children) -> sympy.Expr:
        word: Word = children[0]
        return dims.CONSTANTS[word.text] if word.is_bare and word.text in dims.CONSTANTS else symbol(word.text)

    def call(self, children: Children) -> sympy.Expr:
        word, *args = children
        return _expression(word.lexeme, dims.apply, word.text, args, opaque=not word.is_bare)

    def exact_call(self, children: Children) -> sympy.Expr:
        word, *args = children
        return _expression(word.lexeme, dims.apply, word.text, args, exact=True)

    def power(self, children: Children) -> sympy.Expr:
        base, operator, exponent = children
        return _expression(operator, dims.power, base, exponent)

    def negation(self, children: Children) -> sympy.Expr:
        return _expression(children[0], dims.negate, children[1])

    def sum(self, children: Children) -> sympy.Expr:
        terms = [(1, children[0])]
        for operator, term in zip(children[1::2], children[2::2], strict=True):
            terms.append((-1 if operator == "-" else 1, term))
        return _expression(children[1], dims.add, terms)

    def product(self, children: Children) -> sympy.Expr:
        factors = [(1, children[0])]
        for operator, factor in zip(children[1::2], children[2::2], strict=True):
            if operator == "%":
                whole = _expression(operator, dims.multiply, factors)
                factors = [(1, _expression(operator, dims.apply, "Mod", [whole, factor]))]
            else:
                factors.append((-1 if operator == "/" else 1, factor))
        return _expression(children[1], dims.multiply, factors)


class _Types:
    """Types and their parts."""

    def dims(self, children: Children) -> tuple[Dim, ...]:
        return tuple(map(as_dim, children))

    def strides(self, children: Children) -> tuple[str, tuple[Dim, ...]]:
        return ("strides", tuple(map(as_dim, children)))

    def device(self, children: Children) -> Device:
        return Device(sigil_name(children[0]), children[1] if len(children) > 1 else None)

    def shaped_type(self, children: Children) -> Type:
        word, shape, *rest = children
        device = rest[-1]
        stride = rest[0][1] if len(rest) > 1 else None
        if word not in _DTYPES:
            raise Problem(f"unknown dtype '{word}': use one of {', '.join(_DTYPES)}", word)
        return TensorType(_DTYPES[word], shape, device, stride)

    def scalar_type(self, children: Children) -> Type:
        word: Word = children[0]
        if word.is_bare and word.text not in _SCALARS:
            hint = "a tensor is written dtype[sizes]@device" if word.text in _DTYPES else "use int, float or bool"
            raise Problem(f"'{word.text}' is no scalar type: {hint}", word.lexeme)
        return ScalarType(word.text, as_dim(children[1]) if len(children) > 1 else None)

    def opaque_type(self, children: Children) -> Type:
        word, name = children
        if word != "opaque":
            raise Problem(f"unknown type '{word}': only opaque<\"name\"> has angle brackets", word)
        return OpaqueType(_text(name))


class _Literals:
    """Operands and annotations."""

    def word(self, children: Children) -> Word:
        lexeme: Lexeme = children[0]
        return Word(_text(lexeme) if lexeme.type == "STRING" else str(lexeme), lexeme)

    def integer(self, children: Children) -> int:
        value = _integer(children[-1])
        return -value if len(children) == 2 else value

    def number(self, children: Children) -> int | float:
        lexeme: Lexeme = children[-1]
        value = self.real_word([lexeme]) if lexeme.type == "WORD" else None
        if value is None:
            value = _integer(lexeme) if lexeme.type == "INT" else float(lexeme)
        return -value if len(children) == 2 else value

    def real_word(self, children: Children) -> float:
        lexeme: Lexeme = children[0]
        if lexeme not in ("inf", "nan"):
            raise Problem(f"'{lexeme}' is no number: use digits, inf or nan", lexeme)
        return float(lexeme)

    def bare_word(self, children: Children) -> object:
        word: Word = children[0]
        if not word.is_bare:
            return word.text
        if word.text in LITERAL_WORDS:
            return LITERAL_WORDS[word.text]
        if word.text not in _DTYPES:
            raise Problem(f"unknown word '{word.text}': strings are quoted, tokens have '#'", word.lexeme)
        return _DTYPES[word.text]

    def reference(self, children: Children) -> Reference:
        return split_reference(children[0])

    def graph_reference(self, children: Children) -> GraphRef:
        word, name = children
        if word != "graph":
            raise Problem(f"unexpected '{word}': a subgraph is written graph @name", word)
        return GraphRef(sigil_name(name))

    def enumerated(self, children: Children) -> Token:
        return Token(sigil_name(children[0]))

    def symbolic(self, children: Children) -> sympy.Expr:
        return cast(sympy.Expr, children[0])

    def complex_number(self, children: Children) -> complex:
        word, real, imaginary = children
        if word != "complex":
            raise Problem(f"unexpected '{word}': complex(real, imaginary) is the only literal of this form", word)
        try:
            return complex(real, imaginary)
        except OverflowError:
            raise Problem("this number is too large", word) from None

    def sequence(self, children: Children) -> tuple[object, ...]:
        return tuple(children)

    def positional(self, children: Children) -> Argument:
        return Argument(None, children[0])

    def keyword(self, children: Children) -> Argument:
        return Argument(*children)

    def cost(self, children: Children) -> Argument:
        name, value = children
        return Argument(Word(str(name), name), as_dim(value), True)


class Actions(_Expressions, _Types, _Literals, Transformer[Lexeme, Graph]):
    """All actions; the lists of the grammar stay lists."""

    def _list(self, children: Children) -> Children:
        return children

    annotations = arguments = input_items = inputs = nodes = parameters = result = _list
    target = input_item = hint = _list

    def start(self, children: Children) -> Graph:
        _, graph = children[0]
        return cast(Graph, graph)

    def header(self, children: Children) -> tuple[str, Children]:
        return ("settings", children)

    def regions(self, children: Children) -> tuple[str, Children]:
        return ("regions", children)

    def subgraphs(self, children: Children) -> tuple[str, Children]:
        return ("subgraphs", children)

    def text_setting(self, children: Children) -> Setting:
        return Setting(*children)

    def hints_setting(self, children: Children) -> Setting:
        key, *pairs = children
        hints: dict[str, int] = {}
        for word, value in pairs:
            if word.text in hints:
                raise Problem(f"symbol '{word.text}' has two hints", word.lexeme)
            hints[word.text] = value
        return Setting(key, hints)

    def input(self, children: Children) -> InputRecord:
        lexeme, type, *items = children
        pairs = [(item[0], item[1] if len(item) > 1 else None) for item in (items[0] if items else ())]
        return InputRecord(lexeme, type, pairs)

    def position(self, children: Children) -> int | tuple[int, int]:
        return cast(int, children[0]) if len(children) == 1 else (children[0], children[1])

    def after(self, children: Children) -> Clause:
        return Clause("after", children, children[0])

    def types(self, children: Children) -> Clause:
        return Clause("types", children[1:], children[0])

    def flag_effect(self, children: Children) -> Clause:
        return Clause(str(children[0]), ["flag"], children[0])

    def named_effect(self, children: Children) -> Clause:
        return Clause(str(children[0]), ["name", _text(children[1])], children[0])

    def operand_effect(self, children: Children) -> Clause:
        return Clause(str(children[0]), ["positions", *children[1:]], children[0])

    def node(self, children: Children) -> NodeRecord:
        target, op, arguments, *rest = children
        annotations: Sequence[Argument] = rest.pop() if rest and isinstance(rest[-1], list) else ()
        return NodeRecord(target[0], target[1] if len(target) > 1 else None, op.text, arguments, rest, annotations)

    def region(self, children: Children) -> RegionRecord:
        lexemes = [child for child in children if isinstance(child, Lexeme)]
        *annotations, parameters = children[len(lexemes) :]
        index = self.integer(lexemes)
        return RegionRecord(index, lexemes[-1], annotations[0] if annotations else (), parameters)

    def parameter(self, children: Children) -> ParameterRecord:
        value, decision, reason, *cost_us = children
        return ParameterRecord(split_reference(value), decision.text, _text(reason), cost_us[0] if cost_us else None)

    def subgraph(self, children: Children) -> Subgraph:
        *key, (name, graph) = children
        return Subgraph(sigil_name(key[0]) if key else graph.name, key[0] if key else name, graph)

    def graph(self, children: Children) -> tuple[Lexeme, Graph]:
        name, *parts = children
        optional: dict[str, Children] = dict(part for part in parts if isinstance(part, tuple))
        inputs, nodes, outputs = (part for part in parts if not isinstance(part, tuple))
        settings, regions, subgraphs = (optional.get(key, ()) for key in ("settings", "regions", "subgraphs"))
        return name, build_graph(GraphRecord(name, settings, inputs, nodes, outputs, regions, subgraphs))
