"""``.pgir`` text to graphs. Any error in a text raises a ParseError that points at the place.

    graph    "graph" @name [{settings}] (inputs) { nodes "return" (literals) } ["regions" {…}] ["subgraphs" {…}]
    input    %name : type [{role = word, static, placeholder = word}]
    node     %name[:results] | ^name  =  op(operands, key = literal) clauses [{cost, annotations, module, source line}]
    clause   after(^node, …) | : type | : (type, …) | !flag | !effect("name") | !effect[position, …]
    region   index [{annotations}] (%value: decision "reason", …)
    type     dtype[sizes]{strides}@device | int | float | bool | int(size) | opaque<"name">
    literal  number | "text" | word | %value | @device | #token | $(size) | graph @name | complex(a, b) | [literals]

The parser descends recursively and adds nodes as it reads them. Operands are resolved at the end, since a text that is
being debugged may use values before their definition. The parser refuses only text that no graph can represent; the
verifier checks the rules of stages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sympy

from pygraph.ir import dims
from pygraph.ir.annotations import (
    CAPTURABLE,
    DETAIL,
    EAGER,
    MADE_FROM,
    PLACEMENT,
    REASON,
    REGION,
    SELECTED,
    TAGS,
    Parameter,
    Region,
)
from pygraph.ir.cost import COST_FIELDS, Cost
from pygraph.ir.effects import FLAGS, NAMED, Effects
from pygraph.ir.graph import Graph, GraphError, Stage
from pygraph.ir.node import RESERVED, GraphRef, KernelNode, Location, Meta, MetaKey, Token
from pygraph.ir.types import Device, Dim, DType, OpaqueType, ScalarType, TensorType, Type, symbol
from pygraph.text.reader import Lexeme, Reader, tokens
from pygraph.text.words import NAME, QUOTED, WORD, unquote

T = TypeVar("T")

MAX_FUNCTIONS = 128
"""Maximum number of functions within one expression."""

_TOKENS = tokens(
    r"(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
    rf"|(?P<int>[0-9]{{1,4300}})|(?P<word>{WORD.pattern})|(?P<index>\.[0-9]{{1,9}})"
    rf"|(?P<value>%(?:{NAME.pattern}|{QUOTED}))|(?P<node>\^(?:{NAME.pattern}|{QUOTED}))"
    rf"|(?P<symbol>@(?:[A-Za-z0-9_.]+|{QUOTED}))|(?P<token>\#(?:{WORD.pattern}|{QUOTED}))"
    r"|(?P<mark>\*\*|[(){}\[\],:=!$<>+\-*/%])"
)
_NAMES = {"int": "a number", "value": "'%name'", "node": "'^name'", "symbol": "'@name'"}
_STAGES = {stage.value: stage for stage in Stage}
_DTYPES = {dtype.value: dtype for dtype in DType}
_TYPES: dict[str, Any] = {"int": "int", "float": "float", "bool": "bool", "opaque": OpaqueType, **_DTYPES}
_WORDS: dict[str, object] = {"None": None, "true": True, "false": False, **_DTYPES}
_STANDARD = {key.name: key for key in (CAPTURABLE, EAGER, REASON, DETAIL, MADE_FROM, PLACEMENT, REGION, SELECTED, TAGS)}


def parse_graph(text: str, source: str = "<text>") -> Graph:
    """The graph in ``text``. ``source`` names the text in errors. Raises ParseError."""
    parser = _Parser(text, source)
    graph = parser.graph()[1]
    return graph if parser.next.kind == "end" else parser.refuse("the end of the text")


def parse_call(text: str) -> Call:
    """The call in ``text``, written as in a node; its operands may be calls. Raises ParseError."""
    parser = _Parser(text, "<pattern>")
    call = parser.call()
    return call if parser.next.kind == "end" else parser.refuse("the end of the text")


@dataclass(frozen=True)
class Call:
    """``op(args, key = literal)``; operands are literals, references, calls, and tuples of literals and references."""

    op: str
    args: tuple[object, ...]
    attrs: dict[str, object]


@dataclass(frozen=True)
class Reference:
    """``%name`` or ``%name.index``, still to be resolved."""

    name: str
    index: int | None
    lexeme: Lexeme


class _Parser(Reader):
    """Parser of ``.pgir`` text. Each method reads the element in its name."""

    pattern = _TOKENS
    names = _NAMES

    functions = 0

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _name(self, lexeme: Lexeme) -> str:
        """The name or string that a token holds, without its sigil."""
        text = lexeme.text if lexeme.kind in ("word", "string") else lexeme.text[1:]
        return unquote(text) if text.startswith('"') else text

    def _word(self) -> str:
        return self._name(self.kind("word", "string"))

    def _optional(self, item: Callable[[], T]) -> list[T]:
        """``item``s in braces, if there are braces."""
        return self.items(item, "{}") if self.next.text == "{" else []

    def _within(self, brackets: str, item: Callable[[], T]) -> T:
        self.expect(brackets[0])
        found = item()
        self.expect(brackets[1])
        return found

    def _keyed(self, value: Callable[[], T]) -> tuple[Lexeme, T]:
        key = self.kind("word", "string")
        self.expect("=")
        return key, value()

    def _once(self, pairs: Iterable[tuple[Lexeme, T]]) -> dict[str, T]:
        """``pairs`` as a dictionary. Raises ParseError for a name that is given twice."""
        found: dict[str, T] = {}
        for key, value in pairs:
            name = self._name(key)
            if name in found:
                raise self.error(f"'{name}' is given twice", key)
            found[name] = value
        return found

    # -- graphs --------------------------------------------------------------------------------------------------------

    def graph(self) -> tuple[Lexeme, Graph]:
        """A graph, and its key among subgraphs."""
        key = self.kind("symbol") if self.next.kind == "symbol" else None
        if key is not None:
            self.expect("=")
        self.expect("graph")
        name = self.kind("symbol")
        graph = Graph(self._name(name))
        self._once(self._optional(lambda: self._setting(graph)))
        declared = graph.operators.copy()
        self.items(lambda: self._input(graph), "()")
        self.expect("{")
        fills: list[Callable[[], None]] = []
        while self.next.kind in ("value", "node"):
            fills.append(self._node(graph))
        self.expect("return")
        outputs = self.items(self._literal, "()")
        self.expect("}")
        for fill in fills:
            fill()
        graph.operators = declared  # not those that torch knows here: a text means the same in every process
        graph.set_outputs(self._resolve(graph, tuple(outputs)))
        if self.accept("regions"):
            self.items(lambda: self._region(graph), "{}", separator="")
        if self.accept("subgraphs"):
            graph.subgraphs = self._once(self.items(self.graph, "{}", separator=""))
        return key or name, graph

    def _setting(self, graph: Graph) -> tuple[Lexeme, None]:
        key = self.kind("word")
        self.expect("=")
        if key.text == "kind":
            graph.kind = self._word()
        elif key.text == "stage":
            graph.stage = self.one_of(_STAGES, "stage")
        elif key.text == "hints":
            graph.hints = self._once(self.items(lambda: self._keyed(self.integer), "{}"))
        elif key.text == "operators":
            graph.operators = set(self.items(self._word, "[]"))
        else:
            raise self.error(f"unknown setting '{key.text}' of a graph: use kind, stage, hints or operators", key)
        return key, None

    def _input(self, graph: Graph) -> None:
        name = self._defined(graph)
        self.expect(":")
        type = self._type()
        given = self._once(self._optional(self._input_item))
        placeholder = given.get("placeholder")
        graph.add_input(type, name, role=given.get("role", "input"), static="static" in given, placeholder=placeholder)

    def _input_item(self) -> tuple[Lexeme, str]:
        static, placeholder = self.accept("static"), self.accept("placeholder")
        key = static or placeholder or self.expect("role", "'role = …', 'static' or 'placeholder = …'")
        if not static:
            self.expect("=")
        return key, "" if static else self._word()

    def _defined(self, graph: Graph) -> str:
        """The name of a value or node that is being defined."""
        lexeme = self.kind("value", "node")
        name = self._name(lexeme)
        if graph.owner(name) is not None:
            raise self.error(f"the name '{name}' is taken in graph {graph.name}", lexeme)
        return name

    def _region(self, graph: Graph) -> None:
        start = self.next
        index = self.integer()
        if index in graph.regions:
            raise self.error(f"region {index} is given twice", start)
        region = graph.regions[index] = Region(meta=self._notes(())[1])
        for reference, parameter in self.items(self._parameter, "()"):
            value = self._resolve(graph, reference)
            if value in region.parameters:
                raise self.error(f"parameter %{value.name} is given twice", reference.lexeme)
            region.parameters[value] = parameter

    def _parameter(self) -> tuple[Reference, Parameter]:
        reference = self._reference()
        self.expect(":")
        return reference, Parameter(self._word(), self.string())

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _node(self, graph: Graph) -> Callable[[], None]:
        """Add a node without operands. Returns a function that sets them."""
        target = self.next
        name = self._defined(graph)
        expected = 0 if target.kind == "node" else int(self.kind("int").text) if self.accept(":") else 1
        self.expect("=")
        op = self._word()
        arguments = self.items(self._argument, "()")
        types: list[Type] = []
        after: list[Lexeme] = []
        effects: list[tuple[Lexeme, Any]] = []
        while self.next.text in ("after", ":", "!"):
            clause = self.take().text
            if clause == "after":
                after += self.items(lambda: self.kind("node"), "()")
            elif clause == "!":
                effects.append(self._effect())
            else:
                types += self.items(self._type, "()") if self.next.text == "(" else [self._type()]
        fields, meta = self._notes(RESERVED)
        if len(types) != expected or (target.kind == "value" and not types):
            raise self.error(f"results: {expected}, types: {len(types)}; ^name has none, %name:2 has two", target)
        node = graph.add(
            op,
            (),
            types,
            name=name,
            effects=Effects(**self._once(effects)),
            cost=Cost(**{field: fields[field] for field in COST_FIELDS if field in fields}),
            loc=self._location(fields, target),
            module=fields.get("in", ""),
        )
        node.meta = meta
        return lambda: self._fill(graph, node, arguments, after)

    def _fill(
        self,
        graph: Graph,
        node: KernelNode,
        arguments: Sequence[tuple[Lexeme | None, object]],
        after: Sequence[Lexeme],
    ) -> None:
        """Set the operands of ``node`` and its explicit order, once all nodes exist."""
        operands = tuple(self._resolve(graph, value) for key, value in arguments if key is None)
        keyed = [(key, self._resolve(graph, value)) for key, value in arguments[len(operands) :] if key is not None]
        if len(operands) + len(keyed) < len(arguments):
            raise self.error("an operand cannot follow an attribute", next(key for key, _ in arguments if key))
        graph.set_args(node, operands, self._once(keyed))
        for lexeme in after:
            try:
                graph.add_order(graph.node(self._name(lexeme)), node)
            except (KeyError, GraphError) as error:
                raise self.error(str(error.args[0]), lexeme) from None

    def _argument(self, operand: Callable[[], object] | None = None) -> tuple[Lexeme | None, object]:
        key = self.next
        if key.kind in ("word", "string"):
            self.take()
            if self.accept("="):
                return key, (operand or self._literal)()
            self.next = key
        return None, (operand or self._literal)()

    def call(self) -> Call:
        """A call outside of a graph."""
        op, pairs = self._word(), self.items(lambda: self._argument(self._operand), "()")
        args = tuple(value for key, value in pairs if key is None)
        return Call(op, args, self._once((key, value) for key, value in pairs if key is not None))

    def _operand(self) -> object:
        word = self.next
        if word.kind in ("word", "string") and word.text not in ("complex", "graph"):
            self.take()
            is_call, self.next = self.next.text == "(", word
            if is_call:
                return self.call()
        return self._literal()

    def _effect(self) -> tuple[Lexeme, Any]:
        key = self.kind("word")
        if key.text in FLAGS:
            return key, True
        if key.text in NAMED:
            return key, self._within("()", self.string)
        if key.text in ("reads", "writes"):
            return key, tuple(self.items(self.integer, "[]"))
        if key.text == "aliases":
            return key, tuple(self.items(self._alias, "[]"))
        known = ", ".join(("reads", "writes", "aliases", *NAMED, *FLAGS))
        raise self.error(f"unknown effect '{key.text}': use one of {known}", key)

    def _alias(self) -> tuple[int, int]:
        result = self.integer()
        self.expect(":")
        return result, self.integer()

    def _notes(self, reserved: Sequence[str]) -> tuple[dict[str, Any], Meta]:
        """Attributes in braces: values of unquoted names in ``reserved``, and the annotations."""
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
                raise self.error(str(error), key) from None
        return fields, meta

    def _note(self) -> tuple[Lexeme, Any]:
        name = self.next.text
        if name == "frames":
            return self._keyed(lambda: tuple(self.items(self.string, "[]")))
        in_text = self.string if name in RESERVED else self._literal
        return self._keyed(self._expression if name in COST_FIELDS else in_text)

    def _location(self, fields: dict[str, Any], target: Lexeme) -> Location | None:
        if fields.keys().isdisjoint(("loc", "function", "code", "frames")):
            return None
        match = re.fullmatch(r"(.*):(-?[0-9]{1,18})", fields.get("loc", ""), re.DOTALL)
        if match is None:
            raise self.error('a source line is written loc = "file:line"', target)
        around = (fields.get("function", ""), fields.get("code", ""), fields.get("frames", ()))
        return Location(match[1], int(match[2]), *around)

    def _resolve(self, graph: Graph, value: Any) -> Any:
        """An operand with its references replaced by values."""
        if isinstance(value, tuple):
            return tuple(self._resolve(graph, item) for item in value)
        if not isinstance(value, Reference):
            return value
        try:
            return graph.value(value.name, value.index)
        except KeyError as error:
            raise self.error(error.args[0], value.lexeme) from None

    # -- types ---------------------------------------------------------------------------------------------------------

    def _type(self) -> Type:
        found = self.one_of(_TYPES, "type")
        if found is OpaqueType:
            return OpaqueType(self._within("<>", self.string))
        if not isinstance(found, DType):
            return ScalarType(found, self._within("()", self._expression) if self.next.text == "(" else None)
        shape = tuple(self.items(self._expression, "[]"))
        stride = tuple(self.items(self._expression, "{}")) if self.next.text == "{" else None
        return TensorType(found, shape, self._device(), stride)

    def _device(self) -> Device:
        kind = self._name(self.kind("symbol"))
        return Device(kind, self.integer() if self.accept(":") else None)

    # -- literals ------------------------------------------------------------------------------------------------------

    def _literal(self) -> Any:
        kind, text, _ = self.next
        if kind == "value":
            return self._reference()
        if kind == "symbol":
            return self._device()
        if kind == "string":
            return self.string()
        if kind == "token":
            return Token(self._name(self.take()))
        if text == "[":
            return tuple(self.items(self._literal, "[]"))
        if kind in ("int", "float") or text in ("-", "inf", "nan"):
            return self._number()
        if self.accept("$"):
            return self._within("()", self._expression)
        if self.accept("graph"):
            return GraphRef(self._name(self.kind("symbol")))
        if self.accept("complex"):
            return self._complex()
        return self.one_of(_WORDS, "literal") if kind == "word" else self.refuse("a literal")

    def _reference(self) -> Reference:
        lexeme = self.kind("value")
        index = int(self.take().text[1:]) if self.next.kind == "index" else None
        return Reference(self._name(lexeme), index, lexeme)

    def _number(self) -> int | float:
        sign = -1 if self.accept("-") else 1
        if self.accept("inf"):
            return sign * math.inf
        if self.accept("nan"):
            return math.nan
        lexeme = self.kind("int", "float")
        return sign * (int(lexeme.text) if lexeme.kind == "int" else float(lexeme.text))

    def _complex(self) -> complex:
        start = self.next
        try:
            return complex(*self.items(self._number, "()"))
        except (OverflowError, TypeError):
            raise self.error("complex takes two numbers, each a double", start) from None

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self) -> Dim:
        start, self.functions = self.next, 0
        try:
            return dims.read(self._sum())
        except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError) as error:
            raise self.error(f"not an expression: {error}", start) from None

    def _sum(self) -> sympy.Expr:
        terms = [self._product(1)]
        while self.next.text in ("+", "-"):
            terms.append(self._product(1 if self.take().text == "+" else -1))
        return sympy.Add(*terms)

    def _product(self, sign: int) -> sympy.Expr:
        # in one product: sympy multiplies a number into a sum if these are the only two factors
        factors = [sympy.Integer(-sign if self.accept("-") else sign), self._factor()]
        while True:
            if self.accept("*"):
                factors.append(self._factor())
            elif self.accept("/"):
                factors.append(sympy.Pow(self._divisor(), -1))
            elif self.next.text.startswith("%"):
                self.next = self.scan(self.next.start + 1)  # the lexer may have read '%' and a name as a %value
                at = self.next
                factors = [self._call(at, "Mod", [sympy.Mul(*factors), self._divisor()])]
            else:
                return sympy.Mul(*factors)

    def _divisor(self) -> sympy.Expr:
        start, value = self.next, self._factor()
        if value == 0:
            raise self.error("not an expression: division by zero", start)
        return value

    def _factor(self) -> sympy.Expr:
        self.nest(1)
        if self.accept("-"):
            value = sympy.Mul(-1, self._factor())
        else:
            value = self._atom()
            if self.accept("**"):
                value = sympy.Pow(*dims.within_limits("**", [value, self._factor()]))
        self.nest(-1)
        return value

    def _atom(self) -> sympy.Expr:
        if self.next.text == "(":
            return self._within("()", self._sum)
        if self.next.kind in ("int", "float"):
            number = self._number()
            if number == math.inf:
                raise ValueError("a number takes too many digits")
            return sympy.sympify(number)
        word = self.kind("word", "string")
        name = self._name(word)
        if self.next.text == "(":
            if word.kind == "word" and name not in dims.FUNCTIONS:
                known = f"use one of {', '.join(dims.FUNCTIONS)}; other functions are in quotes, and stay as they are"
                raise self.error(f"unknown function '{name}': {known}", word)
            return self._call(word, name, self.items(self._sum, "()"))
        return dims.CONSTANTS[name] if word.kind == "word" and name in dims.CONSTANTS else symbol(name)

    def _call(self, at: Lexeme, name: str, operands: Sequence[sympy.Expr]) -> sympy.Expr:
        self.functions += 1
        if self.functions > MAX_FUNCTIONS:
            raise ValueError(f"there are more than {MAX_FUNCTIONS} functions within one expression")
        try:
            return dims.call(name, dims.within_limits(name, operands), opaque=at.kind == "string")
        except (ArithmeticError, TypeError) as error:
            raise self.error(f"not an expression: {error}", at) from None
