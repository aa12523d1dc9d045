"""Indirection: what becomes of each value that a region reads from outside, and why."""

from __future__ import annotations

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
