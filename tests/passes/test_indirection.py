"""Indirection: what becomes of each value that a region reads from outside, why, and at which modelled cost."""

from __future__ import annotations

import pytest

from pygraph.ir import H200, UNKNOWN, Graph, OpaqueType, Parameter
from pygraph.passes import PassContext, PassManager
from tests.passes.build import build

CTX = PassContext("cuda", H200)


def decide(graph: Graph, region: int = 0) -> dict[str, Parameter]:
    """The parameters of ``region``, by name of the value."""
    PassManager("partitioning,indirection", check="full").run(graph, CTX)
    return {value.name: parameter for value, parameter in graph.regions[region].parameters.items()}


def decisions(graph: Graph, region: int = 0) -> dict[str, str]:
    return {name: parameter.decision for name, parameter in decide(graph, region).items()}


def test_parameters_are_what_is_read_from_outside_in_order_of_first_use() -> None:
    graph = build("a: launch y x", "b: launch a w", "u: host b", "c: launch a u z")
    assert list(decide(graph)) == ["y", "x", "w"]
    assert list(decide(graph, 1)) == ["a", "u", "z"]


def test_what_keeps_its_address_is_static() -> None:
    parameters = decide(build("a: launch x w", "b: launch a s0"))
    assert parameters["w"] == Parameter("static", "its address stays: guarded", 0.0)
    assert parameters["s0"] == Parameter("static", "scalar: part of the region's key", 0.0)
    assert parameters["x"].decision == "patched"


def test_constants_and_opaque_values_are_static() -> None:
    graph = build("a: launch x y z")
    x, y, _ = graph.inputs
    x.role = "constant"
    graph.set_type(y, OpaqueType("generator"))
    assert decisions(graph) == {"x": "static", "y": "static", "z": "patched"}


def test_few_launches_are_patched_at_their_cost() -> None:
    parameter = decide(build("a: launch x", "b: launch x", "c: launch a b"))["x"]
    assert parameter.decision == "patched"
    assert parameter.cost_us == pytest.approx(2 * H200.patch_us)
    assert parameter.reason == "patching 2 × 0.24 µs"


def test_launches_behind_views_are_counted() -> None:
    parameter = decide(build("v: view x", "w1: view v", "a: launch w1", "b: launch v", "c: launch x"))["x"]
    assert parameter.cost_us == pytest.approx(3 * H200.patch_us)


def test_unknown_launches_are_patched_at_unknown_cost() -> None:
    parameter = decide(build("a: unknown x"))["x"]
    assert parameter == Parameter("patched", "the number of launches is unknown", None)


def test_unknown_cost_of_nodes_is_not_taken_for_nothing() -> None:
    graph = build("a: launch x", "b: launch x")
    graph.set_cost(graph.node("b"), UNKNOWN)
    assert decide(graph)["x"].cost_us is None
