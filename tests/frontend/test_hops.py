"""Effects of higher-order operators: control flow, subgraphs, wrapped operators, Triton kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._higher_order_ops.effects
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
from torch._ops import HigherOrderOperator

from pygraph import compat
from pygraph.frontend import hops
from pygraph.ir import PURE, TAGS, Effects, GraphRef
from pygraph.ir.annotations import REASON
from pygraph.passes.base import PassContext
from pygraph.passes.legality import Legality
from tests.frontend.capture import Builder, fake, lift_inference, node_of, only

aten = torch.ops.aten
higher_order = torch.ops.higher_order


def body(build: Callable[[Builder, fx.Node, fx.Node], Any]) -> fx.GraphModule:
    """A subgraph of two tensors."""
    builder = Builder()
    x, y = builder.input("x", builder.fake(4)), builder.input("y", builder.fake(4))
    return builder.module(build(builder, x, y))


# -- control flow ------------------------------------------------------------------------------------------------------


def test_a_branch_on_a_tensor_is_decided_by_replays() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.sin() + 1, lambda v: v.cos(), (x,))

    graph = lift_inference(step, torch.randn(4))
    cond = only(graph, "hop.cond")
    assert cond.effects == PURE
    assert [arg for arg in cond.args if isinstance(arg, GraphRef)] == [GraphRef(name) for name in graph.subgraphs]
    assert [len(sub) for sub in graph.subgraphs.values()] == [2, 1]


@pytest.mark.parametrize("missing", ["symbols", "nodes"])
def test_the_host_decides_without_what_replays_need(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "symbols":
        monkeypatch.setattr(compat, "CONTROL_FLOW", False)
    monkeypatch.setattr(hops, "has_conditionals", lambda: missing != "nodes")
    builder = Builder()
    x, flag = builder.input("x", builder.fake(4, device="cuda")), builder.input("flag", builder.fake(device="cuda"))
    identity = body(lambda b, x, y: b.call(aten.sin.default, (x,), b.fake(4)))
    then, otherwise = builder.attribute("then", identity), builder.attribute("otherwise", identity)
    call = builder.call(higher_order.cond, (flag, then, otherwise, (x, x)), (builder.fake(4, device="cuda"),))
    assert builder.lift(call).nodes[0].effects == Effects(sync=True)


@pytest.mark.skipif(not hasattr(torch._higher_order_ops, "switch"), reason="torch 2.14 brings it")
def test_a_switch_on_a_tensor_is_decided_by_the_host_and_stays_outside() -> None:
    def step(x: Tensor, i: Tensor) -> Tensor:
        return torch._higher_order_ops.switch(i, (torch.sin, torch.cos, torch.exp), (x,))

    graph = lift_inference(step, torch.randn(4), torch.tensor(1))
    assert only(graph, "hop.switch").effects == Effects(sync=True)
    Legality().run(graph, PassContext("cpu"))
    assert only(graph, "hop.switch").meta.get(REASON) == "control-flow"


def test_a_branch_on_a_size_needs_no_device_value() -> None:
    builder = Builder()
    x = builder.input("x", builder.fake(4))
    flag = builder.input("flag", True)
    identity = body(lambda b, x, y: b.call(aten.sin.default, (x,), b.fake(4)))
    then, otherwise = builder.attribute("then", identity), builder.attribute("otherwise", identity)
    call = builder.call(higher_order.cond, (flag, then, otherwise, (x, x)), (builder.fake(4),))
    assert builder.lift(call).nodes[0].effects == PURE


def test_a_loop_may_return_what_it_was_given() -> None:
    def step(x: Tensor, i: Tensor) -> Any:
        return torch._higher_order_ops.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 2), (i, x))

    loop = only(lift_inference(step, torch.randn(4), torch.tensor(0)), "hop.while_loop")
    assert loop.effects == Effects(aliases=((0, 0), (1, 1)))


# -- subgraphs ---------------------------------------------------------------------------------------------------------


def adds(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, (x, y), b.fake(4))


def writes(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    view = b.call(aten.view.default, (y, [2, 2]), b.fake(2, 2))
    b.call(aten.mul_.Scalar, (view, 2), b.fake(2, 2))
    return b.call(aten.sin.default, (x,), b.fake(4))


def views(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(aten.view.default, (y, [4]), b.fake(4))


def draws_and_reads(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    b.call(aten._local_scalar_dense.default, (y,), 1)
    return b.call(aten.bernoulli.default, (x,), b.fake(4))


def does_anything(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(torch.nn.functional.relu, (x,), b.fake(4))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (adds, PURE),
        (writes, Effects(writes=(1,))),
        (views, Effects(aliases=((0, 1),))),
        (draws_and_reads, Effects(rng="cpu", sync=True)),
        (does_anything, Effects(barrier=True)),
    ],
)
def test_what_a_subgraph_does_its_caller_does(build: Callable[..., fx.Node], expected: Effects) -> None:
    node = node_of(higher_order.invoke_subgraph, body(build), "id", fake(4), fake(4), value=(fake(4),))
    assert node.effects == expected
    if build is adds:
        assert (node.cost.flops, node.cost.read, node.cost.written, node.cost.launches) == (4, 32, 16, 1)


def test_operands_that_cannot_be_matched_are_all_written() -> None:
    a, b, c = fake(4), fake(4), fake(4)
    node = node_of(higher_order.invoke_subgraph, body(writes), "id", a, b, c, value=(fake(4),))
    assert node.effects.writes == (0, 1, 2)


# -- wrapped operators -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("hops_test", "DEF") as lib:
        lib.define("bump(Tensor(a!) x, Tensor y) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
        lib.define("log(Tensor x) -> Tensor")
        yield lib


@pytest.mark.parametrize("wrapper", ["auto_functionalized", "auto_functionalized_v2"])
def test_functionalized_operators_write_nothing_but_keep_their_tags(
    library: torch.library.Library, wrapper: str
) -> None:
    x = {"_x_base_index": 0, "_all_bases": [fake(4)]} if wrapper.endswith("v2") else {"x": fake(4)}
    hop, op = getattr(higher_order, wrapper), torch.ops.hops_test.bump.default
    node = node_of(hop, op, value=(None, fake(4)), y=fake(4), **x)
    assert node.effects == Effects(rng="cpu")
    assert node.meta.get(TAGS) == "cudagraph_unsafe"


def test_operators_with_effects_keep_their_place(library: torch.library.Library) -> None:
    with_effects, op = torch._higher_order_ops.effects.with_effects, torch.ops.hops_test.log.default
    node = node_of(with_effects, fake(0), op, fake(4), value=(fake(0), fake(4)))
    assert node.effects == Effects(rng="cpu", barrier=True)


@pytest.mark.parametrize("name", ["run_and_save_rng_state", "graphsafe_run_with_rng_state"])
def test_wrapped_draws_are_draws(name: str) -> None:
    assert node_of(getattr(higher_order, name), aten.bernoulli.default, fake(4)).effects == Effects(rng="cpu")


def test_an_unknown_higher_order_operator_is_a_barrier() -> None:
    class Unknown(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("frontend_test_unknown")

        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)

    node = node_of(Unknown(), fake(4))
    assert (node.op, node.effects, node.cost.flops) == ("hop.frontend_test_unknown", Effects(barrier=True), None)


# -- Triton ------------------------------------------------------------------------------------------------------------

CALL = {"kernel_idx": 10**6, "constant_args_idx": 10**6, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}


def test_a_triton_kernel_writes_what_torch_finds_written_or_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def analysed(kernel: int, constants: int, kwargs: dict[str, Any], tma: Any) -> list[str]:
        asked.append((kernel, constants, {k: isinstance(v, Tensor) for k, v in kwargs.items()}, tma))
        return ["y"]

    kwargs = {"x": fake(4), "y": fake(4), "n": 4}
    unknown = node_of(triton_kernel_wrapper_mutation, value=(), kwargs=kwargs, **CALL)
    assert (unknown.op, unknown.effects) == ("hop.triton_kernel_wrapper_mutation", Effects(writes=(0, 1)))
    monkeypatch.setattr(hops.compat, "get_mutated_tensors", analysed)
    assert node_of(triton_kernel_wrapper_mutation, value=(), kwargs=kwargs, **CALL).effects == Effects(writes=(1,))
    assert asked == [(10**6, 10**6, {"x": True, "y": True, "n": False}, {})]


def test_a_functional_triton_kernel_is_pure_and_returns_by_name() -> None:
    builder = Builder()
    x, y = builder.input("x", builder.fake(4)), builder.input("y", builder.fake(4))
    options = {"kwargs": {"x": x, "y": y, "n": 4}, "tensors_to_clone": ["y"], **CALL}
    call = builder.call(triton_kernel_wrapper_functional, (), {"y": builder.fake(4)}, **options)
    item = builder.call(operator.getitem, (call, "y"), builder.fake(4))
    graph = builder.lift(item)
    assert graph.nodes[0].effects == PURE
    assert graph.outputs == (graph.nodes[0].output,)
