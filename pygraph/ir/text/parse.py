"""``.pgir`` text to graphs. Whatever is wrong with a text is a ParseError that points at the place.

``grammar.lark`` says what a text looks like. The methods of ``_Actions`` are named after its rules and run as each rule
is recognised: expressions, types and literals become themselves, nodes and regions plain records that keep the tokens
errors point at. Once a whole graph is read, ``_Builder`` resolves its names. Only what no graph could hold is refused
here; rules of stages are the verifier's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from lark import Lark, Transformer, v_args
from lark import Token as Lexeme
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken, VisitError

from pygraph.errors import ParseError, Span
from pygraph.ir import dims
from pygraph.ir.annotations import CAPTURABLE, DETAIL, PLACEMENT, REASON, REGION, SELECTED, TAGS, Parameter, Region
from pygraph.ir.cost import Cost
from pygraph.ir.dims import Written
from pygraph.ir.effects import Effects
from pygraph.ir.graph import Graph, GraphError, Stage
from pygraph.ir.node import RESERVED, Arg, GraphRef, KernelNode, Location, Meta, Token, Value
from pygraph.ir.text.words import LITERAL_WORDS, unquote
from pygraph.ir.types import Device, Dim, DType, OpaqueType, ScalarType, TensorType, Type

__all__ = ["parse", "span_of"]

T = TypeVar("T")

MAX_DEPTH = 100
"""Brackets within brackets; deeper texts are refused."""

_BRACKETS = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|//[^\n]*|[\[({]|[\])}]')
_DTYPES = {dtype.value: dtype for dtype in DType}
_SCALARS = ("int", "float", "bool")
_STANDARD = {key.name: key.type for key in (CAPTURABLE, REASON, DETAIL, PLACEMENT, REGION, SELECTED, TAGS)}
_EXAMPLES = {"reads": "[0]", "writes": "[0]", "aliases": "[0:0]", "rng": '("name")', "collective": '("name")'}
_EXAMPLES |= dict.fromkeys(("sync", "dynamic", "barrier"), "")
"""How each effect is written after its name."""


def parse(text: str, source: str = "<text>") -> Graph:
    """The graph written in ``text``. ``source`` names it in errors. Raises ParseError."""
    try:
        _check_depth(text)
        return _lark().parse(text)  # type: ignore[return-value]  # with a transformer, lark returns what 'start' makes
    except _Problem as problem:
        reason, span = problem.reason, span_of(problem.lexeme)
    except VisitError as error:
        raise error.orig_exc from None
    except UnexpectedInput as error:
        reason, span = _explain(error, text)
    except RecursionError:
        reason, span = "an expression is nested too deeply", Span(1, 1)
    raise ParseError(reason, span, text, source)


def span_of(lexeme: Lexeme) -> Span:
    """Where ``lexeme`` stands in its text."""
    return Span(lexeme.line or 1, lexeme.column or 1, max(1, len(lexeme)))


@cache
def _lark() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", maybe_placeholders=True, transformer=_Actions())


def _check_depth(text: str) -> None:
    """Refuse deep nesting before anything recurses into it."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        char = match.group()
        depth += 1 if char in "([{" else -1 if char in ")]}" else 0
        if depth > MAX_DEPTH:
            before = text[: match.start()]
            place = Lexeme("BRACKET", char, line=before.count("\n") + 1, column=len(before) - before.rfind("\n"))
            raise _Problem(f"brackets are nested more than {MAX_DEPTH} deep", place)


# -- errors ------------------------------------------------------------------------------------------------------------

_NAMES = {
    "$END": "the end of the text",
    "FLOAT": "a number",
    "INT": "a number",
    "NODE": "'^name'",
    "STRING": "a string",
    "SYMBOL": "'@name'",
    "TOKEN": "'#name'",
    "VALUE": "'%name'",
    "WORD": "a word",
}


class _Problem(Exception):
    """What is wrong, and with which token. Becomes a ParseError once the text is at hand."""

    def __init__(self, reason: str, lexeme: Lexeme) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lexeme = lexeme


def _explain(error: UnexpectedInput, text: str) -> tuple[str, Span]:
    if isinstance(error, UnexpectedCharacters):
        char = error.char
        reason = "this string is not closed on its line" if char == '"' else f"unexpected character {char!r}"
        return _with_expected(reason, error.allowed), Span(error.line, error.column)
    if isinstance(error, UnexpectedToken) and error.token.type != "$END":
        return _with_expected(f"unexpected '{error.token}'", error.expected), span_of(error.token)
    end = text.rstrip()
    last = end.rfind("\n")
    expected = error.expected if isinstance(error, (UnexpectedToken, UnexpectedEOF)) else ()
    return _with_expected("the text ends too early", expected), Span(end.count("\n") + 1, len(end) - last)


def _with_expected(reason: str, terminals: object) -> str:
    names = sorted({_readable(str(name)) for name in terminals or ()})  # type: ignore[attr-defined]  # a set of names
    return f"{reason}: expected {' or '.join(names)}" if 0 < len(names) <= 6 else reason


def _readable(terminal: str) -> str:
    if terminal in _NAMES:
        return _NAMES[terminal]
    pattern = next((t.pattern.value for t in _lark().terminals if t.name == terminal), terminal)
    return f"'{pattern}'"


# -- what is read ------------------------------------------------------------------------------------------------------


class _Word(NamedTuple):
    """A name, bare or quoted, with its token."""

    text: str
    lexeme: Lexeme

    @property
    def is_bare(self) -> bool:
        return self.lexeme.type == "WORD"


class _Reference(NamedTuple):
    """``%name`` or ``%name.index``."""

    name: str
    place: int | None
    lexeme: Lexeme


class _Argument(NamedTuple):
    """One operand, attribute, annotation or cost field; ``key`` is None for an operand."""

    key: _Word | None
    value: object
    is_cost: bool = False


class _Clause(NamedTuple):
    """What follows the operands: ``after``, ``types``, or an effect in one of its forms (flag, named, positions)."""

    form: str
    values: Sequence[Any]
    lexeme: Lexeme


class _Node(NamedTuple):
    """One node line. ``results`` is the number after the colon, when there is one."""

    target: Lexeme
    results: Lexeme | None
    op: str
    arguments: Sequence[_Argument]
    clauses: Sequence[_Clause]
    annotations: Sequence[_Argument]


class _Parameter(NamedTuple):
    value: _Reference
    parameter: Parameter


class _Region(NamedTuple):
    number: int
    lexeme: Lexeme
    annotations: Sequence[_Argument]
    parameters: Sequence[_Parameter]


def _text(lexeme: Lexeme, sigil: int = 0) -> str:
    """The name or string that a token holds, behind ``sigil`` characters."""
    text = str(lexeme)[sigil:]
    if not text.startswith('"'):
        return text
    try:
        return unquote(text)
    except ValueError as error:
        raise _Problem(str(error), lexeme) from None


def _integer(lexeme: Lexeme, minus: Lexeme | None = None) -> int:
    try:
        return -int(lexeme) if minus else int(lexeme)
    except ValueError:
        raise _Problem("this integer has too many digits", lexeme) from None


def _real(lexeme: Lexeme) -> float:
    if lexeme not in ("inf", "nan"):
        raise _Problem(f"'{lexeme}' is no number: use digits, inf or nan", lexeme)
    return float(lexeme)


def _reference(lexeme: Lexeme) -> _Reference:
    """``%name.index`` taken apart."""
    text = str(lexeme)
    dot = text.find(".", text.rfind('"') if text[1] == '"' else 0)
    if dot < 0:
        return _Reference(_text(lexeme, 1), None, lexeme)
    if len(text) - dot > 10:
        raise _Problem("this index is too large", lexeme)
    return _Reference(_text(lexeme.update(value=text[:dot]), 1), int(text[dot + 1 :]), lexeme)


def _defined(lexeme: Lexeme) -> str:
    """The name of a value or node that is being defined."""
    if lexeme.type == "NODE":
        return _text(lexeme, 1)
    reference = _reference(lexeme)
    if reference.place is not None:
        raise _Problem(f"a definition has no index: write %{reference.name}", lexeme)
    return reference.name


def _once(pairs: Iterable[tuple[_Word, T]]) -> dict[str, T]:
    """``pairs`` as a dictionary. Raises _Problem for a name that is given twice."""
    found: dict[str, T] = {}
    for key, value in pairs:
        if key.text in found:
            raise _Problem(f"'{key.text}' is given twice", key.lexeme)
        found[key.text] = value
    return found


Sum = tuple[Written, Lexeme]
"""A part of an expression, and the token that it begins with."""


@v_args(inline=True)
class _Actions(Transformer[Lexeme, Graph]):
    """What becomes of each rule of the grammar. Children are what the actions below returned, and tokens."""

    # -- expressions: sums, products, powers, functions and symbols

    def expression(self, whole: Sum) -> Dim:
        written, lexeme = whole
        try:
            return dims.read(written)
        except RecursionError:
            raise _Problem("not an expression: it is nested too deeply", lexeme) from None
        except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise _Problem(f"not an expression: {error}", lexeme) from None

    def constant(self, lexeme: Lexeme) -> Sum:
        return Written("number", str(lexeme)), lexeme

    def symbol(self, word: _Word) -> Sum:
        kind = "constant" if word.is_bare and word.text in dims.CONSTANTS else "symbol"
        return Written(kind, word.text), word.lexeme

    def call(self, word: _Word, *operands: Sum) -> Sum:
        try:
            made = dims.call(word.text, [written for written, _ in operands], opaque=not word.is_bare)
        except TypeError:
            raise _Problem(f"not an expression: wrong number of operands of {word.text}", word.lexeme) from None
        return made, word.lexeme

    def power(self, base: Sum, exponent: Sum) -> Sum:
        return dims.call("FloatPow", [base[0], exponent[0]]), base[1]

    def negation(self, minus: Lexeme, operand: Sum) -> Sum:
        return Written.of("neg", "", [operand[0]]), minus

    def sum(self, first: Sum, *rest: Any) -> Sum:
        signed = [(-1 if sign == "-" else 1, term[0]) for sign, term in zip(rest[::2], rest[1::2], strict=True)]
        return Written("add", "", ((1, first[0]), *signed)), first[1]

    def product(self, first: Sum, *rest: Any) -> Sum:
        factors = [(1, first[0])]
        for operator, (factor, _) in zip(rest[::2], rest[1::2], strict=True):
            if operator == "%":
                whole = factors[0][1] if len(factors) == 1 else Written("mul", "", tuple(factors))
                factors = [(1, dims.call("Mod", [whole, factor]))]
            else:
                factors.append((-1 if operator == "/" else 1, factor))
        return (factors[0][1] if len(factors) == 1 else Written("mul", "", tuple(factors))), first[1]

    # -- types

    def dims(self, *sizes: Dim) -> tuple[Dim, ...]:
        return sizes

    strides = dims

    def device(self, name: Lexeme, index: int | None) -> Device:
        return Device(_text(name, 1), index)

    def tensor_type(self, word: Lexeme, shape: tuple[Dim, ...], stride: tuple[Dim, ...] | None, device: Device) -> Type:
        if word not in _DTYPES:
            raise _Problem(f"unknown dtype '{word}': use one of {', '.join(_DTYPES)}", word)
        return TensorType(_DTYPES[word], shape, device, stride)

    def scalar_type(self, word: _Word, value: Dim | None) -> Type:
        if word.is_bare and word.text not in _SCALARS:
            hint = "a tensor is written dtype[sizes]@device" if word.text in _DTYPES else "use int, float or bool"
            raise _Problem(f"'{word.text}' is no scalar type: {hint}", word.lexeme)
        return ScalarType(word.text, value)

    def opaque_type(self, word: Lexeme, name: Lexeme) -> Type:
        if word != "opaque":
            raise _Problem(f"unknown type '{word}': only opaque<\"name\"> has angle brackets", word)
        return OpaqueType(_text(name))

    # -- literals: operands and annotations

    def word(self, lexeme: Lexeme) -> _Word:
        return _Word(_text(lexeme), lexeme)

    def integer(self, minus: Lexeme | None, digits: Lexeme) -> int:
        return _integer(digits, minus)

    def number(self, minus: Lexeme | None, lexeme: Lexeme) -> int | float:
        if lexeme.type == "WORD":
            value: int | float = _real(lexeme)
        else:
            value = _integer(lexeme) if lexeme.type == "INT" else float(lexeme)
        return -value if minus else value

    def real_word(self, lexeme: Lexeme) -> float:
        return _real(lexeme)

    def bare_word(self, word: _Word) -> object:
        if not word.is_bare:
            return word.text
        if word.text in LITERAL_WORDS:
            return LITERAL_WORDS[word.text]
        if word.text not in _DTYPES:
            raise _Problem(f"unknown word '{word.text}': strings are quoted, tokens have '#'", word.lexeme)
        return _DTYPES[word.text]

    def reference(self, lexeme: Lexeme) -> _Reference:
        return _reference(lexeme)

    def graph_reference(self, word: Lexeme, name: Lexeme) -> GraphRef:
        if word != "graph":
            raise _Problem(f"unexpected '{word}': a subgraph is written graph @name", word)
        return GraphRef(_text(name, 1))

    def enumerated(self, lexeme: Lexeme) -> Token:
        return Token(_text(lexeme, 1))

    def complex_number(self, word: Lexeme, real: float, imaginary: float) -> complex:
        if word != "complex":
            raise _Problem(f"unexpected '{word}': complex(real, imaginary) is the only literal of this form", word)
        try:
            return complex(real, imaginary)
        except OverflowError:
            raise _Problem("this number is too large", word) from None

    def sequence(self, *items: object) -> tuple[object, ...]:
        return items

    def argument(self, *parts: Any) -> _Argument:
        return _Argument(*parts) if len(parts) == 2 else _Argument(None, *parts)

    def cost(self, lexeme: Lexeme, value: Dim) -> _Argument:
        return _Argument(_Word(str(lexeme), lexeme), value, True)

    # -- lines and graphs

    def _tuple(self, *children: Any) -> tuple[Any, ...]:
        return children

    header = hint = inputs = input = items = item = result = setting = nodes = target = arguments = _tuple
    clauses = annotations = regions = parameters = subgraphs = _tuple

    def hints(self, *pairs: tuple[_Word, int]) -> dict[str, int]:
        return _once(pairs)

    def position(self, first: int, second: int | None) -> int | tuple[int, int]:
        return first if second is None else (first, second)

    def after(self, *nodes: Lexeme) -> _Clause:
        return _Clause("after", nodes, nodes[0])

    def types(self, colon: Lexeme, *types: Type) -> _Clause:
        return _Clause("types", types, colon)

    def flag(self, name: Lexeme) -> _Clause:
        return _Clause("flag", (), name)

    def named(self, name: Lexeme, value: Lexeme) -> _Clause:
        return _Clause("named", (_text(value),), name)

    def positions(self, name: Lexeme, *positions: object) -> _Clause:
        return _Clause("positions", positions, name)

    def node(self, target: Any, op: _Word, arguments: Any, clauses: Any, annotations: Any) -> _Node:
        lexeme, results = target
        return _Node(lexeme, results, op.text, arguments, clauses, annotations or ())

    def region(self, minus: Lexeme | None, digits: Lexeme, annotations: Any, parameters: Any) -> _Region:
        return _Region(_integer(digits, minus), digits, annotations or (), parameters)

    def parameter(self, value: Lexeme, decision: _Word, reason: Lexeme, cost_us: float | None) -> _Parameter:
        return _Parameter(_reference(value), Parameter(decision.text, _text(reason), cost_us))

    def subgraph(self, key: Lexeme | None, made: tuple[Lexeme, Graph]) -> tuple[str, Lexeme, Graph]:
        name, graph = made
        return (graph.name if key is None else _text(key, 1)), key or name, graph

    def graph(
        self,
        name: Lexeme,
        header: Any,
        inputs: Any,
        nodes: Any,
        result: Any,
        regions: Sequence[_Region] | None,
        subgraphs: Sequence[tuple[str, Lexeme, Graph]] | None,
    ) -> tuple[Lexeme, Graph]:
        builder = _Builder(Graph(_text(name, 1)))
        builder.apply_settings(header or ())
        for lexeme, type, items in inputs:
            builder.add_input(lexeme, type, items or ())
        builder.add_nodes(nodes)
        builder.graph.set_outputs(builder.resolve(result))
        for region in regions or ():
            builder.add_region(region)
        for key, lexeme, subgraph in subgraphs or ():
            if key in builder.graph.subgraphs:
                raise _Problem(f"graph @{builder.graph.name} has two subgraphs called '{key}'", lexeme)
            builder.graph.subgraphs[key] = subgraph
        return name, builder.graph

    def start(self, made: tuple[Lexeme, Graph]) -> Graph:
        return made[1]


# -- building ----------------------------------------------------------------------------------------------------------


class _Builder:
    """Fills one graph; operands may be defined later than they are used, in a text that is being debugged."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs: dict[str, Value] = {}
        self.nodes: dict[str, KernelNode] = {}

    def apply_settings(self, settings: Iterable[tuple[_Word, _Word | dict[str, int]]]) -> None:
        words = {key.text: key.lexeme for key, _ in settings}
        for key, value in _once(settings).items():
            if key not in ("kind", "stage", "hints"):
                raise _Problem(f"unknown setting '{key}' of a graph: use kind, stage or hints", words[key])
            if isinstance(value, dict) != (key == "hints"):
                raise _Problem(f"'{key}' takes {'{symbol = value}' if key == 'hints' else 'a name'}", words[key])
            if isinstance(value, dict):
                self.graph.hints = value
            elif key == "kind":
                self.graph.kind = value.text
            elif value.text in {stage.value for stage in Stage}:
                self.graph.stage = Stage(value.text)
            else:
                known = ", ".join(stage.value for stage in Stage)
                raise _Problem(f"unknown stage '{value.text}': use one of {known}", value.lexeme)

    def add_input(self, lexeme: Lexeme, type: Type, items: Sequence[tuple[_Word, _Word | None]]) -> None:
        for key, value in items:
            if (key.text, value is None) not in (("role", False), ("static", True)):
                raise _Problem("an input takes 'role = …' and 'static'", key.lexeme)
        given = _once(items)
        role = given.get("role")
        name = _defined(lexeme)
        with_role = "input" if role is None else role.text
        made = _placed(lexeme, lambda: self.graph.add_input(type, name, role=with_role, static="static" in given))
        self.inputs[name] = made

    def add_nodes(self, records: Sequence[_Node]) -> None:
        for record in records:
            node = self._add_node(record)
            self.nodes[node.name] = node
        for record, node in zip(records, self.nodes.values(), strict=True):
            self._add_operands(node, record)

    def _add_node(self, record: _Node) -> KernelNode:
        """Add the node, still without operands."""
        types = _types(record)
        cost, meta, loc = _annotations(record.annotations)
        effects = _effects(record.clauses)
        name = _defined(record.target)
        make = self.graph.add
        node = _placed(
            record.target, lambda: make(record.op, (), types, name=name, effects=effects, cost=cost, loc=loc)
        )
        node.meta = meta
        return node

    def _add_operands(self, node: KernelNode, record: _Node) -> None:
        operands = [argument.value for argument in record.arguments if argument.key is None]
        if any(argument.key is not None for argument in record.arguments[: len(operands)]):
            raise _Problem("an operand cannot follow an attribute", record.target)
        attrs = _once((a.key, self.resolve(a.value)) for a in record.arguments if a.key is not None)
        self.graph.set_args(node, self.resolve(tuple(operands)), attrs)
        for clause in record.clauses:
            for lexeme in clause.values if clause.form == "after" else ():
                before = self.nodes.get(_text(lexeme, 1))
                if before is None:
                    raise _Problem(f"unknown node {lexeme}", lexeme)
                if before is node:
                    raise _Problem(f"node {lexeme} cannot run before itself", lexeme)
                self.graph.add_order(before, node)

    def add_region(self, record: _Region) -> None:
        if record.number in self.graph.regions:
            raise _Problem(f"region {record.number} is given twice", record.lexeme)
        region = Region(record.number, meta=_meta(record.annotations))
        for reference, parameter in record.parameters:
            value = self._value(reference)
            if value in region.parameters:
                raise _Problem(f"parameter {reference.lexeme} is given twice", reference.lexeme)
            region.parameters[value] = parameter
        self.graph.regions[record.number] = region

    def resolve(self, value: object) -> Any:
        """An operand with its references replaced by values."""
        if isinstance(value, _Reference):
            return self._value(value)
        return tuple(map(self.resolve, value)) if type(value) is tuple else cast("Arg", value)

    def _value(self, reference: _Reference) -> Value:
        name, index, lexeme = reference
        node = self.nodes.get(name)
        if node is None and (name not in self.inputs or index is not None):
            raise _Problem(f"unknown value {lexeme}", lexeme)
        if node is None:
            return self.inputs[name]
        count = len(node.outputs)
        if (index is None) != (count == 1) or (index is not None and index >= count):
            raise _Problem(f"{lexeme}: node '{name}' has {count} result{'' if count == 1 else 's'}", lexeme)
        return node.outputs[index or 0]


def _placed(lexeme: Lexeme, make: Callable[[], T]) -> T:
    try:
        return make()
    except GraphError as error:
        raise _Problem(str(error), lexeme) from None


def _types(record: _Node) -> tuple[Type, ...]:
    given = [clause for clause in record.clauses if clause.form == "types"]
    if len(given) > 1:
        raise _Problem("types are given twice", given[1].lexeme)
    types = tuple(given[0].values) if given else ()
    if record.target.type == "NODE":
        if types or record.results:
            raise _Problem("'^' names a node without results: write % where there are some", record.target)
        return types
    expected = 1 if record.results is None else int(str(record.results)[:9])
    if len(types) != expected or not types:
        have = f"{len(types)} type" + ("" if len(types) == 1 else "s")
        raise _Problem(f"{expected} result{'' if expected == 1 else 's'} but {have}", record.results or record.target)
    return types


def _effects(clauses: Iterable[_Clause]) -> Effects:
    found: dict[str, Any] = {}
    for form, values, lexeme in clauses:
        if form in ("types", "after"):
            continue
        if lexeme not in _EXAMPLES:
            raise _Problem(f"unknown effect '{lexeme}': use one of {', '.join(_EXAMPLES)}", lexeme)
        if lexeme in found:
            raise _Problem(f"effect '{lexeme}' is given twice", lexeme)
        example = _EXAMPLES[lexeme]
        wanted = {"[": "positions", "(": "named", "": "flag"}[example[:1]]
        if form != wanted or (form == "positions" and any((":" in example) != (type(v) is tuple) for v in values)):
            raise _Problem(f"write !{lexeme}{example}", lexeme)
        found[str(lexeme)] = {"flag": True, "named": values[:1] and values[0], "positions": values}[form]
    return Effects(**found)


def _annotations(arguments: Sequence[_Argument]) -> tuple[Cost, Meta, Location | None]:
    words = [(cast("_Word", argument.key), argument) for argument in arguments]
    _once(words)
    costs = {word.text: cast("Dim", argument.value) for word, argument in words if argument.is_cost}
    place = {w.text: argument for w, argument in words if w.is_bare and w.text in ("loc", "in", "code")}
    rest = (argument for argument in arguments if not argument.is_cost and argument not in place.values())
    return Cost(**costs), _meta(rest), _location(place)


def _location(place: dict[str, _Argument]) -> Location | None:
    for argument in place.values():
        if not isinstance(argument.value, str):
            word = cast("_Word", argument.key)
            raise _Problem(f"'{word.text}' must be a string", word.lexeme)
    if not place:
        return None
    first = place.get("loc") or next(iter(place.values()))
    file, colon, line = str(place["loc"].value if "loc" in place else "").rpartition(":")
    if not colon or not line.lstrip("-").isdecimal() or len(line) > 18:
        raise _Problem('a source line is written loc = "file:line"', cast("_Word", first.key).lexeme)
    function, code = (str(place[name].value) if name in place else "" for name in ("in", "code"))
    return Location(file, int(line), function, code)


def _meta(arguments: Iterable[_Argument]) -> Meta:
    pairs = [(cast("_Word", argument.key), argument) for argument in arguments]
    for word, argument in pairs:
        if argument.is_cost or word.text in RESERVED:
            raise _Problem(f"'{word.text}' cannot be an annotation here: the name is reserved", word.lexeme)
        if any(_references(argument.value)):
            raise _Problem("an annotation holds literals, no values", word.lexeme)
        standard = _STANDARD.get(word.text)
        if standard is not None and not isinstance(argument.value, standard):
            raise _Problem(f"annotation '{word.text}' must be {standard.__name__}", word.lexeme)
    return Meta(_once((word, argument.value) for word, argument in pairs))


def _references(value: object) -> Iterator[bool]:
    if isinstance(value, _Reference):
        yield True
    elif type(value) is tuple:
        for item in value:
            yield from _references(item)
