"""From the records of a parsed text to a ``Graph``: names are resolved and every contradiction is pointed at.

Only what no graph could hold is refused here; rules of stages are the verifier's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from pygraph.ir.annotations import CAPTURABLE, DETAIL, PLACEMENT, REASON, REGION, SELECTED, TAGS, Parameter, Region
from pygraph.ir.cost import Cost
from pygraph.ir.effects import Effects
from pygraph.ir.graph import Graph, GraphError, Stage
from pygraph.ir.lexical import unquote
from pygraph.ir.node import RESERVED, Arg, KernelNode, Location, Meta, Value
from pygraph.ir.records import (
    Argument,
    Clause,
    GraphRecord,
    InputRecord,
    Lexeme,
    NodeRecord,
    Problem,
    Reference,
    RegionRecord,
    Setting,
    Word,
)
from pygraph.ir.types import Dim, Type

__all__ = ["build_graph", "sigil_name"]

_STANDARD = {key.name: key.type for key in (CAPTURABLE, REASON, DETAIL, PLACEMENT, REGION, SELECTED, TAGS)}
_FLAGS = ("sync", "dynamic", "barrier")
_NAMED = ("rng", "collective")
_POSITIONS = ("reads", "writes", "aliases")


def sigil_name(lexeme: Lexeme) -> str:
    """The name behind ``%``, ``^``, ``@`` or ``#``. Raises Problem for a malformed escape."""
    text = str(lexeme)[1:]
    if not text.startswith('"'):
        return text
    try:
        return unquote(text)
    except ValueError as error:
        raise Problem(str(error), lexeme) from None


def build_graph(record: GraphRecord) -> Graph:
    """The graph that ``record`` describes. Raises Problem where it contradicts itself."""
    graph = Graph(sigil_name(record.name))
    _apply_settings(graph, record.settings)
    for input_record in record.inputs:
        _add_input(graph, input_record)
    nodes = [_add_node(graph, node_record) for node_record in record.nodes]
    scope = _Scope(graph)
    for node, node_record in zip(nodes, record.nodes, strict=True):
        scope.fill(node, node_record)
    graph.set_outputs(scope.resolve_all(record.outputs))
    for region in record.regions:
        _add_region(graph, region, scope)
    for subgraph in record.subgraphs:
        if subgraph.key in graph.subgraphs:
            raise Problem(f"graph @{graph.name} has two subgraphs called '{subgraph.key}'", subgraph.lexeme)
        graph.subgraphs[subgraph.key] = subgraph.graph
    return graph


# -- header and inputs -------------------------------------------------------------------------------------------------


def _apply_settings(graph: Graph, settings: Iterable[Setting]) -> None:
    seen: set[str] = set()
    for key, value in settings:
        _refuse_repetition(seen, key)
        if key.text == "hints" and isinstance(value, dict):
            graph.hints = value
        elif key.text == "kind" and isinstance(value, Word):
            graph.kind = value.text
        elif key.text == "stage" and isinstance(value, Word):
            graph.stage = _stage(value)
        elif key.text in ("hints", "kind", "stage"):
            raise Problem(f"'{key.text}' takes {'{symbol = value}' if key.text == 'hints' else 'a name'}", key.lexeme)
        else:
            raise Problem(f"unknown setting '{key.text}' of a graph: use kind, stage or hints", key.lexeme)


def _stage(word: Word) -> Stage:
    try:
        return Stage(word.text)
    except ValueError:
        known = ", ".join(stage.value for stage in Stage)
        raise Problem(f"unknown stage '{word.text}': use one of {known}", word.lexeme) from None


def _add_input(graph: Graph, record: InputRecord) -> None:
    role, static = "input", False
    seen: set[str] = set()
    for key, value in record.items:
        _refuse_repetition(seen, key)
        if key.text == "role" and value is not None:
            role = value.text
        elif key.text == "static" and value is None:
            static = True
        else:
            raise Problem("an input takes 'role = …' and 'static'", key.lexeme)
    name = _plain_name(record.lexeme)
    try:
        graph.add_input(record.type, name, role=role, static=static)
    except GraphError as error:
        raise Problem(str(error), record.lexeme) from None


def _refuse_repetition(seen: set[str], key: Word) -> None:
    if key.text in seen:
        raise Problem(f"'{key.text}' is given twice", key.lexeme)
    seen.add(key.text)


def _plain_name(lexeme: Lexeme) -> str:
    """The name of a value that is being defined."""
    reference = split_reference(lexeme)
    if reference.place is not None:
        raise Problem(f"a definition has no index: write %{reference.name}", lexeme)
    return reference.name


def split_reference(lexeme: Lexeme) -> Reference:
    """``%name.index`` taken apart. Raises Problem for a malformed escape or an absurd index."""
    text = str(lexeme)
    end = text.rfind('"') if text[1] == '"' else 0
    dot = text.find(".", end)
    if dot < 0:
        return Reference(sigil_name(lexeme), None, lexeme)
    if len(text) - dot > 10:
        raise Problem("this index is too large", lexeme)
    return Reference(sigil_name(lexeme.update(value=text[:dot])), int(text[dot + 1 :]), lexeme)


# -- nodes -------------------------------------------------------------------------------------------------------------


def _add_node(graph: Graph, record: NodeRecord) -> KernelNode:
    """Add the node still without operands, as these may be defined later in a text that is being debugged."""
    types = _types(record)
    cost, meta, loc = _annotations(record.annotations)
    name = sigil_name(record.target) if record.target.type == "NODE" else _plain_name(record.target)
    effects = _effects(record.clauses)
    try:
        node = graph.add(record.op, (), types, name=name, effects=effects, cost=cost, loc=loc)
    except GraphError as error:
        raise Problem(str(error), record.target) from None
    node.meta = meta
    return node


def _types(record: NodeRecord) -> list[Type]:
    given = [clause for clause in record.clauses if clause.kind == "types"]
    if len(given) > 1:
        raise Problem("types are given twice", given[1].lexeme)
    types = cast("list[Type]", list(given[0].values)) if given else []
    if record.target.type == "NODE":
        if types or record.results:
            raise Problem("'^' names a node without results: write % where there are some", record.target)
        return types
    expected = 1 if record.results is None else int(str(record.results)[:9])
    if len(types) != expected or not types:
        have = f"{len(types)} type" + ("" if len(types) == 1 else "s")
        raise Problem(f"{expected} result{'' if expected == 1 else 's'} but {have}", record.results or record.target)
    return types


def _effects(clauses: Iterable[Clause]) -> Effects:
    found: dict[str, object] = {}
    for kind, values, lexeme in clauses:
        if kind in ("types", "after"):
            continue
        if kind not in (*_FLAGS, *_NAMED, *_POSITIONS):
            known = ", ".join((*_POSITIONS, *_NAMED, *_FLAGS))
            raise Problem(f"unknown effect '{kind}': use one of {known}", lexeme)
        if kind in found:
            raise Problem(f"effect '{kind}' is given twice", lexeme)
        found[kind] = _effect(kind, values, lexeme)
    return Effects(**found)  # type: ignore[arg-type]  # each value is checked by _effect


def _effect(kind: str, values: Sequence[object], lexeme: Lexeme) -> object:
    form, *details = values
    if kind in _FLAGS and form == "flag":
        return True
    if kind in _NAMED and form == "name":
        return details[0]
    paired = kind == "aliases"
    if kind in _POSITIONS and form == "positions" and all(isinstance(item, tuple) == paired for item in details):
        return tuple(details)
    example = '("name")' if kind in _NAMED else "[0:0]" if paired else "[0]" if kind in _POSITIONS else ""
    raise Problem(f"write !{kind}{example}", lexeme)


def _annotations(arguments: Sequence[Argument]) -> tuple[Cost, Meta, Location | None]:
    costs: dict[str, Dim] = {}
    place: dict[str, tuple[str, Word]] = {}
    rest: list[Argument] = []
    seen: set[str] = set()
    for argument in arguments:
        key = cast("Word", argument.key)
        _refuse_repetition(seen, key)
        if argument.is_cost:
            costs[key.text] = cast("Dim", argument.value)
        elif key.is_bare and key.text in ("loc", "in", "code"):
            place[key.text] = (_text_of(argument), key)
        else:
            rest.append(argument)
    return Cost(**costs), _meta(rest), _location(place)


def _text_of(argument: Argument) -> str:
    if not isinstance(argument.value, str):
        key = cast("Word", argument.key)
        raise Problem(f"'{key.text}' must be a string", key.lexeme)
    return argument.value


def _location(place: dict[str, tuple[str, Word]]) -> Location | None:
    if not place:
        return None
    _, first = next(iter(place.values()))
    text, key = place.get("loc", ("", first))
    file, colon, line = text.rpartition(":")
    if not colon or not line.lstrip("-").isdecimal() or len(line) > 18:
        raise Problem('a source line is written loc = "file:line"', key.lexeme)
    function, code = (place.get(name, ("", key))[0] for name in ("in", "code"))
    return Location(file, int(line), function, code)


def _meta(arguments: Iterable[Argument]) -> Meta:
    entries: dict[str, object] = {}
    seen: set[str] = set()
    for argument in arguments:
        key = cast("Word", argument.key)
        _refuse_repetition(seen, key)
        if argument.is_cost or key.text in RESERVED:
            raise Problem(f"'{key.text}' cannot be an annotation here: the name is reserved", key.lexeme)
        _check_annotation(key, argument.value)
        entries[key.text] = argument.value
    return Meta(entries)


def _check_annotation(key: Word, value: object) -> None:
    if _references(value):
        raise Problem("an annotation holds literals, no values", key.lexeme)
    standard = _STANDARD.get(key.text)
    if standard is not None and not isinstance(value, standard):
        raise Problem(f"annotation '{key.text}' must be {standard.__name__}", key.lexeme)


def _references(value: object) -> bool:
    if isinstance(value, Reference):
        return True
    return type(value) is tuple and any(map(_references, value))


# -- references --------------------------------------------------------------------------------------------------------


class _Scope:
    """The names of one graph, and operands resolved in it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = {value.name: value for value in graph.inputs}
        self.nodes = {node.name: node for node in graph.nodes}

    def fill(self, node: KernelNode, record: NodeRecord) -> None:
        operands: list[Arg] = []
        attrs: dict[str, Arg] = {}
        for key, value, _ in record.arguments:
            if key is None and attrs:
                raise Problem("an operand cannot follow an attribute", record.target)
            if key is None:
                operands.append(self.resolve(value))
                continue
            if key.text in attrs:
                raise Problem(f"attribute '{key.text}' is given twice", key.lexeme)
            attrs[key.text] = self.resolve(value)
        self.graph.set_args(node, operands, attrs)
        for clause in record.clauses:
            if clause.kind == "after":
                self._order(node, cast("Sequence[Lexeme]", clause.values))

    def _order(self, node: KernelNode, lexemes: Sequence[Lexeme]) -> None:
        for lexeme in lexemes:
            before = self.nodes.get(sigil_name(lexeme))
            if before is None:
                raise Problem(f"unknown node {lexeme}", lexeme)
            if before is node:
                raise Problem(f"node {lexeme} cannot run before itself", lexeme)
            self.graph.add_order(before, node)

    def resolve_all(self, values: Sequence[object]) -> tuple[Arg, ...]:
        return tuple(map(self.resolve, values))

    def resolve(self, value: object) -> Arg:
        if isinstance(value, Reference):
            return self.value(value)
        return self.resolve_all(value) if isinstance(value, tuple) else cast("Arg", value)

    def value(self, reference: Reference) -> Value:
        name, index, lexeme = reference
        node = self.nodes.get(name)
        if node is None and (name not in self.inputs or index is not None):
            raise Problem(f"unknown value {lexeme}", lexeme)
        if node is None:
            return self.inputs[name]
        count = len(node.outputs)
        if (index is None) != (count == 1) or (index is not None and index >= count):
            raise Problem(f"{lexeme}: node '{name}' has {count} result{'' if count == 1 else 's'}", lexeme)
        return node.outputs[index or 0]


def _add_region(graph: Graph, record: RegionRecord, scope: _Scope) -> None:
    if record.number in graph.regions:
        raise Problem(f"region {record.number} is given twice", record.lexeme)
    region = Region(record.number, meta=_meta(record.annotations))
    for reference, decision, reason, cost_us in record.parameters:
        value = scope.value(reference)
        if value in region.parameters:
            raise Problem(f"parameter {reference.lexeme} is given twice", reference.lexeme)
        region.parameters[value] = Parameter(decision, reason, cost_us)
    graph.regions[record.number] = region
