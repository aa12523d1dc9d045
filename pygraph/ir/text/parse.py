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

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from pygraph.errors import ParseError, Span
from pygraph.ir import dims
from pygraph.ir.annotations import CAPTURABLE, DETAIL, PLACEMENT, REASON, REGION, SELECTED, TAGS, Parameter, Region
from pygraph.ir.cost import Cost
from pygraph.ir.dims import Written
from pygraph.ir.effects import FLAGS, NAMED, Effects
from pygraph.ir.graph import Graph, GraphError, Stage
from pygraph.ir.node import RESERVED, Arg, GraphRef, KernelNode, Location, Meta, Token, Value
from pygraph.ir.text.words import COST_FIELDS, LITERAL_WORDS, unquote
from pygraph.ir.types import Device, Dim, DType, OpaqueType, ScalarType, TensorType, Type

__all__ = ["parse"]

T = TypeVar("T")

MAX_DEPTH = 100
"""Brackets within brackets; deeper texts are refused."""

_QUOTED = r'"(?:[^"\\\n]|\\[^\n])*"'
_BARE = r"[A-Za-z_][A-Za-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)*"
_TOKEN = re.compile(
    r"(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
    rf"|(?P<int>[0-9]+)|(?P<word>{_BARE})|(?P<string>{_QUOTED})"
    rf"|(?P<value>%(?:[A-Za-z0-9_]+|{_QUOTED})(?:\.[0-9]+)?)|(?P<node>\^(?:[A-Za-z0-9_]+|{_QUOTED}))"
    rf"|(?P<symbol>@(?:[A-Za-z0-9_.]+|{_QUOTED}))|(?P<token>\#(?:{_BARE}|{_QUOTED}))"
    r"|(?P<mark>\*\*|[(){}\[\],:=!$<>+\-*/%])"
)
_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*")
_BRACKETS = re.compile(rf"{_QUOTED}|//[^\n]*|[\[({{]|[\])}}]")
_NAMES = {
    "int": "a number",
    "word": "a word",
    "string": "a string",
    "value": "'%name'",
    "node": "'^name'",
    "symbol": "'@name'",
}
_DTYPES = {dtype.value: dtype for dtype in DType}
_STANDARD = {key.name: key.type for key in (CAPTURABLE, REASON, DETAIL, PLACEMENT, REGION, SELECTED, TAGS)}
_EXAMPLES = {"reads": "[0]", "writes": "[0]", "aliases": "[0:0]"}
_EXAMPLES |= dict.fromkeys(NAMED, '("name")') | dict.fromkeys(FLAGS, "")
"""How each effect is written after its name."""


def parse(text: str, source: str = "<text>") -> Graph:
    """The graph written in ``text``. ``source`` names it in errors. Raises ParseError."""
    try:
        _check_depth(text)
        return _Parser(text).whole()
    except _Problem as problem:
        before = text[: problem.lexeme.start]
        span = Span(before.count("\n") + 1, len(before) - before.rfind("\n"), max(1, len(problem.lexeme.text)))
        raise ParseError(problem.reason, span, text, source) from None


def _check_depth(text: str) -> None:
    """Refuse deep nesting before anything recurses into it."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        char = match.group()
        depth += 1 if char in "([{" else -1 if char in ")]}" else 0
        if depth > MAX_DEPTH:
            raise _Problem(f"brackets are nested more than {MAX_DEPTH} deep", _Lexeme("mark", char, match.start()))


class _Lexeme(NamedTuple):
    """A token of the text and where it starts; ``kind`` is a group of ``_TOKEN``, or ``end``."""

    kind: str
    text: str
    start: int


class _Reference(NamedTuple):
    """``%name`` or ``%name.index``, still to be resolved."""

    name: str
    place: int | None
    lexeme: _Lexeme


class _Problem(Exception):
    """What is wrong, and with which token. Becomes a ParseError once the text is at hand."""

    def __init__(self, reason: str, lexeme: _Lexeme) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lexeme = lexeme


def _text(lexeme: _Lexeme) -> str:
    """The name or string that a token holds, without its sigil."""
    text = lexeme.text if lexeme.kind in ("word", "string") else lexeme.text[1:]
    if not text.startswith('"'):
        return text
    try:
        return unquote(text)
    except ValueError as error:
        raise _Problem(str(error), lexeme) from None


def _reference(lexeme: _Lexeme) -> _Reference:
    """``%name.index`` taken apart."""
    text = lexeme.text
    dot = text.find(".", text.rfind('"') if text[1] == '"' else 0)
    if dot < 0:
        return _Reference(_text(lexeme), None, lexeme)
    if len(text) - dot > 10:
        raise _Problem("this index is too large", lexeme)
    return _Reference(_text(lexeme._replace(text=text[:dot])), int(text[dot + 1 :]), lexeme)


Keyed = tuple[_Lexeme, Any]
"""A key, as it stands in the text, and what it is given."""


def _once(pairs: Iterable[Keyed]) -> dict[str, Any]:
    """``pairs`` as a dictionary. Raises _Problem for a name that is given twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        name = _text(key)
        if name in found:
            raise _Problem(f"'{name}' is given twice", key)
        found[name] = value
    return found


class _Parser:
    """One text, read from left to right. Each method reads what it is named after."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.next = self._scan(0)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _scan(self, at: int) -> _Lexeme:
        space = _SPACE.match(self.text, at)
        at = space.end() if space else at
        match = _TOKEN.match(self.text, at)
        if match is not None:
            return _Lexeme(str(match.lastgroup), match.group(), at)
        if at >= len(self.text):
            return _Lexeme("end", "", len(self.text.rstrip()))
        char = self.text[at]
        reason = "this string is not closed on its line" if char == '"' else f"unexpected character {char!r}"
        raise _Problem(reason, _Lexeme("mark", char, at))

    def _take(self) -> _Lexeme:
        taken = self.next
        self.next = self._scan(taken.start + len(taken.text))
        return taken

    def _accept(self, text: str) -> _Lexeme | None:
        """The next token if it is that mark or bare word."""
        return self._take() if self.next.text == text and self.next.kind in ("mark", "word") else None

    def _expect(self, text: str, wanted: str = "") -> _Lexeme:
        return self._accept(text) or self._refuse(wanted or f"'{text}'")

    def _kind(self, *kinds: str) -> _Lexeme:
        return self._take() if self.next.kind in kinds else self._refuse(_NAMES[kinds[0]])

    def _refuse(self, wanted: str) -> Any:
        found = "the text ends too early" if self.next.kind == "end" else f"unexpected '{self.next.text}'"
        raise _Problem(f"{found}: expected {wanted}", self.next)

    def _list(self, item: Callable[[], T], brackets: str) -> list[T]:
        """``item``s within ``brackets``, separated by commas."""
        self._expect(brackets[0])
        items: list[T] = []
        while not self._accept(brackets[1]):
            items.append(item())
            if not self._accept(","):
                self._expect(brackets[1], f"',' or '{brackets[1]}'")
                break
        return items

    def _word(self) -> _Lexeme:
        return self._kind("word", "string")

    def _integer(self) -> int:
        minus, lexeme = self._accept("-"), self._kind("int")
        try:
            return -int(lexeme.text) if minus else int(lexeme.text)
        except ValueError:
            raise _Problem("this integer has too many digits", lexeme) from None

    def _string(self) -> str:
        return _text(self._kind("string"))

    # -- graphs --------------------------------------------------------------------------------------------------------

    def whole(self) -> Graph:
        self._expect("graph")
        graph = self._graph(self._kind("symbol"))
        return graph if self.next.kind == "end" else self._refuse("the end of the text")

    def _graph(self, name: _Lexeme) -> Graph:
        graph = Graph(_text(name))
        if self.next.text == "{":
            self._settings(graph)
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
        graph.set_outputs(_resolve(graph, tuple(outputs)))
        if self._accept("regions"):
            self._expect("{")
            while not self._accept("}"):
                self._region(graph)
        if self._accept("subgraphs"):
            self._expect("{")
            while not self._accept("}"):
                self._subgraph(graph)
        return graph

    def _settings(self, graph: Graph) -> None:
        for name, (key, value) in _once((pair[0], pair) for pair in self._list(self._setting, "{}")).items():
            if name not in ("kind", "stage", "hints"):
                raise _Problem(f"unknown setting '{name}' of a graph: use kind, stage or hints", key)
            if isinstance(value, dict) != (name == "hints"):
                raise _Problem(f"'{name}' takes {'{symbol = value}' if name == 'hints' else 'a name'}", key)
            if isinstance(value, dict):
                graph.hints = value
            elif name == "kind":
                graph.kind = _text(value)
            elif _text(value) in {stage.value for stage in Stage}:
                graph.stage = Stage(_text(value))
            else:
                known = ", ".join(stage.value for stage in Stage)
                raise _Problem(f"unknown stage '{_text(value)}': use one of {known}", value)

    def _setting(self) -> Keyed:
        key = self._word()
        self._expect("=")
        return key, _once(self._list(self._hint, "{}")) if self.next.text == "{" else self._word()

    def _hint(self) -> Keyed:
        key = self._word()
        self._expect("=")
        return key, self._integer()

    def _input(self, graph: Graph) -> None:
        lexeme = self._kind("value")
        self._expect(":")
        type = self._type()
        items = self._list(self._input_item, "{}") if self.next.text == "{" else []
        given = _once(items)
        with _GraphErrors(lexeme):
            graph.add_input(type, _defined(lexeme), role=given.get("role", "input"), static="static" in given)

    def _input_item(self) -> Keyed:
        key = self._word()
        value = _text(self._word()) if self._accept("=") else None
        if (_text(key), value is None) not in (("role", False), ("static", True)):
            raise _Problem("an input takes 'role = …' and 'static'", key)
        return key, value

    def _subgraph(self, graph: Graph) -> None:
        key = self._kind("symbol") if self.next.kind == "symbol" else None
        if key:
            self._expect("=")
        self._expect("graph")
        name = self._kind("symbol")
        subgraph = self._graph(name)
        if _text(key or name) in graph.subgraphs:
            raise _Problem(f"graph @{graph.name} has two subgraphs called '{_text(key or name)}'", key or name)
        graph.subgraphs[_text(key or name)] = subgraph

    def _region(self, graph: Graph) -> None:
        lexeme = self.next
        index = self._integer()
        if index in graph.regions:
            raise _Problem(f"region {index} is given twice", lexeme)
        region = graph.regions[index] = Region(index)
        if self.next.text == "{":
            region.meta = _meta(self._list(self._annotation, "{}"))
        for reference, parameter in self._list(self._parameter, "()"):
            value = _resolve(graph, reference)
            if value in region.parameters:
                raise _Problem(f"parameter {reference.lexeme.text} is given twice", reference.lexeme)
            region.parameters[value] = parameter

    def _parameter(self) -> tuple[_Reference, Parameter]:
        reference = _reference(self._kind("value"))
        self._expect(":")
        decision, reason = _text(self._word()), self._string()
        return reference, Parameter(decision, reason, None if self.next.text in (",", ")") else self._number())

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _node(self, graph: Graph) -> Callable[[], None]:
        """Add the node, still without operands; the result sets them."""
        target = self._take()
        results = self._kind("int") if self._accept(":") else None
        self._expect("=")
        op = _text(self._word())
        arguments = self._list(self._argument, "()")
        types: list[Type] | None = None
        after: list[_Lexeme] = []
        effects: dict[str, Any] = {}
        while self.next.text in ("after", ":", "!"):
            clause = self._take()
            if clause.text == "after":
                after += self._list(lambda: self._kind("node"), "()")
            elif clause.text == "!":
                self._effect(effects)
            elif types is not None:
                raise _Problem("types are given twice", clause)
            else:
                types = self._list(self._type, "()") if self.next.text == "(" else [self._type()]
        annotations = self._list(self._annotation, "{}") if self.next.text == "{" else []
        _check_results(target, results, types or [])
        cost, loc = _cost(annotations), _location(annotations)
        with _GraphErrors(target):
            node = graph.add(op, (), types or (), name=_defined(target), effects=Effects(**effects), cost=cost, loc=loc)
        node.meta = _meta([(key, value) for key, value in annotations if not _has_place(key)])
        return lambda: _fill(graph, node, target, arguments, after)

    def _argument(self) -> tuple[_Lexeme | None, object]:
        if self.next.kind not in ("word", "string"):
            return None, self._literal()
        word = self._take()
        return (word, self._literal()) if self._accept("=") else (None, self._literal_word(word))

    def _effect(self, effects: dict[str, Any]) -> None:
        name = self._kind("word")
        if name.text not in _EXAMPLES:
            raise _Problem(f"unknown effect '{name.text}': use one of {', '.join(_EXAMPLES)}", name)
        if name.text in effects:
            raise _Problem(f"effect '{name.text}' is given twice", name)
        example = _EXAMPLES[name.text]
        opened = self.next.text if self.next.text in ("(", "[") else ""
        value: Any = True
        if opened == "(":
            value = "".join(self._list(self._string, "()"))
        elif opened:
            value = tuple(self._list(self._position, "[]"))
        paired = name.text == "aliases"
        if opened != example[:1] or (opened == "[" and any(isinstance(item, tuple) != paired for item in value)):
            raise _Problem(f"write !{name.text}{example}", name)
        effects[name.text] = value

    def _position(self) -> int | tuple[int, int]:
        first = self._integer()
        return (first, self._integer()) if self._accept(":") else first

    def _annotation(self) -> Keyed:
        key = self._word()
        self._expect("=")
        return key, self._expression() if key.text in COST_FIELDS else self._literal()

    # -- types ---------------------------------------------------------------------------------------------------------

    def _type(self) -> Type:
        word = self._word()
        if self.next.text == "[" and word.kind == "word":
            shape = tuple(self._list(self._expression, "[]"))
            stride = tuple(self._list(self._expression, "{}")) if self.next.text == "{" else None
            device = self._device(self._kind("symbol"))
            if word.text not in _DTYPES:
                raise _Problem(f"unknown dtype '{word.text}': use one of {', '.join(_DTYPES)}", word)
            return TensorType(_DTYPES[word.text], shape, device, stride)
        if word.kind == "word" and self._accept("<"):
            name = self._string()
            self._expect(">")
            if word.text != "opaque":
                raise _Problem(f"unknown type '{word.text}': only opaque<\"name\"> has angle brackets", word)
            return OpaqueType(name)
        if word.kind == "word" and word.text not in ("int", "float", "bool"):
            hint = "a tensor is written dtype[sizes]@device" if word.text in _DTYPES else "use int, float or bool"
            raise _Problem(f"'{word.text}' is no scalar type: {hint}", word)
        value = None
        if self._accept("("):
            value = self._expression()
            self._expect(")")
        return ScalarType(_text(word), value)

    def _device(self, name: _Lexeme) -> Device:
        return Device(_text(name), self._integer() if self._accept(":") else None)

    # -- literals ------------------------------------------------------------------------------------------------------

    def _literal(self) -> Any:
        kind, text, _ = self.next
        if kind in ("word", "string"):
            return self._literal_word(self._take())
        if kind in ("int", "float") or text == "-":
            return self._number()
        if kind == "value":
            return _reference(self._take())
        if kind == "symbol":
            return self._device(self._take())
        if kind == "token":
            return Token(_text(self._take()))
        if text == "[":
            return tuple(self._list(self._literal, "[]"))
        if self._accept("$"):
            self._expect("(")
            value = self._expression()
            self._expect(")")
            return value
        return self._refuse("a literal")

    def _literal_word(self, word: _Lexeme) -> object:
        if word.kind == "string":
            return _text(word)
        if self.next.kind == "symbol":
            if word.text != "graph":
                raise _Problem(f"unexpected '{word.text}': a subgraph is written graph @name", word)
            return GraphRef(_text(self._take()))
        if self.next.text == "(":
            if word.text != "complex":
                only = "complex(real, imaginary) is the only literal of this form"
                raise _Problem(f"unexpected '{word.text}': {only}", word)
            parts = self._list(self._number, "()")
            try:
                return complex(*parts)
            except (OverflowError, TypeError):
                raise _Problem("complex takes two numbers, each a double", word) from None
        if word.text in LITERAL_WORDS:
            return LITERAL_WORDS[word.text]
        if word.text not in _DTYPES:
            raise _Problem(f"unknown word '{word.text}': strings are quoted, tokens have '#'", word)
        return _DTYPES[word.text]

    def _number(self) -> Any:
        sign = -1 if self._accept("-") else 1
        lexeme = self._kind("int", "float", "word")
        if lexeme.kind == "word" and lexeme.text not in ("inf", "nan"):
            raise _Problem(f"'{lexeme.text}' is no number: use digits, inf or nan", lexeme)
        try:
            return sign * (int(lexeme.text) if lexeme.kind == "int" else float(lexeme.text))
        except ValueError:
            raise _Problem("this integer has too many digits", lexeme) from None

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self) -> Dim:
        start = self.next
        try:
            return dims.read(self._sum())
        except RecursionError:
            raise _Problem("not an expression: it is nested too deeply", start) from None
        except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise _Problem(f"not an expression: {error}", start) from None

    def _sum(self) -> Written:
        terms = [(1, self._product())]
        while self.next.text in ("+", "-"):
            terms.append((1 if self._take().text == "+" else -1, self._product()))
        return terms[0][1] if len(terms) == 1 else Written("add", "", tuple(terms))

    def _product(self) -> Written:
        factors = [(1, self._factor())]
        while self.next.text in ("*", "/") or self.next.text.startswith("%"):
            if self.next.text.startswith("%"):
                self.next = self._scan(self.next.start + 1)  # what follows may have been taken for a %value
                factors = [(1, dims.call("Mod", [_multiplied(factors), self._factor()]))]
            else:
                factors.append((1 if self._take().text == "*" else -1, self._factor()))
        return _multiplied(factors)

    def _factor(self) -> Written:
        if self._accept("-"):
            return Written.of("neg", "", [self._factor()])
        base = self._atom()
        return dims.call("FloatPow", [base, self._factor()]) if self._accept("**") else base

    def _atom(self) -> Written:
        if self._accept("("):
            inner = self._sum()
            self._expect(")")
            return inner
        if self.next.kind in ("int", "float"):
            return Written("number", self._take().text)
        word = self._word()
        if self.next.text != "(":
            constant = word.kind == "word" and word.text in dims.CONSTANTS
            return Written("constant" if constant else "symbol", _text(word))
        operands = self._list(self._sum, "()")
        try:
            return dims.call(_text(word), operands, opaque=word.kind == "string")
        except TypeError:
            raise _Problem(f"not an expression: wrong number of operands of {word.text}", word) from None


def _multiplied(factors: Sequence[tuple[int, Written]]) -> Written:
    return factors[0][1] if len(factors) == 1 else Written("mul", "", tuple(factors))


# -- from what is read to the graph ------------------------------------------------------------------------------------


class _GraphErrors:
    """Within it, what a graph refuses is a problem with ``lexeme``."""

    def __init__(self, lexeme: _Lexeme) -> None:
        self.lexeme = lexeme

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GraphError):
            raise _Problem(str(error), self.lexeme) from None


def _defined(lexeme: _Lexeme) -> str:
    """The name of a value or node that is being defined."""
    if lexeme.kind == "node":
        return _text(lexeme)
    reference = _reference(lexeme)
    if reference.place is not None:
        raise _Problem(f"a definition has no index: write %{reference.name}", lexeme)
    return reference.name


def _check_results(target: _Lexeme, results: _Lexeme | None, types: Sequence[Type]) -> None:
    if target.kind == "node":
        if types or results:
            raise _Problem("'^' names a node without results: write % where there are some", target)
        return
    expected = 1 if results is None else int(results.text[:9])
    if len(types) != expected or not types:
        have = f"{len(types)} type" + ("" if len(types) == 1 else "s")
        raise _Problem(f"{expected} result{'' if expected == 1 else 's'} but {have}", results or target)


def _fill(
    graph: Graph,
    node: KernelNode,
    target: _Lexeme,
    arguments: Sequence[tuple[_Lexeme | None, object]],
    after: Sequence[_Lexeme],
) -> None:
    """Set the operands of ``node`` and its order, once all nodes are there."""
    operands = [value for key, value in arguments if key is None]
    if any(key is not None for key, _ in arguments[: len(operands)]):
        raise _Problem("an operand cannot follow an attribute", target)
    attrs = _once((key, _resolve(graph, value)) for key, value in arguments if key is not None)
    graph.set_args(node, _resolve(graph, tuple(operands)), attrs)
    for lexeme in after:
        before = graph.owner(_text(lexeme))
        if not isinstance(before, KernelNode):
            raise _Problem(f"unknown node {lexeme.text}", lexeme)
        if before is node:
            raise _Problem(f"node {lexeme.text} cannot run before itself", lexeme)
        graph.add_order(before, node)


def _resolve(graph: Graph, value: Any) -> Any:
    """An operand with its references replaced by values."""
    if type(value) is tuple:
        return tuple(_resolve(graph, item) for item in value)
    return _value(graph, value) if isinstance(value, _Reference) else value


def _value(graph: Graph, reference: _Reference) -> Value:
    name, index, lexeme = reference
    owner = graph.owner(name)
    if owner is None or (isinstance(owner, Value) and index is not None):
        raise _Problem(f"unknown value {lexeme.text}", lexeme)
    if isinstance(owner, Value):
        return owner
    count = len(owner.outputs)
    if (index is None) != (count == 1) or (index is not None and index >= count):
        raise _Problem(f"{lexeme.text}: node '{name}' has {count} result{'' if count == 1 else 's'}", lexeme)
    return owner.outputs[index or 0]


def _has_place(key: _Lexeme) -> bool:
    """Whether an annotation of a node is no annotation, but its cost or its source line."""
    return key.kind == "word" and key.text in RESERVED


def _cost(annotations: Sequence[Keyed]) -> Cost:
    _once(annotations)
    return Cost(**{key.text: value for key, value in annotations if key.kind == "word" and key.text in COST_FIELDS})


def _location(annotations: Sequence[Keyed]) -> Location | None:
    place = {k.text: (k, value) for k, value in annotations if _has_place(k) and k.text not in COST_FIELDS}
    for key, value in place.values():
        if not isinstance(value, str):
            raise _Problem(f"'{key.text}' must be a string", key)
    if not place:
        return None
    key, where = place.get("loc") or (next(iter(place.values()))[0], "")
    file, colon, line = where.rpartition(":")
    if not colon or not line.lstrip("-").isdecimal() or len(line) > 18:
        raise _Problem('a source line is written loc = "file:line"', key)
    return Location(file, int(line), *(place[name][1] if name in place else "" for name in ("in", "code")))


def _meta(annotations: Sequence[Keyed]) -> Meta:
    for key, value in annotations:
        name = _text(key)
        if name in RESERVED:
            raise _Problem(f"'{name}' cannot be an annotation here: the name is reserved", key)
        if _refers(value):
            raise _Problem("an annotation holds literals, no values", key)
        if name in _STANDARD and not isinstance(value, _STANDARD[name]):
            raise _Problem(f"annotation '{name}' must be {_STANDARD[name].__name__}", key)
    return Meta(_once(annotations))


def _refers(value: Arg | _Reference) -> bool:
    if isinstance(value, _Reference):
        return True
    return type(value) is tuple and any(map(_refers, value))
