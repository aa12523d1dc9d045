"""Makes the FX module of a graph, as AOTAutograd would pass it to ``inner_compile``.

    %y = aten.relu.default(%x) : f32[s0, 4]@cpu        y = torch.ops.aten.relu.default(x)    val: fake, of known sizes

Nodes keep their names, so that a decision on the graph steers the compilation of the module. Symbols become numbers,
except those that depend on data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from pygraph import compat
from pygraph.frontend.interpret import number_of
from pygraph.frontend.lift import leaves_of
from pygraph.frontend.names import FrontendError, resolve_op
from pygraph.frontend.types import to_fx_arg, torch_dtype
from pygraph.inductor.upload import make_compilable
from pygraph.inductor.write_back import lifted_constant, takes_constants
from pygraph.ir import CONSTANT, Graph, GraphRef, KernelNode, TensorType, Value


def fit_names(graph: Graph) -> None:
    """Rename inputs and nodes of ``graph`` whose names FX does not accept: ``%0``, ``%sum``, an input
    ``%layers.0.weight`` without a placeholder."""
    taken = fx.Graph()
    left: list[tuple[Value | KernelNode, str]] = []
    owners: list[Value | KernelNode] = [*graph.inputs, *graph.nodes]
    for one in owners:
        name = one.placeholder if isinstance(one, Value) else one.name
        free = fx.Graph().create_node("placeholder", name, name=name).name == name
        if not free or taken.create_node("placeholder", name, name=name).name != name:
            left.append((one, name))
    for one, name in left:
        fitting = taken.create_node("placeholder", name, name=name).name
        if isinstance(one, Value):
            one.placeholder = fitting
        else:
            graph.rename(one, fitting)
    for inner in graph.subgraphs.values():
        fit_names(inner)


def module_of(
    graph: Graph, inputs: Sequence[Any], sizes: Mapping[str, int], constant: Callable[[KernelNode], torch.Tensor]
) -> tuple[fx.GraphModule, list[Any]]:
    """The module of ``graph``, and fake inputs like ``inputs``.

    Raises FrontendError, with the name of the ``node``, for a node that torch does not know or cannot call with fakes.

    Args:
        graph: the graph
        inputs: tensors and numbers
        sizes: the value of each symbol
        constant: the tensor of a ``pygraph.constant`` node
    """
    make_compilable()
    maker = _Maker(graph, compat.fake_mode(), sizes, constant)
    with maker.mode:
        fakes = [
            maker.mode.from_tensor(one, static_shapes=True) if isinstance(one, torch.Tensor) else one for one in inputs
        ]
    return maker.make(fakes), fakes


class _Maker:
    def __init__(
        self,
        graph: Graph,
        mode: compat.FakeTensorMode,
        sizes: Mapping[str, int],
        constant: Callable[[KernelNode], torch.Tensor],
    ) -> None:
        self.graph, self.mode, self.sizes, self.constant = graph, mode, sizes, constant
        self.gm = fx.GraphModule({}, fx.Graph())
        self.fx = self.gm.graph
        self.env: dict[Value, fx.Node] = {}

    def make(self, fakes: Sequence[Any]) -> fx.GraphModule:
        for value, fake in zip(self.graph.inputs, fakes, strict=True):
            self.env[value] = self._named(value.placeholder, fake, "placeholder", value.placeholder)
        for node in self.graph.nodes:
            try:
                self._node(node)
            except Exception as error:  # a fake call of an operator raises anything
                reason = str(error) if isinstance(error, FrontendError) else f"{type(error).__name__}: {error}"
                failure = FrontendError(f"{node.op} cannot be compiled at node {node.name}: {reason}")
                failure.node = node.name  # type: ignore[attr-defined]
                raise failure from error
        self.fx.output(tuple(to_fx_arg(arg, self.env.__getitem__, self._other) for arg in self.graph.outputs))
        self.gm.recompile()
        return self.gm

    def _named(self, name: str, fake: Any, op: str, target: Any, args: Any = (), kwargs: Any = None) -> fx.Node:
        node = self.fx.create_node(op, target, args, kwargs, name=name)
        if node.name != name:
            raise FrontendError(f"FX cannot call a node '{name}': no identifier, or another one is called so")
        node.meta["val"] = fake
        return node

    def _node(self, node: KernelNode) -> None:
        if node.op == CONSTANT:
            self.env[node.output] = self._attribute(node.name, self.constant(node))
            return
        target = resolve_op(node.op)
        constant = next((one for one in node.inputs if one.producer is not None and one.producer.op == CONSTANT), None)
        if constant is not None and not takes_constants(target):
            raise FrontendError(
                f"Inductor takes a copy of the constant {constant!r}: aten.lift_fresh_copy.default({constant!r})"
            )
        args = tuple(to_fx_arg(arg, self.env.__getitem__, self._other) for arg in node.args)
        kwargs = {key: to_fx_arg(arg, self.env.__getitem__, self._other) for key, arg in node.attrs.items()}
        target, args = lifted_constant(self.gm, target, args)
        known = fx.map_arg((args, kwargs), self._held)
        with self.mode:
            fake = target(*known[0], **known[1])
        made = self._named(node.name, fake, "call_function", target, args, kwargs)
        bound = compat.bound_symbols(self.mode, fake)
        if bound:
            made.meta["unbacked_bindings"] = bound
        leaves = list(leaves_of(fake))
        if len(leaves) != len(node.outputs):
            raise FrontendError(f"{node.op} has {len(leaves)} results, not {len(node.outputs)}")
        for value, (path, _) in zip(node.outputs, leaves, strict=True):
            self.env[value] = self._item(made, path)

    def _held(self, node: fx.Node) -> Any:
        """The fake result of a node, or the subgraph to which it refers."""
        return node.meta["val"] if "val" in node.meta else getattr(self.gm, str(node.target))

    def _item(self, node: fx.Node, path: Sequence[Any]) -> fx.Node:
        for index in path:
            outer = node.meta["val"]
            node = self.fx.call_function(operator.getitem, (node, index))
            node.meta["val"] = outer[index]
        return node

    def _attribute(self, name: str, tensor: torch.Tensor) -> fx.Node:
        target = f"_constant_{name}"
        self.gm.register_buffer(target, tensor)
        with self.mode:
            return self._named(name, self.mode.from_tensor(tensor, static_shapes=True), "get_attr", target)

    def _other(self, arg: sympy.Expr | GraphRef) -> Any:
        if isinstance(arg, GraphRef):
            return self._subgraph(arg.name)
        return number_of(arg, self.sizes)

    def _subgraph(self, name: str) -> fx.Node:
        target = f"_graph_{name}"
        if not hasattr(self.gm, target):
            graph = self.graph.subgraphs[name]
            inner = _Maker(graph, self.mode, self.sizes, self.constant)
            with self.mode:
                fakes = [self._fake(value) for value in graph.inputs]
            self.gm.add_module(target, inner.make(fakes))
        return self.fx.get_attr(target)

    def _fake(self, value: Value) -> Any:
        """Fake tensor for an input of a subgraph that an operator calls."""
        type = value.type
        if not isinstance(type, TensorType):
            raise FrontendError(f"input {value!r} of graph @{self.graph.name} is no tensor")
        shape, stride = ([number_of(size, self.sizes) for size in sizes] for sizes in (type.shape, type.strides))
        return torch.empty_strided(shape, stride, dtype=torch_dtype(type.dtype), device=str(type.device))
