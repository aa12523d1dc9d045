"""Properties of placement on random graphs of two devices: the meaning stays, nothing gets worse, once is enough."""

from __future__ import annotations

from hypothesis import given, note, settings
from hypothesis import strategies as st

from pygraph.ir import CAPTURABLE, REASON, Graph, Stage, TensorType
from pygraph.ir.interp import interpret
from pygraph.ir.verify import verify
from pygraph.passes.base import PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.legality.rules import judge, target_of
from pygraph.passes.placement import Placement
from tests.property.mixed import CPU, CUDA, mixed_graphs

CONTEXT = PassContext("cuda")


def judged(graph: Graph) -> Graph:
    """A judged copy of ``graph``; the text goes into the report of a failure."""
    copy = graph.clone()
    Legality().run(copy, CONTEXT)
    copy.stage = Stage.JUDGED
    verify(copy)
    note(str(copy))
    return copy


def placed(graph: Graph, floating: bool = False) -> Graph:
    """A placed copy of a judged ``graph``."""
    copy = graph.clone()
    Placement(floating).run(copy, CONTEXT)
    copy.stage = Stage.PLACED
    note(str(copy))
    verify(copy)
    return copy


@settings(deadline=None, max_examples=120)
@given(mixed_graphs(), st.booleans())
def test_the_meaning_stays(graph: Graph, floating: bool) -> None:
    before = judged(graph)
    after = placed(before, floating)
    assert interpret(after) == interpret(before)
    assert [value.type for value in after.output_values] == [value.type for value in before.output_values]


@settings(deadline=None, max_examples=60)
@given(mixed_graphs())
def test_no_further_node_is_uncapturable(graph: Graph) -> None:
    before = judged(graph)
    after = placed(before)
    refused = {node.name for node in before.nodes if not node.meta.get(CAPTURABLE)}
    now = [node for node in after.nodes if not node.meta.get(CAPTURABLE)]
    assert {node.name for node in now if node.op != "pygraph.upload.default"} <= refused
    assert len(now) <= len(refused)


@settings(deadline=None, max_examples=60)
@given(mixed_graphs())
def test_verdicts_are_those_of_the_judge(graph: Graph) -> None:
    after = placed(judged(graph))
    target = target_of(after, "cuda")
    for node in after.nodes:
        objection = judge(node, target)
        code = None if objection is None else objection.code
        assert (node.meta.get(CAPTURABLE), node.meta.get(REASON)) == (objection is None, code)


@settings(deadline=None, max_examples=60)
@given(mixed_graphs())
def test_captured_nodes_touch_no_cpu_tensor(graph: Graph) -> None:
    after = placed(judged(graph))
    for node in after.nodes:
        if node.meta.get(CAPTURABLE) and node.op != "prims.device_put.default":
            devices = [
                value.type.device for value in (*node.inputs, *node.outputs) if isinstance(value.type, TensorType)
            ]
            assert CPU not in devices, node


@settings(deadline=None, max_examples=60)
@given(mixed_graphs())
def test_what_stays_blocked_could_not_be_helped(graph: Graph) -> None:
    for node in placed(judged(graph)).nodes:
        assert node.meta.get(REASON) != "cpu-scalar", node
        if node.op.startswith("aten.index.") and node.outputs[0].type.device == CUDA:  # type: ignore[union-attr]
            assert node.meta.get(CAPTURABLE)


@settings(deadline=None, max_examples=60)
@given(mixed_graphs())
def test_once_is_enough(graph: Graph) -> None:
    once = placed(judged(graph))
    again = once.clone()
    result = Placement().run(again, CONTEXT)
    assert not result.modified
    assert again == once


@settings(deadline=None, max_examples=40)
@given(mixed_graphs())
def test_it_says_whether_it_changed_anything(graph: Graph) -> None:
    before = judged(graph)
    after = before.clone()
    assert Placement().run(after, CONTEXT).modified == (after != before)


@settings(deadline=None, max_examples=20)
@given(mixed_graphs())
def test_nothing_happens_when_the_cpu_is_captured(graph: Graph) -> None:
    host = PassContext("cpu")
    before = graph.clone()
    Legality().run(before, host)
    after = before.clone()
    assert not Placement().run(after, host).modified
    assert after == before
