"""The graph: an ordered DAG of kernel nodes. It owns every mutation and every name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from html import escape
from typing import get_args

from pygraph.colours import colour
from pygraph.errors import PygraphError
from pygraph.ir.annotations import REGION, Region
from pygraph.ir.cost import UNKNOWN, Cost
from pygraph.ir.effects import PURE, Effects
from pygraph.ir.node import Arg, KernelNode, Location, Value, map_arg, values_in
from pygraph.ir.operators import listed, signature_of
from pygraph.ir.text.print import print_graph
from pygraph.ir.types import Type

__all__ = ["Graph", "GraphError", "Stage"]


class Stage(Enum):
    """Progress of a graph through the passes, in order. The value is the name in ``.pgir`` text.

    The verifier has one table of rules per stage; passes state which stage they require and which they ensure.
    """

    LIFTED = "lifted"
    JUDGED = "judged"
    PLACED = "placed"
    PARTITIONED = "partitioned"
    INDIRECTED = "indirected"
    SELECTED = "selected"

    def reached(self, other: Stage) -> bool:
        """True if a graph at this stage satisfies the rules of ``other``."""
        order = list(Stage)
        return order.index(self) >= order.index(other)


class GraphError(PygraphError):
    """A mutation would make the graph inconsistent: a name is taken, a value is still used, an order is impossible."""


class Graph:
    """Graph of operators: inputs, nodes in program order, outputs; subgraphs; and regions, once partitioned.

    Args:
        name: name in ``.pgir`` text
        kind: ``inference``, ``forward``, ``backward`` or ``subgraph``
        stage: stage that the passes have reached

    Attributes:
        hints (dict[str, int]): example values of symbols
        operators (set[str]): names of custom operators in the graph
        subgraphs (dict[str, Graph]): bodies of higher-order operators, by name
        regions (dict[int, Region]): regions by index, once partitioned
    """

    def __init__(self, name: str = "main", kind: str = "inference", stage: Stage = Stage.LIFTED) -> None:
        self.name = name
        self.kind = kind
        self.stage = stage
        self.hints: dict[str, int] = {}
        self.operators: set[str] = set()
        self.subgraphs: dict[str, Graph] = {}
        self.regions: dict[int, Region] = {}
        self._inputs: list[Value] = []
        self._nodes: list[KernelNode] = []
        self._outputs: tuple[Arg, ...] = ()
        self._names: dict[str, KernelNode | Value] = {}
        self._counter = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Inputs of the graph, in order."""
        return tuple(self._inputs)

    @property
    def nodes(self) -> tuple[KernelNode, ...]:
        """Nodes in program order, which is a topological order."""
        return tuple(self._nodes)

    @property
    def outputs(self) -> tuple[Arg, ...]:
        """Results of the graph: values, literals, None, or tuples of these."""
        return self._outputs

    @property
    def output_values(self) -> tuple[Value, ...]:
        """Values among the outputs, in order, with repetitions."""
        return tuple(values_in(self._outputs))

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, name: str) -> KernelNode:
        """The node called ``name``. Raises KeyError if there is none."""
        found = self._names.get(name)
        if not isinstance(found, KernelNode):
            raise KeyError(f"graph {self.name} has no node '{name}'")
        return found

    def owner(self, name: str) -> KernelNode | Value | None:
        """The node or input called ``name``, or None."""
        return self._names.get(name)

    def value(self, name: str, index: int | None = None) -> Value:
        """The value printed as ``%name`` or ``%name.index``. Raises KeyError if there is none, or several."""
        owner = self._names.get(name)
        if owner is None:
            raise KeyError(f"unknown value %{name}")
        results = (owner,) if isinstance(owner, Value) else owner.outputs
        if index is None and len(results) == 1:
            return results[0]
        if index is None or index >= len(results):
            raise KeyError(f"%{name} has {len(results)} results: write %name.index")
        return results[index]

    def values(self) -> Iterator[Value]:
        """All values: the inputs, then the outputs of each node."""
        yield from self._inputs
        for node in self._nodes:
            yield from node.outputs

    # -- building --------------------------------------------------------------------------------------------------

    def add_input(
        self,
        type: Type,
        name: str | None = None,
        *,
        role: str = "input",
        static: bool = False,
        placeholder: str | None = None,
    ) -> Value:
        """Append an input. ``placeholder`` defaults to its name.

        Raises GraphError if the name is taken, or if ``type`` is not a type of the IR."""
        if not isinstance(type, get_args(Type)):
            raise GraphError(f"the type of an input comes first, and is none: {type!r}")
        value = Value(self._claim(name, "in"), type, role=role, static=static)
        value.placeholder = value.name if placeholder is None else placeholder
        self._names[value.name] = value
        self._inputs.append(value)
        return value

    def add(
        self,
        op: str,
        args: Iterable[Arg] = (),
        types: Iterable[Type] = (),
        *,
        attrs: Mapping[str, Arg] | None = None,
        name: str | None = None,
        effects: Effects = PURE,
        cost: Cost = UNKNOWN,
        loc: Location | None = None,
        module: str = "",
        before: KernelNode | None = None,
    ) -> KernelNode:
        """Add a node. Raises GraphError if the name is taken, or an operand belongs to another graph.

        A custom operator that torch knows in this process is also added to ``operators``.

        Args:
            op: operator with overload, such as ``aten.mm.default``
            args: positional operands
            types: type of each result
            attrs: keyword operands
            name: name of the node, and of its value if there is one result; None: a generated name
            effects: effects besides computing the results
            cost: cost of one run
            loc: the user's source line
            module: path of the user's module that contains the line
            before: node before which to insert; None: append
        """
        node = KernelNode(self._claim(name, "n"), op, tuple(args), dict(attrs or {}), effects, cost, loc, module)
        self._check_operands(node.inputs)
        outputs = tuple(types)
        single = len(outputs) == 1
        node.outputs = tuple(
            Value(node.name if single else f"{node.name}.{i}", type, node, i) for i, type in enumerate(outputs)
        )
        if op not in listed() and signature_of(op) is not None:
            self.operators.add(op)
        self._names[node.name] = node
        self._nodes.insert(len(self._nodes) if before is None else self._nodes.index(before), node)
        self._link(node)
        return node

    def set_outputs(self, outputs: Iterable[Arg]) -> None:
        """Replace the results of the graph. Raises GraphError for foreign values."""
        chosen = tuple(outputs)
        self._check_operands(values_in(chosen))
        self._outputs = chosen

    # -- mutation --------------------------------------------------------------------------------------------------

    def set_args(self, node: KernelNode, args: Iterable[Arg], attrs: Mapping[str, Arg] | None = None) -> None:
        """Replace the operands of ``node``, and keyword operands if given. Raises GraphError for foreign values."""
        chosen = tuple(args)
        keywords = dict(node.attrs if attrs is None else attrs)
        inputs = tuple(values_in((*chosen, *keywords.values())))
        self._check_operands(inputs)
        self._unlink(node)
        node.args, node.attrs, node.inputs = chosen, keywords, inputs
        self._link(node)

    def add_order(self, first: KernelNode, then: KernelNode) -> None:
        """Order ``first`` before ``then`` without a data dependence. Raises GraphError for equal or foreign nodes."""
        if first is then:
            raise GraphError(f"node {first.name} cannot run before itself")
        for node in (first, then):
            if self._names.get(node.name) is not node:
                raise GraphError(f"node {node.name} does not belong to graph {self.name}")
        then.after[first] = None

    def replace_operands(self, node: KernelNode, twins: Mapping[Value, Arg]) -> None:
        """Replace the operands of ``node`` by their twins; operands without a twin stay."""
        attrs = {key: map_arg(arg, twins) for key, arg in node.attrs.items()}
        self.set_args(node, [map_arg(arg, twins) for arg in node.args], attrs)

    def replace_uses(self, old: Value, new: Arg) -> None:
        """Replace ``old`` by ``new`` in all nodes and in the outputs."""
        for node in list(old.users):
            self.replace_operands(node, {old: new})
        self.set_outputs(map_arg(arg, {old: new}) for arg in self._outputs)

    def erase(self, *nodes: KernelNode) -> None:
        """Remove nodes. Raises GraphError if a result is returned, or used by a node that stays."""
        gone = dict.fromkeys(nodes)
        returned = dict.fromkeys(self.output_values)
        for node in nodes:
            kept = [user.name for out in node.outputs for user in out.users if user not in gone]
            kept += ["the outputs" for out in node.outputs if out in returned]
            if kept:
                raise GraphError(f"cannot erase {node.name}: still used by {', '.join(kept)}")
        for node in nodes:
            self._unlink(node)
            del self._names[node.name]
        self._nodes = [node for node in self._nodes if node not in gone]
        for node in self._nodes:
            for before in [before for before in node.after if before in gone]:
                del node.after[before]
        for region in self.regions.values():
            for value in [value for value in region.parameters if value.producer in gone]:
                del region.parameters[value]

    def reorder(self, order: Iterable[KernelNode]) -> None:
        """Change the program order. Raises GraphError unless ``order`` is a topological order of all nodes."""
        chosen = list(order)
        place = {node: i for i, node in enumerate(chosen)}
        if len(place) != len(self._nodes) or any(node not in place for node in self._nodes):
            raise GraphError("a new order must contain each node exactly once")
        for node in chosen:
            needed = (*(value.producer for value in node.inputs if value.producer is not None), *node.after)
            late = [before.name for before in needed if place[before] > place[node]]
            if late:
                raise GraphError(f"{node.name} would run before {', '.join(late)}, which it needs")
        self._nodes = chosen

    def rename(self, node: KernelNode, name: str) -> None:
        """Rename ``node`` and its results. Raises GraphError if the name is taken."""
        claimed = self._claim(name, "n")
        self._names[claimed] = self._names.pop(node.name)
        node.name = claimed
        for value in node.outputs:
            value.name = claimed if len(node.outputs) == 1 else f"{claimed}.{value.index}"

    def merge_regions(self, first: int, second: int) -> None:
        """Move the nodes of region ``second`` to region ``first``, which keeps its annotations.

        Raises GraphError, and changes nothing, if a region does not exist, if both are the same, or if something
        outside of both must run between their nodes.
        """
        from pygraph.ir.verify import quotient  # which knows graphs

        for index in (first, second):
            if index not in self.regions:
                raise GraphError(
                    f"graph {self.name} has no region {index}: it has {', '.join(map(str, self.regions)) or 'none'}"
                )
        if first == second:
            raise GraphError(f"region {first} cannot be merged with itself")
        moved = [node for node in self._nodes if node.meta.get(REGION) == second]
        for node in moved:
            node.meta.set(REGION, first)
        reason = next((reason for _, reason in quotient(self)), None)
        if reason is not None:
            for node in moved:
                node.meta.set(REGION, second)
            raise GraphError(f"regions {first} and {second} cannot be one: {reason}")
        found = {**self.regions[first].parameters, **self.regions.pop(second).parameters}
        inside = {value for value in found if value.producer is not None and value.producer.meta.get(REGION) == first}
        self.regions[first].parameters = {value: one for value, one in found.items() if value not in inside}

    # -- copying and comparing -------------------------------------------------------------------------------------

    def clone(self) -> Graph:
        """An independent copy with the same names."""
        copy = Graph(self.name, self.kind, self.stage)
        copy.hints, copy.operators = dict(self.hints), set(self.operators)
        copy.subgraphs = {name: graph.clone() for name, graph in self.subgraphs.items()}
        copy._counter = self._counter
        values: dict[Value, Value] = {}
        for value in self._inputs:
            values[value] = copy.add_input(
                value.type, value.name, role=value.role, static=value.static, placeholder=value.placeholder
            )
        for node in self._nodes:  # without operands: during a rewrite, these may be defined later
            types = (out.type for out in node.outputs)
            twin = copy.add(node.op, (), types, name=node.name, effects=node.effects, cost=node.cost, loc=node.loc)
            twin.module, twin.meta = node.module, node.meta.copy()
            values.update(zip(node.outputs, twin.outputs, strict=True))
        for node, twin in zip(self._nodes, copy._nodes, strict=True):
            attrs = {key: map_arg(arg, values) for key, arg in node.attrs.items()}
            copy.set_args(twin, (map_arg(arg, values) for arg in node.args), attrs)
            twin.after = {copy.node(before.name): None for before in node.after}
        copy.set_outputs(map_arg(arg, values) for arg in self._outputs)
        for index, region in self.regions.items():
            parameters = {values[value]: parameter for value, parameter in region.parameters.items()}
            copy.regions[index] = Region(parameters, region.meta.copy())
        return copy

    def __eq__(self, other: object) -> bool:
        """True if both graphs have the same text."""
        return isinstance(other, Graph) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self)} nodes, {self.stage.value}>"

    def __str__(self) -> str:
        return print_graph(self)

    # -- showing ---------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """HTML text for notebooks, with a colour for each region."""
        lines = []
        for line in str(self).splitlines():
            found = re.search(r"\bregion = (\d+)", line)
            style = f' style="background: {colour(int(found[1]), soft=True)}; color: #1c2128"' if found else ""
            lines.append(f"<span{style}>{escape(line)}\n</span>")
        return f"<pre>{''.join(lines)}</pre>"

    # -- names and links -------------------------------------------------------------------------------------------

    def _claim(self, name: str | None, prefix: str) -> str:
        if name is not None and name in self._names:
            raise GraphError(f"the name '{name}' is taken in graph {self.name}")
        while name is None:
            candidate = f"{prefix}{self._counter}"
            self._counter += 1
            name = candidate if candidate not in self._names else None
        return name

    def _check_operands(self, values: Iterable[Value]) -> None:
        for value in values:
            owner = self._names.get(value.name if value.producer is None else value.producer.name)
            if owner is not (value.producer or value):
                raise GraphError(f"value %{value.name} does not belong to graph {self.name}")

    def _link(self, node: KernelNode) -> None:
        for value in node.inputs:
            value.users[node] = value.users.get(node, 0) + 1

    def _unlink(self, node: KernelNode) -> None:
        for value in node.inputs:
            value.users.pop(node, None)
