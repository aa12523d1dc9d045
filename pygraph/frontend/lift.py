"""Lifts a post-AOTAutograd FX graph to the IR: one kernel node per operator, under the FX node's name.

Tuple ``getitem``s become results of the node that they index. Inputs have the user's names if these are known, and
also keep the name of their placeholder. AOTAutograd's names and the list of static inputs give the role of an input:
roles are hints, for reports and for memory that is worth giving back; only ``static`` is a promise.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import sympy
from torch import fx

from pygraph import compat
from pygraph.frontend.costs import cost_of
from pygraph.frontend.effects import Call, Path, effects_of, tags_text
from pygraph.frontend.hops import higher_order_effects, wrapped_operator
from pygraph.frontend.location import UNKNOWN, GraphOrigin, common_module, location_of, module_path
from pygraph.frontend.names import FrontendError, op_name, overload_of
from pygraph.frontend.types import TypeReader, literal
from pygraph.ir import (
    CONSTANT,
    FREE,
    MADE_FROM,
    TAGS,
    Arg,
    Graph,
    GraphRef,
    KernelNode,
    ScalarType,
    Stage,
    TensorType,
    Type,
    Value,
)
from pygraph.ir.operators import listed

FX_MADE_FROM = "pygraph_made_from"
"""Key of an FX node's ``meta`` that holds the ``made_from`` entries of the nodes that it was made from."""


def lift(
    gm: fx.GraphModule,
    *,
    kind: str,
    static_inputs: Sequence[int] = (),
    origin: GraphOrigin = UNKNOWN,
    frames: bool = False,
) -> Graph:
    """The IR of ``gm``, the module that AOTAutograd hands to ``inner_compile``.

    Raises FrontendError for a graph in another form.

    Args:
        gm: the FX graph
        kind: inference, forward or backward
        static_inputs: positions of inputs with fixed addresses. Inductor's list for a backward graph includes all saved
            tensors, whose addresses are not fixed: see ``backward_static_inputs``
        origin: origin of Dynamo's graph, with names of inputs and modules
        frames: add to source lines the user's frames around them
    """
    types = TypeReader()
    graph = Graph("main", kind, Stage.LIFTED)
    _Lifter(gm, graph, types, frozenset(static_inputs), origin, frames=frames).run()
    graph.hints = types.hints
    written = {node.inputs[place] for node in graph.nodes for place in node.effects.writes}
    for value in graph.inputs:
        if value.role == "parameter" and value in written:
            value.role = "buffer"
    return graph


def made_from(node: fx.Node) -> tuple[tuple[str, str, str], ...]:
    """The operator of an FX node, or those from which it was made, each with the user's function, and the module as
    torch writes it."""
    if node.op != "call_function":
        return ()
    loc = location_of(node.meta)
    own = (op_name(node.target), loc.function if loc else "", module_path(node.meta))
    return node.meta.get(FX_MADE_FROM) or (own,)


def result_paths(node: fx.Node) -> list[Path]:
    """Positions of the IR node's outputs in the return value of the FX node ``node``; ``()``: the value itself."""
    return [path for path, _ in leaves_of(_value_of(node))]


class _Lifter:
    """Lifts one module. ``env`` maps each FX node to its value, or its structure of values."""

    def __init__(
        self,
        gm: fx.GraphModule,
        graph: Graph,
        types: TypeReader,
        static: frozenset[int],
        origin: GraphOrigin,
        *,
        frames: bool,
    ) -> None:
        self.gm = gm
        self.graph = graph
        self.types = types
        self.static = static
        self.origin = origin
        self.frames = frames
        self.taken = {node.name for node in gm.graph.nodes if node.op not in ("placeholder", "output")}
        self.env: dict[fx.Node, Any] = {}
        self.modules: dict[fx.GraphModule, GraphRef] = {}

    def run(self) -> Graph:
        handlers = {
            "placeholder": self._placeholder,
            "get_attr": self._get_attr,
            "call_function": self._call_function,
            "output": self._output,
        }
        for node in self.gm.graph.nodes:
            if node.op not in handlers:
                raise FrontendError(f"node {node.name} is a {node.op}, which AOTAutograd never leaves in a graph")
            self.env[node] = handlers[node.op](node)
        return self.graph

    def _placeholder(self, node: fx.Node) -> Value:
        type = self.types.type_of(node.meta.get("val"))
        role, static = _role_of(node.name, type, self.graph.kind, static=len(self.graph.inputs) in self.static)
        name = self._name_of(node, type)
        return self.graph.add_input(type, name, role=role, static=static, placeholder=node.name)

    def _name_of(self, node: fx.Node, type: Type) -> str:
        """The user's name of an input, with a number if a node or another input has that name; a size without one has
        the name of its symbol."""
        key, steps = compat.described_input(node.meta.get("desc")) or ("", ())
        known = self.origin.inputs.get(key)
        name = ".".join((known, *steps)) if known else node.name
        if not known and isinstance(type, ScalarType) and isinstance(type.expr, sympy.Symbol):
            name = type.expr.name
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        free = next(one for one in itertools.chain([name], numbered) if one not in self.taken)
        self.taken.add(free)
        return free

    def _get_attr(self, node: fx.Node) -> Value | GraphRef:
        target = str(node.target)
        try:
            found = operator.attrgetter(target)(self.gm)
        except AttributeError:
            raise FrontendError(f"node {node.name} takes the attribute {target}, which the module lacks") from None
        if isinstance(found, fx.GraphModule):
            return self._subgraph(target, found)
        type = self.types.type_of(node.meta.get("val", found))
        return self.graph.add(CONSTANT, (), (type,), attrs={"target": target}, name=node.name, cost=FREE).output

    def _subgraph(self, target: str, module: fx.GraphModule) -> GraphRef:
        if module not in self.modules:
            name = target.replace(".", "_")
            while name in self.graph.subgraphs:
                name += "_"
            graph = Graph(name, "subgraph", self.graph.stage)
            origin = replace(self.origin, inputs={})  # those of a subgraph are its operator's operands
            inner = _Lifter(module, graph, self.types, frozenset(), origin, frames=self.frames)
            self.graph.subgraphs[name] = inner.run()
            self.modules[module] = GraphRef(name)
        return self.modules[module]

    def _call_function(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = cast("tuple[fx.Node, Any]", node.args)
            if isinstance(self.env[source], (tuple, dict)):  # else the source is one opaque value
                return self.env[source][index]
        value = _value_of(node)
        leaves = list(leaves_of(value))
        call = Call(
            op=op_name(overload_of(node.target)),
            target=overload_of(node.target),
            args=tuple([self._arg(arg) for arg in node.args]),
            attrs={key: self._arg(arg) for key, arg in node.kwargs.items()},
            results=tuple([self.types.type_of(leaf) for _, leaf in leaves]),
            paths=tuple([path for path, _ in leaves]),
            subgraphs=self.graph.subgraphs,
            binds=bool(node.meta.get("unbacked_bindings")),
            node=node,
        )
        return _rebuild(value, iter(self._add(node, call).outputs))

    def _add(self, node: fx.Node, call: Call) -> KernelNode:
        higher = isinstance(call.target, compat.HigherOrderOperator)
        made = [(op, function, self.origin.module(path)) for op, function, path in node.meta.get(FX_MADE_FROM, ())]
        added = self.graph.add(
            call.op,
            call.args,
            call.results,
            attrs=call.attrs,
            name=node.name,
            effects=higher_order_effects(call) if higher else effects_of(call),
            loc=location_of(node.meta, frames=self.frames),
            module=self.origin.module(module_path(node.meta)) or common_module(module for *_, module in made),
        )
        if call.op not in listed():  # the name of a function may not resolve
            self.graph.operators.add(call.op)
        added.cost = cost_of(added, self.graph)
        tags = tags_text(wrapped_operator(call) if higher else call.target)
        if tags:
            added.meta.set(TAGS, tags)
        if made:
            added.meta.set(MADE_FROM, tuple(made))
        return added

    def _output(self, node: fx.Node) -> None:
        returned = self._arg(node.args[0])
        self.graph.set_outputs(returned if isinstance(returned, tuple) else (returned,))

    def _arg(self, arg: Any) -> Arg:
        return literal(arg, self.types, self.env)


# -- structures of results -----------------------------------------------------------------------------------------


class unknown:
    """Stands for a result that the tracer did not record; its type in the IR is opaque, with the name of this class."""


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val", unknown() if node.users else None)


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The results in the return value of an operator, without None, each with its position."""
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves_of(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, (*path, str(key)))
    elif value is not None:
        yield path, value


def _rebuild(value: Any, outputs: Iterator[Value]) -> Any:
    """``value`` with its leaves replaced by ``outputs``, in the order of ``leaves_of``."""
    if isinstance(value, (tuple, list)):
        return tuple([_rebuild(item, outputs) for item in value])
    if isinstance(value, dict):
        return {key: _rebuild(item, outputs) for key, item in value.items()}
    return None if value is None else next(outputs)


# -- roles of inputs ---------------------------------------------------------------------------------------------------


def _role_of(name: str, type: Type, kind: str, *, static: bool) -> tuple[str, bool]:
    """The role of a placeholder, and true if its address is fixed.

    Saved activations and tangents are new in each call, whatever the caller's list says.
    """
    if isinstance(type, ScalarType):
        return "scalar", False
    if name.startswith("tangents_"):
        return "tangent", False
    if kind == "backward":
        static = static and name.startswith("primals_")
        return ("parameter" if static else "saved"), static
    if not static:
        return "input", False
    return ("parameter" if isinstance(type, TensorType) and type.dtype.is_floating else "buffer"), True


def backward_static_inputs(gm: fx.GraphModule, forward: Graph) -> tuple[int, ...]:
    """Positions of the inputs of the backward ``gm`` that are static inputs of ``forward``, by name.

    Inductor marks every saved tensor of a backward graph static; only static inputs of the forward keep their address.
    """
    static = {value.placeholder for value in forward.inputs if value.static}
    return tuple(i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node.name in static)


def held_inputs(graph: Graph) -> frozenset[str]:
    """The inputs that somebody holds until the program returns: all except saved tensors and tangents. Names are those
    of placeholders, in Inductor's program; likewise in ``lent_inputs``."""
    return frozenset(value.placeholder for value in graph.inputs if value.role not in ("saved", "tangent"))


def lent_inputs(graph: Graph) -> frozenset[str]:
    """The inputs that somebody may hold until the program returns: autograd holds the tangents of a backward call, and
    AOTAutograd passes these on unless it has to change their strides."""
    return frozenset(value.placeholder for value in graph.inputs if value.role == "tangent")
