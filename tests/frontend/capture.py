"""Captures the FX graphs that AOTAutograd hands to Inductor, without compiling them, and builds FX graphs by hand.

The captured graphs run as they are, so that a backward graph comes out of a real backward call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch._functorch.config
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from pygraph.frontend.lift import lift
from pygraph.frontend.location import UNKNOWN, GraphOrigin, origin_of
from pygraph.ir import Graph, KernelNode, parse_graph
from pygraph.ir.verify import verify
from tests.strategies import structure

Boxed: TypeAlias = Callable[[list[Any]], Any]


@dataclass
class Captured:
    """One graph as ``inner_compile`` gets it."""

    gm: fx.GraphModule
    kind: str
    static_inputs: Sequence[int]
    origin: GraphOrigin = UNKNOWN

    def lift(self, *, frames: bool = False) -> Graph:
        static, origin = self.static_inputs, self.origin
        return checked(lift(self.gm, kind=self.kind, static_inputs=static, origin=origin, frames=frames))


def checked(graph: Graph) -> Graph:
    """``graph``, once it verifies and its text parses back to an equal one."""
    verify(graph)
    assert structure(parse_graph(str(graph))) == structure(graph)
    return graph


def capture(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool | torch.Tensor = False,
    dynamic: bool | None = None,
    around: Callable[[Captured, list[Any]], Any] | None = None,
) -> list[Captured]:
    """Run ``fn`` compiled, then its backward when asked to, on that tensor if it is one; the graphs met, in order.

    ``around`` is called in the place of ``run``.
    """
    found: list[Captured] = []
    origins: list[GraphOrigin] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        kind = "backward" if options.get("is_backward") else "inference" if options.get("is_inference") else "forward"
        found.append(Captured(gm, kind, options.get("static_input_idxs", ()), origins[-1]))
        return boxed(partial(around or run, found[-1]))

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        origins.append(origin_of(gm))
        return compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        results = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
        result = next(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor))
        if isinstance(backward, torch.Tensor):
            result.backward(backward)
        elif backward:
            result.float().sum().backward()
    return found


def boxed(run: Boxed) -> Boxed:
    """``run``, which empties the list that it is given, as one that may be handed the only references."""

    def call(values: list[Any]) -> Any:
        return run(values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def run(captured: Captured, values: list[Any]) -> Any:
    """The results of a graph on ``values``, which it takes."""
    arguments = list(values)
    values.clear()
    return captured.gm(*arguments)


def capture_inference(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Captured:
    """The only graph of ``fn`` without gradients."""
    with torch.no_grad():
        (captured,) = capture(fn, *args, dynamic=dynamic)
    return captured


def lift_inference(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Graph:
    """The IR of the only graph of ``fn`` without gradients."""
    return capture_inference(fn, *args, dynamic=dynamic).lift()


class Builder:
    """An FX graph written node by node, with fake tensors for results, for what Dynamo cannot be made to trace here."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, *size: int, **options: Any) -> torch.Tensor:
        with self.mode:
            return torch.empty(size, **options)

    def input(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, args: tuple[Any, ...], value: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def attribute(self, name: str, value: Any) -> fx.Node:
        self.attributes[name] = value
        return self.graph.get_attr(name)

    def module(self, *outputs: Any) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(self.attributes, self.graph)

    def lift(self, *outputs: Any) -> Graph:
        return checked(lift(self.module(*outputs), kind="inference"))


def fake(*size: int, **options: Any) -> torch.Tensor:
    """A fake tensor of a mode of its own."""
    return Builder().fake(*size, **options)


def node_of(target: Any, *args: Any, value: Any = None, **kwargs: Any) -> KernelNode:
    """The node of one call. Tensors among the arguments become inputs, modules subgraphs; ``value`` is what it returns,
    by default a tensor of four, whether or not it could."""
    builder, names = Builder(), (f"x{i}" for i in itertools.count())

    def given(leaf: Any) -> Any:
        if isinstance(leaf, fx.GraphModule):
            return builder.attribute(next(names), leaf)
        return builder.input(next(names), leaf) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(given, (args, kwargs))
    call = builder.call(target, args, builder.fake(4) if value is None else value, **kwargs)
    return lift(builder.module(call), kind="inference").nodes[0]


def only(graph: Graph, op: str) -> KernelNode:
    """The only node of ``graph`` with that operator."""
    (node,) = [node for node in graph.nodes if node.op == op]
    return node
