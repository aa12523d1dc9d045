"""Indirection: what becomes of each value that a region reads from outside, why, and at which modelled cost."""

from __future__ import annotations

import pytest

from pygraph.ir import H200, Graph, OpaqueType, Parameter
from pygraph.passes import PassContext, PassManager
from tests.passes.build import build

CTX = PassContext("cuda", H200)


def decide(graph: Graph, region: int = 0) -> dict[str, Parameter]:
    """The parameters of ``region``, by name of the value."""
    PassManager("partitioning,indirection", check="full").run(graph, CTX)
    return {value.name: parameter for value, parameter in graph.regions[region].parameters.items()}


def test_parameters_are_what_is_read_from_outside_in_order_of_first_use() -> None:
    graph = build("a: launch y x", "b: launch a w", "u: host b", "c: launch a u z")
    assert list(decide(graph)) == ["y", "x", "w"]
    assert list(decide(graph, 1)) == ["a", "u", "z"]


def test_what_keeps_its_address_is_static() -> None:
    graph = build("a: launch w s0 x y z")
    _, _, x, y, _ = graph.inputs
    x.role = "constant"
    y.type = OpaqueType("generator")
    assert [parameter.decision for parameter in decide(graph).values()] == ["static"] * 4 + ["patched"]


def test_launches_that_take_an_address_are_counted_also_behind_views() -> None:
    parameter = decide(build("v: view x", "w1: view v", "a: launch w1", "b: launch v", "c: launch x y"))["x"]
    assert parameter == Parameter("patched", "patching 3 × 0.24 µs", pytest.approx(3 * H200.patch_us))


def test_unknown_launches_are_patched_at_unknown_cost_and_spoil_what_they_touch_alone() -> None:
    parameters = decide(build("a: unknown x", "b: launch y", "c: launch x"))
    assert parameters["x"] == Parameter("patched", "the number of launches is unknown", None)
    assert parameters["y"].cost_us == pytest.approx(H200.patch_us)
