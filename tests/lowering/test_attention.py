"""Random state of attention that drops nothing becomes a constant on its device; everything else stays."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.lowering.attention import define_seeds
from pygraph.passes.operators import _DROPOUT_PLACES

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


def constants(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.target is torch.ops.aten.full.default]


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
        assert new in constants(gm)
        assert new.args == (list(old.meta["val"].size()), 0)
        assert new.kwargs["dtype"] == old.meta["val"].dtype == new.meta["val"].dtype
        assert new.kwargs["device"] == gm.graph.find_nodes(op="placeholder")[0].meta["val"].device


def test_with_dropout_nothing_changes() -> None:
    gm = traced(EFFICIENT, None, True, 0.1)
    code = gm.code
    assert define_seeds(gm) == []
    assert gm.code == code


def test_state_that_nobody_uses_is_left_alone() -> None:
    gm = traced(EFFICIENT, None, True, used=(0,))
    assert define_seeds(gm) == []
    assert not constants(gm)


@pytest.mark.parametrize("name", sorted(_DROPOUT_PLACES))
def test_the_place_of_the_dropout_is_that_of_torch(name: str) -> None:
    _, base, *overload = name.split(".")
    packet = getattr(torch.ops.aten, base)
    overloads = overload or [o for o in packet.overloads() if f"{name}.{o}" not in _DROPOUT_PLACES and o != "out"]
    for one in overloads:
        names = [argument.name for argument in getattr(packet, one)._schema.arguments]
        assert names[_DROPOUT_PLACES[name]] == "dropout_p", one


def test_every_fused_attention_that_drops_out_on_a_device_is_known() -> None:
    schemas = {s.name.replace("::", ".") for s in torch._C._jit_get_all_schemas() if _drops_out(s)}
    assert {name for name in schemas if "_for_cpu" not in name} <= {*_DROPOUT_PLACES, *UNFUSED}


UNFUSED = {
    "aten._flash_attention_forward_no_dropout_inplace",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_attention_math_for_mps",
    "aten._triton_scaled_dot_attention",
    "aten.scaled_dot_product_attention",
}
"""Decomposed before legality, without a device to capture on, never with dropout, or without a state to return."""


def _drops_out(schema: object) -> bool:
    name = str(schema.name)  # type: ignore[attr-defined]
    arguments = schema.arguments  # type: ignore[attr-defined]
    return name.startswith("aten::") and "attention" in name and any(a.name == "dropout_p" for a in arguments)
