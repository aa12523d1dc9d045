"""The legality pass: what it writes on a graph, its notes and its option. Single rules are tested in ``test_judge``."""

from __future__ import annotations

import pytest

from pygraph.ir import CAPTURABLE, DETAIL, REASON, Device, Graph, Stage
from pygraph.ir.verify import verify
from pygraph.passes.base import PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.legality.rules import target_of
from tests.passes.judged import GPU, graph_of, subgraph


def example() -> Graph:
    return graph_of(
        f"%a = aten.mm.default(%x, %x) : {GPU}",
        f"%b = aten.mul.Tensor(%a, %s) : {GPU}",
        "%n = aten._local_scalar_dense.default(%v) : int(u1) !sync",
        "%d = sym.add(%n, 1) : int(u1 + 1)",
        "%e = aten.full.default([%d], 0.0, device = @cuda:0) : f32[u1 + 1]@cuda:0",
        f"%h = aten.mul.Tensor(%a, %k) : {GPU}",
        "%t = aten.relu.default(%e) : f32[u1 + 1]@cuda:0",
        returns="%b, %t, %h",
    )


def test_every_node_is_annotated_and_the_result_verifies() -> None:
    graph = example()
    result = Legality().run(graph, PassContext("cuda"))
    assert result.modified
    assert [(n.name, n.meta.get(CAPTURABLE), n.meta.get(REASON)) for n in graph.nodes] == [
        ("a", True, None),
        ("b", False, "cpu-scalar"),
        ("n", False, "host-read"),
        ("d", True, None),
        ("e", True, None),
        ("h", True, None),
        ("t", True, None),
    ]
    assert graph.node("a").meta.get(DETAIL) is None
    graph.stage = Stage.JUDGED
    verify(graph)


def test_notes_count_reasons_and_name_what_is_keyed_by_data() -> None:
    assert Legality().run(example(), PassContext("cuda")).notes == (
        "nodes that can be captured: 5 of 7",
        "nodes that cannot, for cpu-scalar: 1",
        "nodes that cannot, for host-read: 1",
        "d and 2 more can be captured, but replay only while a number read from data repeats",
    )


def test_judging_anew_replaces_what_was_judged_before() -> None:
    graph = graph_of(f"%a = aten.mm.default(%x, %x) : {GPU}")
    node = graph.nodes[0]
    for forbid, modified, reason in ((("aten.mm",), True, "forbidden"), ((), True, None), ((), False, None)):
        assert Legality(forbid).run(graph, PassContext("cuda")).modified is modified
        assert (node.meta.get(CAPTURABLE), node.meta.get(REASON)) == (reason is None, reason)
    assert node.meta.items() == [("capturable", True)]


@pytest.mark.parametrize("name", ["aten.mm", "aten.mm.default"])
def test_forbidden_operators_stay_out(name: str) -> None:
    graph = graph_of(f"%a = aten.mm.default(%x, %x) : {GPU}", f"%b = aten.relu.default(%a) : {GPU}")
    Legality((name,)).run(graph, PassContext("cuda"))
    assert [node.meta.get(REASON) for node in graph.nodes] == ["forbidden", None]
    assert graph.nodes[0].meta.get(DETAIL) == "aten.mm.default is named by the option 'forbid'"


def test_forbidden_operators_stay_out_of_wrappers_and_subgraphs() -> None:
    body = subgraph(f"%b = aten.mm.default(%a, %a) : {GPU}")
    graph = graph_of(
        f"%q = hop.auto_functionalized(#aten.mm.default, x = %x) : {GPU}",
        f'%r = hop.invoke_subgraph(graph @body, "name", %x) : {GPU}',
        subgraphs=body,
    )
    Legality(("aten.mm",)).run(graph, PassContext("cuda"))
    assert [node.meta.get(REASON) for node in graph.nodes] == ["forbidden", "subgraph"]


# -- the device --------------------------------------------------------------------------------------------------------


def test_the_captured_device_is_the_one_that_most_nodes_compute_on() -> None:
    graph = graph_of(
        f"%a = aten.relu.default(%x) : {GPU}",
        "%b = aten.relu.default(%y) : f32[4, 4]@cuda:1",
        "%c1 = aten.relu.default(%b) : f32[4, 4]@cuda:1",
    )
    assert target_of(graph, "cuda").device == Device("cuda", 1)
    Legality().run(graph, PassContext("cuda"))
    assert [node.meta.get(REASON) for node in graph.nodes] == ["multi-device", None, None]
