"""``.pgir`` text to graphs. Whatever is wrong with a text is a ParseError that points at the place.

    graph    "graph" @name [{settings}] (inputs) { nodes "return" (literals) } ["regions" {…}] ["subgraphs" {…}]
    input    %name : type [{role = word, static}]
    node     %name[:results] | ^name  =  op(operands, key = literal) clauses [{cost, annotations, source line}]
    clause   after(^node, …) | : type | : (type, …) | !flag | !effect("name") | !effect[position, …]
    region   index [{annotations}] (%value: decision "reason" [µs], …)
    type     dtype[sizes]{strides}@device | int | float | bool | int(size) | opaque<"name">
    literal  number | "text" | word | %value | @device | #token | $(size) | graph @name | complex(a, b) | [literals]

The parser descends recursively and adds nodes as it reads them; their operands are resolved at the end, since a text
that is being debugged may use them before they are defined. Only what no graph could hold is refused here; rules of
stages are the verifier's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import sympy

from pygraph.errors import ParseError, Span
from pygraph.ir import dims
from pygraph.ir.annotations import (
    CAPTURABLE,
    DETAIL,
    EAGER,
    PLACEMENT,
    REASON,
    REGION,
    SELECTED,
    TAGS,
    Parameter,
    Region,
)
from pygraph.ir.cost import Cost
from pygraph.ir.effects import FLAGS, NAMED, Effects
from pygraph.ir.graph import Graph, GraphError, Stage
from pygraph.ir.node import RESERVED, GraphRef, KernelNode, Location, Meta, MetaKey, Token
from pygraph.ir.text.words import COST_FIELDS, WORD, unquote
from pygraph.ir.types import Device, Dim, DType, OpaqueType, ScalarType, TensorType, Type, symbol

__all__ = ["parse"]

T = TypeVar("T")

MAX_DEPTH = 100
"""Of lists within lists and operands within operands: deeper texts are refused before they exhaust the stack."""
MAX_FUNCTIONS = 128
"""Within one expression."""

_ESCAPE = r'\\(?:["\\ntr]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})'
_QUOTED = rf'"(?:[^"\\\n]|{_ESCAPE})*"'
_TOKEN = re.compile(
    r"(?:[ \t\r\n]+|//[^\n]*)*(?:"
    r"(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
    rf"|(?P<int>[0-9]{{1,4300}})|(?P<word>{WORD.pattern})|(?P<string>{_QUOTED})|(?P<index>\.[0-9]{{1,9}})"
    rf"|(?P<value>%(?:[A-Za-z0-9_]+|{_QUOTED}))|(?P<node>\^(?:[A-Za-z0-9_]+|{_QUOTED}))"
    rf"|(?P<symbol>@(?:[A-Za-z0-9_.]+|{_QUOTED}))|(?P<token>\#(?:{WORD.pattern}|{_QUOTED}))"
    r"|(?P<mark>\*\*|[(){}\[\],:=!$<>+\-*/%])|(?P<end>\Z)|(?P<strange>.))"
)
_NAMES = {"int": "a number", "value": "'%name'", "node": "'^name'", "symbol": "'@name'"}
_STAGES = {stage.value: stage for stage in Stage}
_DTYPES = {dtype.value: dtype for dtype in DType}
_TYPES: dict[str, Any] = {"int": "int", "float": "float", "bool": "bool", "opaque": OpaqueType, **_DTYPES}
_WORDS: dict[str, object] = {"None": None, "true": True, "false": False, **_DTYPES}
_STANDARD = {key.name: key for key in (CAPTURABLE, EAGER, REASON, DETAIL, PLACEMENT, REGION, SELECTED, TAGS)}


def parse(text: str, source: str = "<text>") -> Graph:
    """The graph written in ``text``. ``source`` names it in errors. Raises ParseError."""
    parser = _Parser(text, source)
    graph = parser.graph()[1]
    return graph if parser.next.kind == "end" else parser.refuse("the end of the text")


class _Lexeme(NamedTuple):
    """A token of the text and where it starts; ``kind`` is a group of ``_TOKEN``."""

    kind: str
    text: str
    start: int


@dataclass(frozen=True)
class Reference:
    """``%name`` or ``%name.index``, still to be resolved."""

    name: str
    index: int | None
    lexeme: _Lexeme


class _Parser:
    """One text, read from left to right. Each method reads what it is named after."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.depth = 0
        self.functions = 0
        self.next = self._scan(0)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _scan(self, at: int) -> _Lexeme:
        match = _TOKEN.match(self.text, at)
        assert match is not None, "any text has some token"
        kind = str(match.lastgroup)
        lexeme = _Lexeme(kind, match[kind], match.start(kind))
        if kind == "strange":
            is_string = lexeme.text == '"'
            reason = "this string has an unknown escape, or no end on its line" if is_string else "unexpected character"
            raise self._error(reason, lexeme)
        return lexeme

    def _error(self, reason: str, at: _Lexeme) -> ParseError:
        start = min(at.start, len(self.text.rstrip()))
        before = self.text[:start]
        span = Span(before.count("\n") + 1, start - before.rfind("\n"), max(1, len(at.text)))
        return ParseError(reason, span, self.text, self.source)

    def refuse(self, wanted: str) -> Any:
        """Raise ParseError for the next token."""
        found = "the text ends too early" if self.next.kind == "end" else f"unexpected '{self.next.text}'"
        raise self._error(f"{found}: expected {wanted}", self.next)

    def _take(self) -> _Lexeme:
        taken = self.next
        self.next = self._scan(taken.start + len(taken.text))
        return taken

    def _accept(self, text: str) -> _Lexeme | None:
        """The next token if it is that mark or bare word."""
        return self._take() if self.next.text == text and self.next.kind in ("mark", "word") else None

    def _expect(self, text: str, wanted: str = "") -> _Lexeme:
        return self._accept(text) or self.refuse(wanted or f"'{text}'")

    def _kind(self, *kinds: str) -> _Lexeme:
        return self._take() if self.next.kind in kinds else self.refuse(_NAMES.get(kinds[0], f"a {kinds[0]}"))

    def _name(self, lexeme: _Lexeme) -> str:
        """The name or string that a token holds, without its sigil."""
        text = lexeme.text if lexeme.kind in ("word", "string") else lexeme.text[1:]
        return unquote(text) if text.startswith('"') else text

    def _word(self) -> str:
        return self._name(self._kind("word", "string"))

    def _string(self) -> str:
        return self._name(self._kind("string"))

    def _integer(self) -> int:
        sign = -1 if self._accept("-") else 1
        return sign * int(self._kind("int").text)

    def _one_of(self, table: dict[str, T], what: str) -> T:
        lexeme = self._kind("word")
        if lexeme.text not in table:
            raise self._error(f"unknown {what} '{lexeme.text}': use one of {', '.join(table)}", lexeme)
        return table[lexeme.text]

    def _nest(self, step: int) -> None:
        self.depth += step
        if self.depth > MAX_DEPTH:
            raise self._error(f"this is nested more than {MAX_DEPTH} deep", self.next)

    def _list(self, item: Callable[[], T], brackets: str, separator: str = ",") -> list[T]:
        """``item``s within ``brackets``."""
        self._expect(brackets[0])
        self._nest(1)
        items: list[T] = []
        while not self._accept(brackets[1]):
            items.append(item())
            if separator and self.next.text != brackets[1]:
                self._expect(separator, f"'{separator}' or '{brackets[1]}'")
        self._nest(-1)
        return items

    def _optional(self, item: Callable[[], T]) -> list[T]:
        """``item``s in braces, if there are braces."""
        return self._list(item, "{}") if self.next.text == "{" else []

    def _within(self, brackets: str, item: Callable[[], T]) -> T:
        self._expect(brackets[0])
        found = item()
        self._expect(brackets[1])
        return found

    def _keyed(self, value: Callable[[], T]) -> tuple[_Lexeme, T]:
        key = self._kind("word", "string")
        self._expect("=")
        return key, value()

    def _once(self, pairs: Iterable[tuple[_Lexeme, T]]) -> dict[str, T]:
        """``pairs`` as a dictionary. Raises ParseError for a name that is given twice."""
        found: dict[str, T] = {}
        for key, value in pairs:
            name = self._name(key)
            if name in found:
                raise self._error(f"'{name}' is given twice", key)
            found[name] = value
        return found

    # -- graphs --------------------------------------------------------------------------------------------------------

    def graph(self) -> tuple[_Lexeme, Graph]:
        """A graph, and the key that it has among subgraphs."""
        key = self._kind("symbol") if self.next.kind == "symbol" else None
        if key is not None:
            self._expect("=")
        self._expect("graph")
        name = self._kind("symbol")
        graph = Graph(self._name(name))
        self._once(self._optional(lambda: self._setting(graph)))
        self._list(lambda: self._input(graph), "()")
        self._expect("{")
        fills: list[Callable[[], None]] = []
        while self.next.kind in ("value", "node"):
            fills.append(self._node(graph))
        self._expect("return")
        outputs = self._list(self._literal, "()")
        self._expect("}")
        for fill in fills:
            fill()
        graph.set_outputs(self._resolve(graph, tuple(outputs)))
        if self._accept("regions"):
            self._list(lambda: self._region(graph), "{}", separator="")
        if self._accept("subgraphs"):
            graph.subgraphs = self._once(self._list(self.graph, "{}", separator=""))
        return key or name, graph

    def _setting(self, graph: Graph) -> tuple[_Lexeme, None]:
        key = self._kind("word")
        self._expect("=")
        if key.text == "kind":
            graph.kind = self._word()
        elif key.text == "stage":
            graph.stage = self._one_of(_STAGES, "stage")
        elif key.text == "hints":
            graph.hints = self._once(self._list(lambda: self._keyed(self._integer), "{}"))
        else:
            raise self._error(f"unknown setting '{key.text}' of a graph: use kind, stage or hints", key)
        return key, None

    def _input(self, graph: Graph) -> None:
        name = self._defined(graph)
        self._expect(":")
        type = self._type()
        given = self._once(self._optional(self._input_item))
        graph.add_input(type, name, role=given.get("role", "input"), static="static" in given)

    def _input_item(self) -> tuple[_Lexeme, str]:
        key = self._expect("static") if self.next.text == "static" else self._expect("role", "'role = …' or 'static'")
        if key.text == "role":
            self._expect("=")
        return key, self._word() if key.text == "role" else ""

    def _defined(self, graph: Graph) -> str:
        """The name of a value or node that is being defined."""
        lexeme = self._kind("value", "node")
        name = self._name(lexeme)
        if graph.owner(name) is not None:
            raise self._error(f"the name '{name}' is taken in graph {graph.name}", lexeme)
        return name

    def _region(self, graph: Graph) -> None:
        start = self.next
        index = self._integer()
        if index in graph.regions:
            raise self._error(f"region {index} is given twice", start)
        region = graph.regions[index] = Region(meta=self._notes(())[1])
        for reference, parameter in self._list(self._parameter, "()"):
            value = self._resolve(graph, reference)
            if value in region.parameters:
                raise self._error(f"parameter %{value.name} is given twice", reference.lexeme)
            region.parameters[value] = parameter

    def _parameter(self) -> tuple[Reference, Parameter]:
        reference = self._reference()
        self._expect(":")
        decision, reason = self._word(), self._string()
        return reference, Parameter(decision, reason, None if self.next.text in (",", ")") else self._number())

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _node(self, graph: Graph) -> Callable[[], None]:
        """Add the node, still without operands; the result sets them."""
        target = self.next
        name = self._defined(graph)
        expected = 0 if target.kind == "node" else int(self._kind("int").text) if self._accept(":") else 1
        self._expect("=")
        op = self._word()
        arguments = self._list(self._argument, "()")
        types: list[Type] = []
        after: list[_Lexeme] = []
        effects: list[tuple[_Lexeme, Any]] = []
        while self.next.text in ("after", ":", "!"):
            clause = self._take().text
            if clause == "after":
                after += self._list(lambda: self._kind("node"), "()")
            elif clause == "!":
                effects.append(self._effect())
            else:
                types += self._list(self._type, "()") if self.next.text == "(" else [self._type()]
        fields, meta = self._notes(RESERVED)
        if len(types) != expected or (target.kind == "value" and not types):
            raise self._error(f"results: {expected}, types: {len(types)}; ^name has none, %name:2 has two", target)
        node = graph.add(
            op,
            (),
            types,
            name=name,
            effects=Effects(**self._once(effects)),
            cost=Cost(**{field: fields[field] for field in COST_FIELDS if field in fields}),
            loc=self._location(fields, target),
        )
        node.meta = meta
        return lambda: self._fill(graph, node, arguments, after)

    def _fill(
        self,
        graph: Graph,
        node: KernelNode,
        arguments: Sequence[tuple[_Lexeme | None, object]],
        after: Sequence[_Lexeme],
    ) -> None:
        """Set the operands of ``node`` and its order, once all nodes are there."""
        operands = tuple(self._resolve(graph, value) for key, value in arguments if key is None)
        keyed = [(key, self._resolve(graph, value)) for key, value in arguments[len(operands) :] if key is not None]
        if len(operands) + len(keyed) < len(arguments):
            raise self._error("an operand cannot follow an attribute", next(key for key, _ in arguments if key))
        graph.set_args(node, operands, self._once(keyed))
        for lexeme in after:
            try:
                graph.add_order(graph.node(self._name(lexeme)), node)
            except (KeyError, GraphError) as error:
                raise self._error(str(error.args[0]), lexeme) from None

    def _argument(self) -> tuple[_Lexeme | None, object]:
        key = self.next
        if key.kind in ("word", "string"):
            self._take()
            if self._accept("="):
                return key, self._literal()
            self.next = key
        return None, self._literal()

    def _effect(self) -> tuple[_Lexeme, Any]:
        key = self._kind("word")
        if key.text in FLAGS:
            return key, True
        if key.text in NAMED:
            return key, self._within("()", self._string)
        if key.text in ("reads", "writes"):
            return key, tuple(self._list(self._integer, "[]"))
        if key.text == "aliases":
            return key, tuple(self._list(self._alias, "[]"))
        known = ", ".join(("reads", "writes", "aliases", *NAMED, *FLAGS))
        raise self._error(f"unknown effect '{key.text}': use one of {known}", key)

    def _alias(self) -> tuple[int, int]:
        result = self._integer()
        self._expect(":")
        return result, self._integer()

    def _notes(self, reserved: Sequence[str]) -> tuple[dict[str, Any], Meta]:
        """What stands in braces: what bare names in ``reserved`` are given, and the annotations."""
        pairs = self._optional(self._note)
        self._once(pairs)
        fields, meta = {}, Meta()
        for key, value in pairs:
            name = self._name(key)
            if key.kind == "word" and name in reserved:
                fields[name] = value
                continue
            try:
                meta.set(_STANDARD.get(name) or MetaKey(name, type(value)), value)
            except (TypeError, ValueError) as error:
                raise self._error(str(error), key) from None
        return fields, meta

    def _note(self) -> tuple[_Lexeme, Any]:
        name = self.next.text
        in_text = self._string if name in ("loc", "in", "code") else self._literal
        return self._keyed(self._expression if name in COST_FIELDS else in_text)

    def _location(self, fields: dict[str, Any], target: _Lexeme) -> Location | None:
        if fields.keys().isdisjoint(("loc", "in", "code")):
            return None
        match = re.fullmatch(r"(.*):(-?[0-9]{1,18})", fields.get("loc", ""), re.DOTALL)
        if match is None:
            raise self._error('a source line is written loc = "file:line"', target)
        return Location(match[1], int(match[2]), fields.get("in", ""), fields.get("code", ""))

    def _resolve(self, graph: Graph, value: Any) -> Any:
        """An operand with its references replaced by values."""
        if isinstance(value, tuple):
            return tuple(self._resolve(graph, item) for item in value)
        if not isinstance(value, Reference):
            return value
        try:
            return graph.value(value.name, value.index)
        except KeyError as error:
            raise self._error(error.args[0], value.lexeme) from None

    # -- types ---------------------------------------------------------------------------------------------------------

    def _type(self) -> Type:
        found = self._one_of(_TYPES, "type")
        if found is OpaqueType:
            return OpaqueType(self._within("<>", self._string))
        if not isinstance(found, DType):
            return ScalarType(found, self._within("()", self._expression) if self.next.text == "(" else None)
        shape = tuple(self._list(self._expression, "[]"))
        stride = tuple(self._list(self._expression, "{}")) if self.next.text == "{" else None
        return TensorType(found, shape, self._device(), stride)

    def _device(self) -> Device:
        kind = self._name(self._kind("symbol"))
        return Device(kind, self._integer() if self._accept(":") else None)

    # -- literals ------------------------------------------------------------------------------------------------------

    def _literal(self) -> Any:
        kind, text, _ = self.next
        if kind == "value":
            return self._reference()
        if kind == "symbol":
            return self._device()
        if kind == "string":
            return self._string()
        if kind == "token":
            return Token(self._name(self._take()))
        if text == "[":
            return tuple(self._list(self._literal, "[]"))
        if kind in ("int", "float") or text in ("-", "inf", "nan"):
            return self._number()
        if self._accept("$"):
            return self._within("()", self._expression)
        if self._accept("graph"):
            return GraphRef(self._name(self._kind("symbol")))
        if self._accept("complex"):
            return self._complex()
        return self._one_of(_WORDS, "literal") if kind == "word" else self.refuse("a literal")

    def _reference(self) -> Reference:
        lexeme = self._kind("value")
        index = int(self._take().text[1:]) if self.next.kind == "index" else None
        return Reference(self._name(lexeme), index, lexeme)

    def _number(self) -> int | float:
        sign = -1 if self._accept("-") else 1
        if self._accept("inf"):
            return sign * math.inf
        if self._accept("nan"):
            return math.nan
        lexeme = self._kind("int", "float")
        return sign * (int(lexeme.text) if lexeme.kind == "int" else float(lexeme.text))

    def _complex(self) -> complex:
        start = self.next
        try:
            return complex(*self._list(self._number, "()"))
        except (OverflowError, TypeError):
            raise self._error("complex takes two numbers, each a double", start) from None

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self) -> Dim:
        start, self.functions = self.next, 0
        try:
            return dims.read(self._sum())
        except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError) as error:
            raise self._error(f"not an expression: {error}", start) from None

    def _sum(self) -> sympy.Expr:
        terms = [self._product(1)]
        while self.next.text in ("+", "-"):
            terms.append(self._product(1 if self._take().text == "+" else -1))
        return sympy.Add(*terms)

    def _product(self, sign: int) -> sympy.Expr:
        # in one product, as sympy multiplies a number into a sum where nothing else is with them
        factors = [sympy.Integer(-sign if self._accept("-") else sign), self._factor()]
        while True:
            if self._accept("*"):
                factors.append(self._factor())
            elif self._accept("/"):
                factors.append(sympy.Pow(self._factor(), -1))
            elif self.next.text.startswith("%"):
                self.next = self._scan(self.next.start + 1)  # what follows may have been taken for a %value
                factors = [self._call("Mod", [sympy.Mul(*factors), self._factor()])]
            else:
                return sympy.Mul(*factors)

    def _factor(self) -> sympy.Expr:
        self._nest(1)
        if self._accept("-"):
            value = sympy.Mul(-1, self._factor())
        else:
            value = self._atom()
            if self._accept("**"):
                value = sympy.Pow(*dims.within_limits("**", [value, self._factor()]))
        self._nest(-1)
        return value

    def _atom(self) -> sympy.Expr:
        if self.next.text == "(":
            return self._within("()", self._sum)
        if self.next.kind in ("int", "float"):
            number = self._number()
            if number == math.inf:
                raise ValueError("a number takes too many digits")
            return sympy.sympify(number)
        word = self._kind("word", "string")
        name = self._name(word)
        if self.next.text == "(":
            return self._call(name, self._list(self._sum, "()"), opaque=word.kind == "string")
        return dims.CONSTANTS[name] if word.kind == "word" and name in dims.CONSTANTS else symbol(name)

    def _call(self, name: str, operands: Sequence[sympy.Expr], *, opaque: bool = False) -> sympy.Expr:
        self.functions += 1
        if self.functions > MAX_FUNCTIONS:
            raise ValueError(f"there are more than {MAX_FUNCTIONS} functions within one expression")
        return dims.call(name, dims.within_limits(name, operands), opaque=opaque)
