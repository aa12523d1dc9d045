"""Selection: which regions the model holds worth a graph, and what it says of them."""

from __future__ import annotations

import pytest

from pygraph.ir import DETAIL, H200, REASON, SELECTED, Graph, Parameter
from pygraph.passes import PassContext, PassManager
from pygraph.passes.selection import Selection
from tests.passes.build import build

CTX = PassContext("cuda", H200)


def select(graph: Graph) -> list[tuple[bool | None, str | None]]:
    """(selected, reason) of each region."""
    PassManager("partitioning,indirection,selection", check="full").run(graph, CTX)
    return [(region.meta.get(SELECTED), region.meta.get(REASON)) for region in graph.regions.values()]


def chain(launches: int) -> Graph:
    """One region of so many launches, one input, one result."""
    rows = [f"n{i}: launch {f'n{i - 1}' if i else 'x'}" for i in range(launches)]
    return build(*rows, returns=f"n{launches - 1}")


def test_many_launches_pay() -> None:
    graph = chain(40)
    assert select(graph) == [(True, "gain")]
    patches = 2 * H200.patch_us  # the input's only user, and the result's only writer
    replay = H200.replay_us + 40 * H200.node_us + patches
    detail = f"launches before fusion: 40, uncaptured {40 * H200.launch_us:.2f} µs, replayed {replay:.2f} µs"
    assert graph.regions[0].meta.get(DETAIL) == detail


def test_patches_count() -> None:
    launches = [f"n{i}: launch {' '.join(f'x{i}_{j}' for j in range(12))}" for i in range(2)]
    graph = build(*launches, returns="n0 n1")
    assert select(graph) == [(False, "too-small")]
    assert select(build("n0: launch x", "n1: launch x", returns="n0 n1")) == [(True, "gain")]


def test_fresh_results_count_and_those_in_callers_memory_do_not_twice() -> None:
    graph = build("m: write x", "a: launch m", returns="m")
    select(graph)
    parameter = graph.regions[0].parameters[graph.value("x")]
    replay = H200.replay_us + 2 * H200.node_us + (parameter.cost_us or 0.0)
    assert f"replayed {replay:.2f} µs" in (graph.regions[0].meta.get(DETAIL) or "")


def test_an_unknown_cost_of_a_parameter_is_left_to_measurement() -> None:
    graph = chain(3)
    select(graph)
    graph.regions[0].parameters[graph.value("x")] = Parameter("patched", "another pass said so", None)
    Selection().run(graph, CTX)
    assert graph.regions[0].meta.get(DETAIL) == "the cost of patching is unknown: to be measured"


def test_each_segment_costs_a_replay_and_calls_cost_the_same_in_any_case() -> None:
    replayed: list[float] = []
    for rows in (("a: many x", "b: many a"), ("a: many x", "c: call a", "b: many c")):
        graph = build(*rows, returns="b")
        assert select(graph) == [(True, "gain")]
        detail = graph.regions[0].meta.get(DETAIL) or ""
        assert f"launches before fusion: 80, uncaptured {80 * H200.launch_us:.2f} µs" in detail
        replayed.append(float(detail.split()[-2]))
    assert replayed[1] - replayed[0] == pytest.approx(H200.replay_us)
