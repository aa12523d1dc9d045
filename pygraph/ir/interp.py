"""Reference semantics: what a graph computes, writes, draws and in which order, so that passes are tested by meaning.

This file is the machine: memory, views, effects. What contents are is a domain's matter: uninterpreted terms in
``terms``, Python numbers in ``numbers``. Nothing here is fast, and nothing but tests and debugging uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pygraph.errors import PygraphError
from pygraph.ir.graph import Graph
from pygraph.ir.memory import RangedMemory
from pygraph.ir.node import UPLOAD, Arg, GraphRef, KernelNode, Value, base_name
from pygraph.ir.order import operand_range
from pygraph.ir.types import Device, ScalarType, TensorType

__all__ = [
    "UNREAD",
    "Call",
    "Domain",
    "InterpretError",
    "Operand",
    "Outcome",
    "Results",
    "Returned",
    "SubgraphText",
    "interpret",
]


_MOVES = ("aten._to_copy", "aten.clone", "prims.device_put", base_name(UPLOAD))


class InterpretError(PygraphError):
    """An operator or operand that a domain has no meaning for."""


class _Unread:
    """The content of an operand that a node does not read."""

    def __repr__(self) -> str:
        return "UNREAD"


UNREAD = _Unread()


@dataclass(frozen=True, slots=True)
class Operand:
    """A value among the arguments of a call: its position among them, and its content or ``UNREAD``."""

    position: int
    content: object


@dataclass(frozen=True, slots=True)
class SubgraphText:
    """A subgraph among the arguments of a call, as text."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One node about to run. ``args`` and ``attrs`` hold Operands in place of values.

    ``draw`` is the generator that it draws from and the number of draws before; ``results`` counts results;
    ``is_move`` says that the node only copies its operands, to another device or within one.
    """

    op: str
    args: tuple[object, ...]
    attrs: Mapping[str, object]
    operands: tuple[Operand, ...]
    results: int
    writes: tuple[int, ...]
    draw: tuple[str, int] | None
    is_move: bool


@dataclass(frozen=True, slots=True)
class Results:
    """What a call made: contents of results by index, and of written operands by position."""

    outputs: Mapping[int, object]
    written: Mapping[int, object]


class Domain(Protocol):
    """What contents are, and what operators do to them."""

    def given(self, value: Value, content: object, /) -> object:
        """The initial content of an input, from what the caller gave (None when nothing)."""

    def view(self, content: object, call: Call, result: int, /) -> object:
        """What result ``result`` of the view ``call`` shows of memory with that content."""

    def put(self, content: object, path: Sequence[tuple[Call, int]], new: object, /) -> object:
        """The content of memory after ``new`` was written through the views in ``path``."""

    def call(self, call: Call, /) -> Results:
        """Run one operator."""

    def event(self, call: Call, /) -> str:
        """A description of the call by which sequences of effects are compared; empty for none."""


@dataclass(frozen=True, slots=True)
class Returned:
    """One returned value: its content when the graph ends, where it lives, and whose memory it shares.

    ``memory`` names the inputs whose memory it may lie in, else ``result n`` for the first returned value in that
    memory; it is empty for numbers.
    """

    content: object
    device: Device | None
    memory: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that can be observed of running a graph.

    outputs  the returned values, literals and tuples of them
    written  final contents of the inputs that were written, by name
    draws    numbers of draws, by generator
    effects  what happened in order: per generator, per process group, and at barriers (with what ran between them)
    """

    outputs: tuple[object, ...]
    written: Mapping[str, object]
    draws: Mapping[str, int]
    effects: Mapping[str, tuple[object, ...]]


def interpret(graph: Graph, inputs: Mapping[str, object] | None = None, domain: Domain | None = None) -> Outcome:
    """Run ``graph`` on ``inputs`` (contents by name) in ``domain``: terms when None, where inputs may be left out.

    Graphs of launches are interpreted over terms only, byte range by byte range. Raises InterpretError.
    """
    if domain is None:
        from pygraph.ir.terms import SymbolicDomain  # terms are built on this module

        domain = SymbolicDomain()
    machine = _Machine(graph, domain)
    machine.load(inputs or {})
    for node in graph.nodes:
        machine.run(node)
    return machine.outcome()


@dataclass(slots=True, eq=False)
class _Storage:
    """Memory made by one input or one result."""

    name: str
    content: object
    is_input: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory, and the views through which a value sees it, outermost last."""

    storage: _Storage
    path: tuple[tuple[Call, int], ...] = ()


@dataclass(slots=True)
class _Machine:
    graph: Graph
    domain: Domain
    places: dict[Value, tuple[_Place, ...]] = field(default_factory=dict)
    draws: dict[str, int] = field(default_factory=dict)
    effects: dict[str, list[object]] = field(default_factory=dict)
    since_barrier: list[str] = field(default_factory=list)

    def load(self, inputs: Mapping[str, object]) -> None:
        for value in self.graph.inputs:
            content = self.domain.given(value, inputs.get(value.name))
            if self.graph.stage.of_launches:
                content = RangedMemory(content)
            self.places[value] = (_Place(_Storage(value.name, content, is_input=True)),)

    def run(self, node: KernelNode) -> None:
        call = self._call(node)
        results = self.domain.call(call)
        self._note_effects(node, call)
        for position in dict.fromkeys(node.effects.writes):
            self._write(node, position, results.written[position])
        for output in node.outputs:
            self.places[output] = self._place(node, call, output, results)

    def outcome(self) -> Outcome:
        owners: dict[_Storage, str] = {}
        outputs = tuple(self._returned(arg, f"result {i}", owners) for i, arg in enumerate(self.graph.outputs))
        storages = (place.storage for value in self.graph.inputs for place in self.places[value])
        written = {storage.name: _final(storage.content) for storage in storages if storage.written}
        effects = {chain: tuple(events) for chain, events in self.effects.items()}
        return Outcome(outputs, written, dict(self.draws), effects)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, node: KernelNode) -> Call:
        reads = node.effects.reads
        read = range(len(node.inputs)) if reads is None else reads
        contents = [self._read(node, i) if i in read else UNREAD for i in range(len(node.inputs))]
        operands = tuple(Operand(i, content) for i, content in enumerate(contents))
        feed = iter(operands)
        args = tuple(self._encode(arg, feed) for arg in node.args)
        attrs = {key: self._encode(arg, feed) for key, arg in node.attrs.items()}
        generator = node.effects.rng
        draw = None if generator is None else (generator, self.draws.get(generator, 0))
        return Call(node.op, args, attrs, operands, len(node.outputs), node.effects.writes, draw, _is_move(node))

    def _encode(self, arg: Arg, feed: Iterator[Operand]) -> object:
        if isinstance(arg, Value):
            return next(feed)
        if isinstance(arg, tuple):
            return tuple(self._encode(item, feed) for item in arg)
        if isinstance(arg, GraphRef) and arg.name in self.graph.subgraphs:
            return SubgraphText(str(self.graph.subgraphs[arg.name]))
        return arg

    def _note_effects(self, node: KernelNode, call: Call) -> None:
        event = self.domain.event(call)
        effects = node.effects
        if effects.rng is not None:
            self.draws[effects.rng] = self.draws.get(effects.rng, 0) + 1
            self.effects.setdefault(f"rng {effects.rng}", []).append(event)
        if effects.collective is not None:
            self.effects.setdefault(f"collective {effects.collective}", []).append(event)
        if effects.barrier:
            self.effects.setdefault("barrier", []).append((event, *sorted(set(self.since_barrier))))
            self.since_barrier = []
        elif event:
            self.since_barrier.append(event)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _read(self, node: KernelNode, position: int) -> object:
        places = self.places[node.inputs[position]]
        if self.graph.stage.of_launches:
            return _ranged(places[0].storage).read(*operand_range(node, position))
        return self._content(places)

    def _content(self, places: tuple[_Place, ...]) -> object:
        contents = [self._seen(place) for place in places]
        return contents[0] if len(contents) == 1 else tuple(contents)

    def _seen(self, place: _Place) -> object:
        content = place.storage.content
        for call, result in place.path:
            content = self.domain.view(content, call, result)
        return content

    def _write(self, node: KernelNode, position: int, new: object) -> None:
        for place in self.places[node.inputs[position]]:
            place.storage.written = True
            if self.graph.stage.of_launches:
                _ranged(place.storage).write(*operand_range(node, position), new)
            else:
                place.storage.content = self.domain.put(place.storage.content, place.path, new)

    def _place(self, node: KernelNode, call: Call, output: Value, results: Results) -> tuple[_Place, ...]:
        """Where a result lies: in the memory of the operands that it aliases, or in its own."""
        shared = [operand for index, operand in node.effects.aliases if index == output.index]
        places: dict[_Place, None] = {}
        for position in shared:
            steps = () if position in node.effects.writes else ((call, output.index),)
            for place in self.places[node.inputs[position]]:
                places[_Place(place.storage, (*place.path, *steps))] = None
        return tuple(places) or (_Place(_Storage(output.name, results.outputs[output.index])),)

    def _returned(self, arg: Arg, label: str, owners: dict[_Storage, str]) -> object:
        if isinstance(arg, tuple):
            return tuple(self._returned(item, f"{label}.{i}", owners) for i, item in enumerate(arg))
        if not isinstance(arg, Value):
            return arg
        places = self.places[arg]
        if self.graph.stage.of_launches:
            return Returned(_final(places[0].storage.content), None, (places[0].storage.name,))
        memory = tuple(_owner(place.storage, label, owners) for place in places)
        is_number = isinstance(arg.type, ScalarType)
        return Returned(self._content(places), getattr(arg.type, "device", None), () if is_number else memory)


def _is_move(node: KernelNode) -> bool:
    """Whether each result is its operand, as a copy of its own: only strides and device may differ."""
    if node.op.removesuffix(".default") not in _MOVES or node.effects.writes or node.effects.aliases:
        return False
    return [_content_type(value) for value in node.inputs] == [_content_type(value) for value in node.outputs]


def _content_type(value: Value) -> object:
    type = value.type
    return (type.dtype, type.shape) if isinstance(type, TensorType) else type


def _owner(storage: _Storage, label: str, owners: dict[_Storage, str]) -> str:
    return storage.name if storage.is_input else owners.setdefault(storage, label)


def _ranged(storage: _Storage) -> RangedMemory:
    if not isinstance(storage.content, RangedMemory):
        raise InterpretError(f"{storage.name} is no buffer")
    return storage.content


def _final(content: object) -> object:
    return content.pieces() if isinstance(content, RangedMemory) else content
