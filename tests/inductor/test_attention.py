"""Attention that drops nothing: its random state is a constant, and it needs no generator; everything else stays."""

from __future__ import annotations

import operator as operator_module
from typing import Any

import pytest
import torch
import torch._prims.rng_prims  # registers the operators that give a generator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.inductor.rewrites import define_seeds, inputs_in_use, unwrap_idle
from pygraph.passes.legality.known import _DROPOUT_PLACES

EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def traced(operator: object, *extra: object, used: tuple[int, ...] = (0, 1, 2, 3)) -> torch.fx.GraphModule:
    """A graph that returns the results ``used`` of attention on a query of half precision."""

    def call(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = operator(q, q, q, *extra)  # type: ignore[operator]
        return tuple(results[i] for i in used)

    with FakeTensorMode():
        query = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.half)
        return make_fx(call)(query)


def returned(gm: torch.fx.GraphModule) -> tuple[torch.fx.Node, ...]:
    (values,) = gm.graph.output_node().args
    return tuple(values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operator", "extra", "used", "states"),
    [(EFFICIENT, (None, True), (0, 1, 2, 3), (2, 3)), (FLASH, (), (0, 6, 7), (1, 2))],
    ids=["efficient", "flash"],
)
def test_without_dropout_the_state_is_zero(
    operator: object, extra: tuple[object, ...], used: tuple[int, ...], states: tuple[int, ...]
) -> None:
    gm = traced(operator, *extra, used=used)
    before = returned(gm)
    assert len(define_seeds(gm)) == len(states)
    after = returned(gm)
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if position not in states:
            assert new is old
            continue
        assert (new.target, new.args) == (torch.ops.aten.full.default, (list(old.meta["val"].size()), 0))
        assert new.kwargs["dtype"] == old.meta["val"].dtype == new.meta["val"].dtype
        assert new.kwargs["device"] == gm.graph.find_nodes(op="placeholder")[0].meta["val"].device


@pytest.mark.parametrize(("extra", "used"), [((0.1,), (0, 1, 2, 3)), ((), (0,))], ids=["dropout", "unused"])
def test_state_that_is_set_or_that_nobody_uses_is_left_alone(extra: tuple[float, ...], used: tuple[int, ...]) -> None:
    gm = traced(EFFICIENT, None, True, *extra, used=used)
    code = gm.code
    assert define_seeds(gm) == []
    assert gm.code == code


# -- generators that checkpointing hands to operators which may draw ---------------------------------------------------

WITH_GENERATOR = torch.ops.higher_order.graphsafe_run_with_rng_state


def checkpointed(operator: Any, *extra: object, **named: object) -> torch.fx.GraphModule:
    """``traced``, with attention wrapped as AOTAutograd wraps it in a forward graph: the wrapper has no ``meta``."""
    gm = traced(operator, *extra, used=(0, 1))
    plain = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        generator = gm.graph.placeholder("fwd_rng_state_0")
    with gm.graph.inserting_before(plain):
        kwargs = {**plain.kwargs, **named, "rng_state": generator}
        wrapper = gm.graph.call_function(WITH_GENERATOR, (plain.target, *plain.args), kwargs)
    plain.replace_all_uses_with(wrapper)
    gm.graph.erase_node(plain)
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    ("operator", "extra", "named"),
    [
        (EFFICIENT, (None, True), {}),
        (EFFICIENT, (None, True, 0.0), {"scale": 0.5}),
        (EFFICIENT, (None, True), {"dropout_p": 0.0}),
        (FLASH, (), {}),
    ],
    ids=["efficient", "in-place", "by-name", "flash"],
)
def test_attention_without_dropout_needs_no_generator(
    operator: Any, extra: tuple[object, ...], named: dict[str, object]
) -> None:
    gm = checkpointed(operator, *extra, **named)
    (wrapper,) = gm.graph.find_nodes(op="call_function", target=WITH_GENERATOR)
    given, before = wrapper.args, [node.meta["val"] for node in returned(gm)]
    assert len(unwrap_idle(gm)) == 1
    assert not gm.graph.find_nodes(op="call_function", target=WITH_GENERATOR)
    (called,) = gm.graph.find_nodes(op="call_function", target=operator)
    assert (called.args, called.kwargs) == (given[1:], named)
    assert {item.target for item in called.users} == {operator_module.getitem}
    for old, new in zip(before, (node.meta["val"] for node in returned(gm)), strict=True):
        assert (new.shape, new.stride(), new.dtype, new.device) == (old.shape, old.stride(), old.dtype, old.device)
    assert len(called.meta["val"]) == len(operator._schema.returns)
    assert unwrap_idle(gm) == []
    # Inductor gets None for a generator that nobody takes.
    query, generator = gm.graph.find_nodes(op="placeholder")[0].meta["val"], torch.Generator()
    assert inputs_in_use(gm, (query, generator)) == [query, None]
    assert inputs_in_use(checkpointed(operator, *extra, **named), (query, generator)) == [query, generator]


@pytest.mark.parametrize(
    ("operator", "extra", "named"),
    [
        (EFFICIENT, (None, True, 0.1), {}),
        (EFFICIENT, (None, True), {"dropout_p": 0.1}),
        (lambda q, k, v: torch.ops.aten.native_dropout.default(q, 0.5, True), (), {}),
    ],
    ids=["in-place", "by-name", "other"],
)
def test_what_draws_keeps_its_generator(operator: Any, extra: tuple[object, ...], named: dict[str, object]) -> None:
    gm = checkpointed(operator, *extra, **named)
    code = gm.code
    assert unwrap_idle(gm) == []
    assert gm.code == code


# -- what torch has ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(_DROPOUT_PLACES))
def test_the_place_of_the_dropout_is_that_of_torch(name: str) -> None:
    _, base, *overload = name.split(".")
    packet = getattr(torch.ops.aten, base)
    overloads = overload or [o for o in packet.overloads() if f"{name}.{o}" not in _DROPOUT_PLACES and o != "out"]
    for one in overloads:
        names = [argument.name for argument in getattr(packet, one)._schema.arguments]
        assert names[_DROPOUT_PLACES[name]] == "dropout_p", one


def test_every_fused_attention_that_drops_out_on_a_device_is_known() -> None:
    """The others are decomposed before legality, without a device to capture on, never with dropout, or stateless."""
    drop = [s for s in torch._C._jit_get_all_schemas() if any(a.name == "dropout_p" for a in s.arguments)]
    found = {s.name.replace("::", ".") for s in drop if s.name.startswith("aten::") and "attention" in s.name}
    assert {name for name in found if "_for_cpu" not in name} - {*_DROPOUT_PLACES} <= {
        "aten._flash_attention_forward_no_dropout_inplace",
        "aten._scaled_dot_product_attention_math",
        "aten._scaled_dot_product_attention_math_for_mps",
        "aten._triton_scaled_dot_attention",
        "aten.scaled_dot_product_attention",
    }
