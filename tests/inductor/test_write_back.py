"""Changes that passes make in the IR arrive in the FX graph: operands, new and removed nodes, order, fake results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.errors import VerifyError
from pygraph.frontend.lift import lift
from pygraph.inductor.write_back import fingerprint, write_back
from pygraph.ir import Device, DType, Graph, Location, ScalarType, TensorType, Type


def lifted(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, Graph, dict[str, str]]:
    """The module of ``function``, its graph, and its fingerprint before any pass."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    graph = lift(gm, kind="inference")
    return gm, graph, fingerprint(graph)


def operators(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_an_unchanged_graph_is_left_alone() -> None:
    gm, graph, before = lifted(lambda x: torch.relu(x) + 1, torch.randn(4))
    code = gm.code
    assert write_back(gm, graph, before) == []
    assert gm.code == code


def test_a_new_operator_takes_the_place_of_an_old_one() -> None:
    gm, graph, before = lifted(lambda x: torch.relu(x) + 1, torch.randn(4))
    relu = graph.nodes[0]
    tanh = graph.add("aten.tanh.default", relu.args, (relu.output.type,), name="bent", before=relu)
    graph.replace_uses(relu.output, tanh.output)
    graph.erase(relu)
    notes = write_back(gm, graph, before)
    assert notes == [
        "1 operators were made by passes",
        "1 operators were rewritten by passes",
        "1 operators were removed by passes",
    ]
    assert operators(gm) == ["aten.tanh.default", "aten.add.Tensor"]
    x = torch.randn(4)
    assert torch.equal(gm(x), torch.tanh(x) + 1)


def test_results_of_a_new_operator_with_several_are_taken_apart() -> None:
    gm, graph, before = lifted(lambda x: x.amax(1) + 1, torch.randn(4, 3))
    amax = graph.nodes[0]
    index = TensorType(DType.I64, (4,), Device("cpu"))
    pair = graph.add("aten.max.dim", (graph.inputs[0], 1), (amax.output.type, index), name="pair", before=amax)
    graph.replace_uses(amax.output, pair.outputs[0])
    graph.erase(amax)
    write_back(gm, graph, before)
    x = torch.randn(4, 3)
    assert torch.equal(gm(x), x.amax(1) + 1)
    assert "getitem" in gm.code


def test_order_is_imposed_and_results_stay_with_their_operator() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = torch.max(x, 1)
        return torch.sin(x), values, indices

    gm, graph, before = lifted(function, torch.randn(4, 3))
    assert [n.op for n in graph.nodes] == ["aten.max.dim", "aten.sin.default"]
    graph.reorder(list(reversed(graph.nodes)))
    assert write_back(gm, graph, before) == ["operators were put in the order of the regions"]
    assert operators(gm)[0] == "aten.sin.default"
    x = torch.randn(4, 3)
    assert all(torch.equal(a, b) for a, b in zip(gm(x), function(x), strict=True))


def test_a_changed_device_reaches_the_fake_results_of_all_that_follows() -> None:
    gm, graph, before = lifted(lambda x: torch.arange(4, device="cpu") * 2, torch.randn(4))
    arange = next(n for n in graph.nodes if "arange" in n.op)
    graph.set_args(arange, arange.args, {**arange.attrs, "device": Device("meta")})
    for node in graph.nodes:
        node.output.type = TensorType(DType.I64, (4,), Device("meta"))
    write_back(gm, graph, before)
    devices = [n.meta["val"].device.type for n in gm.graph.nodes if n.op == "call_function"]
    assert devices == ["meta", "meta"]


@pytest.mark.parametrize(
    "noted",
    [
        TensorType(DType.F32, (99,), Device("cpu")),
        TensorType(DType.F32, (4, 1), Device("cpu")),
        TensorType(DType.F16, (4,), Device("cpu")),
        TensorType(DType.F32, (4,), Device("cuda", 0)),
        ScalarType("float"),
    ],
)
def test_a_result_type_that_the_operator_does_not_have_is_refused(noted: Type) -> None:
    gm, graph, before = lifted(lambda x: x.amax(1) + 1, torch.randn(4, 3))
    amax, loc = graph.nodes[0], Location("net.py", 3)
    made = graph.add("aten.sum.dim_IntList", (graph.inputs[0], (1,)), (noted,), name="sum_1", loc=loc, before=amax)
    graph.replace_uses(amax.output, made.output)
    graph.erase(amax)
    with pytest.raises(
        VerifyError, match=r"aten\.sum\.dim_IntList at net\.py:3 returns f32\[4\]@cpu, and the node has "
    ) as error:
        write_back(gm, graph, before)
    assert (error.value.node, error.value.rule) == ("sum_1", "results")


def test_symbolic_sizes_agree_where_they_are_equal() -> None:
    x = torch.randn(4, 3)
    gm = make_fx(lambda x: x.amax(1) + 1, tracing_mode="symbolic")(x)
    graph = lift(gm, kind="inference")
    before, amax = fingerprint(graph), graph.nodes[0]
    made = graph.add("aten.sum.dim_IntList", (graph.inputs[0], (1,)), (amax.output.type,), name="sum_1", before=amax)
    graph.replace_uses(amax.output, made.output)
    graph.erase(amax)
    write_back(gm, graph, before)
    assert torch.equal(gm(x), x.sum(1) + 1)


def test_a_changed_return_is_written() -> None:
    gm, graph, before = lifted(lambda x: (torch.sin(x), torch.cos(x)), torch.randn(4))
    graph.set_outputs(tuple(reversed(graph.outputs)))
    assert write_back(gm, graph, before) == ["what the graph returns was rewritten"]
    x = torch.randn(4)
    assert all(torch.equal(a, b) for a, b in zip(gm(x), (torch.cos(x), torch.sin(x)), strict=True))


def test_a_constant_is_moved_once_and_not_by_each_call() -> None:
    gm, graph, before = lifted(
        lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([1.0, 2.0, 3.0]), torch.randn(3)
    )
    constants = [node for node in graph.nodes if node.op == "pygraph.constant"]
    for constant in constants:
        (lift_node,) = [user for user in constant.output.users if user.op.startswith("aten.lift_fresh")]
        moved = graph.add(
            "prims.device_put.default",
            (constant.output, Device("cpu")),
            (constant.output.type,),
            name=f"{constant.name}_there",
            before=lift_node,
        )
        graph.replace_uses(lift_node.output, moved.output)
        graph.erase(lift_node)
    write_back(gm, graph, before)
    assert "prims.device_put.default" not in operators(gm)
    assert operators(gm).count("aten.lift_fresh_copy.default") == len(constants) == 2
    x = torch.randn(3)
    expected = x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(torch._inductor.compile(gm, [x])(x), expected)
