"""Lifting FX graphs: names, results, types, shapes, roles, subgraphs, constants, source of a whole model."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph.frontend.lift import backward_static_inputs, held_inputs, lent_inputs, lift, result_paths
from pygraph.frontend.names import FrontendError, resolve_op
from pygraph.ir import PURE, Device, DType, GraphRef, OpaqueType, ScalarType, TensorType, Type, symbol
from tests.frontend.capture import Builder, Captured, capture, capture_inference, lift_inference, run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.norm(self.up(x))))
        self.seen.copy_(y.detach())
        return y


def test_each_operator_becomes_a_node_of_its_name_and_the_module_stays_as_it_is() -> None:
    captured = capture_inference(Block(), torch.randn(8, 16))
    before = (captured.gm.code, [sorted(n.meta) for n in captured.gm.graph.nodes])
    graph = captured.lift()
    assert (captured.gm.code, [sorted(n.meta) for n in captured.gm.graph.nodes]) == before
    calls = [n for n in captured.gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [node.name for node in graph.nodes] == [n.name for n in calls]
    assert [resolve_op(node.op) for node in graph.nodes] == [n.target for n in calls]
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    assert [value.placeholder for value in graph.inputs] == [n.name for n in placeholders]


def test_getitems_vanish_results_are_numbered_and_absent_ones_are_none() -> None:
    builder = Builder()
    x, w = builder.input("x", builder.fake(1, 2, 5)), builder.input("w", builder.fake(3, 2, 2))
    grad = builder.input("grad", builder.fake(1, 3, 4))
    backward = builder.call(
        torch.ops.aten.convolution_backward.default,
        (grad, x, w, [3], [1], [0], [1], False, [0], 1, [True, False, True]),
        (builder.fake(1, 2, 5), None, builder.fake(3)),
    )
    parts = [builder.call(operator.getitem, (backward, i), None) for i in range(3)]
    graph = builder.lift(*parts)
    (node,) = graph.nodes
    first, bias = node.outputs
    assert [value.name for value in node.outputs] == [f"{node.name}.0", f"{node.name}.1"]
    assert graph.outputs == (first, None, bias)
    assert result_paths(backward) == [(0,), (2,)]


def test_an_item_of_an_opaque_result_stays_a_node() -> None:
    builder = Builder()
    x = builder.input("x", builder.fake(4))
    whole = builder.graph.call_function(torch.ops.aten.split.Tensor, (x, 2))
    item = builder.call(operator.getitem, (whole, 1), builder.fake(2))
    graph = builder.lift(item)
    assert graph.node("split_tensor").output.type == OpaqueType("unknown")
    assert graph.node("getitem").op == "sym.getitem"
    assert graph.node("getitem").args == (graph.node("split_tensor").output, 1)


CPU = Device("cpu")


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (torch.empty(4, 6), TensorType(DType.F32, (4, 6), CPU)),
        (torch.empty(6, 4).t(), TensorType(DType.F32, (4, 6), CPU, (1, 4))),
        (torch.empty(3, 0, 2), TensorType(DType.F32, (3, 0, 2), CPU)),
        (torch.empty(3, 1), TensorType(DType.F32, (3, 1), CPU)),
        (torch.empty((), dtype=torch.bfloat16), TensorType(DType.BF16, (), CPU)),
        (torch.empty(2, 2, layout=torch.sparse_coo), OpaqueType("tensor.sparse_coo.float32")),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), OpaqueType("tensor.strided.float4_e2m1fn_x2")),
        (torch.Generator(), OpaqueType("Generator")),
        (None, OpaqueType("NoneType")),
        (0.5, ScalarType("float")),
        (True, ScalarType("bool")),
    ],
)
def test_types_of_inputs(value: Any, type: Type) -> None:
    builder = Builder()
    builder.input("x", value)
    (found,) = builder.lift().inputs
    assert (found.type, found.role) == (type, "scalar" if isinstance(type, ScalarType) else "input")


# -- dynamic shapes ----------------------------------------------------------------------------------------------------


def test_sizes_are_symbols_with_hints_and_arithmetic_on_them_stays_as_nodes() -> None:
    graph = lift_inference(lambda x: torch.cat([x, x.sin()])[: x.shape[0] // 2], torch.randn(6, 4), dynamic=True)
    assert sorted(graph.hints.values()) == [4, 6]
    rows, columns = next(value.type.shape for value in graph.inputs if isinstance(value.type, TensorType))
    assert {rows, columns} == {symbol(name) for name in graph.hints}
    assert graph.node("cat").output.type.shape == (2 * rows, columns)
    floordiv = next(node for node in graph.nodes if node.op == "sym.floordiv")
    assert floordiv.output.type == ScalarType("int", rows // 2)
    assert floordiv.effects == PURE


def test_unbacked_sizes_have_no_hint() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = lift_inference(lambda x: x.nonzero() * 2, torch.randn(4))
    assert graph.hints == {}
    assert str(graph.node("nonzero").output.type.shape[0]).startswith("u")


# -- roles -------------------------------------------------------------------------------------------------------------


def test_roles_of_inference() -> None:
    graph = lift_inference(Block(), torch.randn(8, 16))
    roles = [value.role for value in graph.inputs]
    assert (roles.count("input"), roles.count("parameter"), roles.count("buffer")) == (1, 6, 1)
    assert [value.static for value in graph.inputs] == [role != "input" for role in roles]


def test_roles_of_training() -> None:
    """Only what was static before is static in a backward."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    forward, backward = capture(model, torch.randn(3, 16, requires_grad=True), backward=True)
    up = forward.lift()
    backward.static_inputs = backward_static_inputs(backward.gm, up)
    down = backward.lift()
    assert (up.kind, down.kind) == ("forward", "backward")
    assert sum(value.role == "parameter" for value in up.inputs) == 4
    assert down.inputs[-1].role == "tangent"
    assert not any(value.static for value in down.inputs if value.role in ("saved", "tangent"))
    static = {value.name for value in down.inputs if value.static}
    assert static == {value.name for value in up.inputs if value.static} & {value.name for value in down.inputs}
    assert static


@pytest.mark.parametrize("passed_on", [True, False])
def test_autograd_holds_tangents_until_a_backward_returns_but_not_what_was_saved(passed_on: bool) -> None:
    """One of other strides than expected is copied, and the copy nobody holds."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    seen: list[tuple[Captured, dict[str, StorageWeakRef]]] = []

    def watched(captured: Captured, values: list[Any]) -> Any:
        names = [node.name for node in captured.gm.graph.find_nodes(op="placeholder")]
        memory = {n: StorageWeakRef(v.untyped_storage()) for n, v in zip(names, values, strict=True)}
        results = run(captured, values)
        left = {name: ref for name, ref in memory.items() if not ref.expired()}
        seen.append((captured, left))
        return results

    tangent = torch.ones(3, 4) if passed_on else torch.ones(1).expand(3, 4)
    capture(model, torch.randn(3, 16, requires_grad=True), backward=tangent, around=watched)
    (_, _), (backward, left) = seen
    graph = backward.lift()
    assert lent_inputs(graph) == {"tangents_1"}
    assert ("tangents_1" in left) is passed_on
    assert held_inputs(graph) <= set(left)
    assert "tanh" not in held_inputs(graph) | set(left)


def test_subgraphs_are_lifted_once_and_one_name_never_means_two() -> None:
    def body(op: Any) -> Any:
        builder = Builder()
        x = builder.input("x", builder.fake(4))
        return builder.module(builder.call(op, (x,), builder.fake(4)))

    outer = Builder()
    last = outer.input("a", outer.fake(4))
    holder = nn.Module()
    holder.b = body(torch.ops.aten.sin.default)
    outer.attributes["a.b"], outer.attributes["a_b"] = holder.b, body(torch.ops.aten.cos.default)
    for target in ("a.b", "a_b", "a.b"):
        ref = outer.graph.get_attr(target)
        call = outer.call(torch.ops.higher_order.invoke_subgraph, (ref, "id", last), (outer.fake(4),))
        last = outer.call(operator.getitem, (call, 0), outer.fake(4))
    graph = outer.lift(last)
    assert [sub.nodes[0].op for sub in graph.subgraphs.values()] == ["aten.sin.default", "aten.cos.default"]
    assert {sub.kind for sub in graph.subgraphs.values()} == {"subgraph"}
    first, second = (GraphRef(name) for name in graph.subgraphs)
    assert [node.args[0] for node in graph.nodes] == [first, second, first]
    assert [node.inputs for node in graph.nodes[1:]] == [node.outputs for node in graph.nodes[:-1]]


def test_what_aotautograd_never_leaves_is_refused() -> None:
    with pytest.raises(FrontendError, match="call_module"):
        lift(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), kind="inference")
    builder = Builder()
    gm = builder.module(builder.attribute("weight", torch.ones(3)))
    del gm.weight
    with pytest.raises(FrontendError, match="weight, which the module lacks"):
        lift(gm, kind="inference")
