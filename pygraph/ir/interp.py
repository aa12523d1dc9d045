"""Reference semantics: results, writes, draws and their order, so that tests can compare the meaning of graphs.

Contents are uninterpreted terms: two values are equal if they are computed in the same way from the same inputs.
The device of a tensor is not part of its content, so a move between devices does not change its term.

    %v = aten.view.default(%x) !aliases[0:0]      v: view of x's memory
    %r = aten.relu_.default(%v) !writes[0]        x's memory: put(input(x), step(view), relu_(view(input(x))))

This module is slow, and only for tests and debugging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from pygraph.ir.effects import NAMED
from pygraph.ir.graph import Graph
from pygraph.ir.node import UPLOAD, Arg, GraphRef, KernelNode, Value, base_name
from pygraph.ir.text.print import literal_text
from pygraph.ir.types import Device, ScalarType, TensorType

_MOVES = ("aten._to_copy", "aten.clone", "prims.device_put", base_name(UPLOAD))
_PLACES = ("device", "non_blocking", "pin_memory")
"""Attributes that affect the place of a result, not its content."""


class Term(NamedTuple):
    """``head(parts…)``, identified by a digest of its whole derivation: comparison is cheap at any depth."""

    head: str
    digest: str


def _term(head: str, *parts: object) -> Term:
    """A term of parts that are terms, literals, and tuples of these; equal heads and parts make equal terms."""
    text = f"{head}({_text(parts)})"
    return Term(head, blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest())


def _text(part: object) -> str:
    if isinstance(part, Term):
        return f"~{part.digest}"
    return f"[{', '.join(map(_text, part))}]" if isinstance(part, tuple) else literal_text(part)


Content: TypeAlias = "Term | tuple[Content, ...]"
"""Contents of a value: one term, or one for each memory in which it may lie."""


@dataclass(frozen=True, slots=True)
class Returned:
    """One returned value: its content at the end of the graph, its device, and the memory that it shares.

    ``memory`` names each memory in which it may lie: an input, or ``result n`` for the first returned value in that
    memory; it is empty for numbers.
    """

    content: Content
    device: Device | None
    memory: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that can be observed of a run of a graph.

    Args:
        outputs: the returned values, literals and tuples of them
        written: final contents of the inputs that were written, by name
        effects: events in order: per generator, per process group, and at barriers (with the events between barriers)
    """

    outputs: tuple[object, ...]
    written: Mapping[str, Content]
    effects: Mapping[str, tuple[object, ...]]


def interpret(graph: Graph, trace: dict[str, str] | None = None) -> Outcome:
    """Run ``graph``. If given, ``trace`` receives a digest of the call of each node, by name; empty for a move between
    devices."""
    machine = _Machine(graph)
    done = {node.name: machine.run(node) for node in graph.nodes}
    if trace is not None:
        trace.update(done)
    return machine.outcome()


@dataclass(slots=True, eq=False)
class _Storage:
    """Memory made by one input or one result."""

    name: str
    content: Content
    is_input: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory, and the views through which a value sees it, outermost last: (term of the view, index of the result)."""

    storage: _Storage
    path: tuple[tuple[Term, int], ...] = ()

    def seen(self) -> Content:
        content = self.storage.content
        for call, result in self.path:
            content = _term("view", result, call, content)
        return content

    def put(self, new: Content) -> None:
        self.storage.written = True
        steps = tuple(_term("step", result, call) for call, result in self.path)
        self.storage.content = _term("put", self.storage.content, steps, new) if steps else new


class _Machine:
    """Memory and events while a graph runs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.places: dict[Value, tuple[_Place, ...]] = {
            value: (_Place(_Storage(value.name, _term("input", value.name), is_input=True)),) for value in graph.inputs
        }
        self.effects: dict[str, list[object]] = {}
        self.since_barrier: list[str] = []

    def run(self, node: KernelNode) -> str:
        """Run one node and return the digest of its call; empty for a move."""
        contents = self._operands(node)
        call = self._call(node, contents)
        is_move = _is_move(node)
        event = "" if is_move else call.digest
        self._note_effects(node, event)
        for position in dict.fromkeys(node.effects.writes):
            for place in self.places[node.inputs[position]]:
                place.put(_term("written", position, call))
        for output in node.outputs:
            fresh = contents[output.index] if is_move else _term("result", output.index, call)
            self.places[output] = self._place(node, call, output, fresh)
        return event

    def outcome(self) -> Outcome:
        owners: dict[_Storage, str] = {}
        outputs = tuple(self._returned(arg, f"result {i}", owners) for i, arg in enumerate(self.graph.outputs))
        storages = (place.storage for value in self.graph.inputs for place in self.places[value])
        written = {storage.name: storage.content for storage in storages if storage.written}
        effects = {chain: tuple(events) for chain, events in self.effects.items()}
        return Outcome(outputs, written, effects)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _operands(self, node: KernelNode) -> list[Content]:
        reads = node.effects.reads
        read = range(len(node.inputs)) if reads is None else reads
        return [self._content(value) if i in read else _term("unread") for i, value in enumerate(node.inputs)]

    def _call(self, node: KernelNode, contents: list[Content]) -> Term:
        feed = iter(contents)
        args = tuple(self._part(arg, feed) for arg in node.args)
        parts = [(key, self._part(arg, feed)) for key, arg in node.attrs.items()]
        attrs = tuple((key, part) for key, part in sorted(parts, key=lambda pair: pair[0]) if key not in _PLACES)
        generator = node.effects.rng
        draw = () if generator is None else (generator, len(self.effects.get(f"rng {generator}", ())))
        return _term(node.op, args, attrs, draw)

    def _part(self, arg: Arg, feed: Iterator[Content]) -> object:
        if isinstance(arg, Value):
            return next(feed)
        if isinstance(arg, tuple):
            return tuple(self._part(item, feed) for item in arg)
        if isinstance(arg, GraphRef) and arg.name in self.graph.subgraphs:
            return _term("subgraph", str(self.graph.subgraphs[arg.name]))
        return _term("device") if isinstance(arg, Device) else arg

    def _note_effects(self, node: KernelNode, event: str) -> None:
        effects = node.effects
        for kind in NAMED:
            name = getattr(effects, kind)
            if name is not None:
                self.effects.setdefault(f"{kind} {name}", []).append(event)
        if effects.barrier:
            self.effects.setdefault("barrier", []).append((event, *sorted(set(self.since_barrier))))
            self.since_barrier = []
        elif event:
            self.since_barrier.append(event)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _content(self, value: Value) -> Content:
        contents = [place.seen() for place in self.places[value]]
        return contents[0] if len(contents) == 1 else tuple(contents)

    def _place(self, node: KernelNode, call: Term, output: Value, fresh: Content) -> tuple[_Place, ...]:
        """Places of a result: the memory of the operands that it aliases, or new memory."""
        shared = [operand for index, operand in node.effects.aliases if index == output.index]
        places: dict[_Place, None] = {}
        for position in shared:
            steps = () if position in node.effects.writes else ((call, output.index),)
            for place in self.places[node.inputs[position]]:
                places[_Place(place.storage, (*place.path, *steps))] = None
        return tuple(places) or (_Place(_Storage(output.name, fresh)),)

    def _returned(self, arg: Arg, label: str, owners: dict[_Storage, str]) -> object:
        if isinstance(arg, tuple):
            return tuple(self._returned(item, f"{label}.{i}", owners) for i, item in enumerate(arg))
        if not isinstance(arg, Value):
            return arg
        storages = [place.storage for place in self.places[arg]]
        memory = tuple(s.name if s.is_input else owners.setdefault(s, label) for s in storages)
        is_number = isinstance(arg.type, ScalarType)
        return Returned(self._content(arg), getattr(arg.type, "device", None), () if is_number else memory)


def _is_move(node: KernelNode) -> bool:
    """True if each result is a copy of its operand in new memory: only strides and device may differ."""
    if node.op.removesuffix(".default") not in _MOVES or node.effects.writes or node.effects.aliases:
        return False
    return [_content_type(value) for value in node.inputs] == [_content_type(value) for value in node.outputs]


def _content_type(value: Value) -> object:
    type = value.type
    return (type.dtype, type.shape) if isinstance(type, TensorType) else type
