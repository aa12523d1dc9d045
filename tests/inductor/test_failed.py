"""What captures failed for, marked on the graph that is compiled again."""

from __future__ import annotations

from pygraph.inductor.decision import decide
from pygraph.inductor.failed import Failed
from pygraph.inductor.record import Made, ProgramRecord, Step
from pygraph.ir import parse
from pygraph.passes.base import PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.verdict import FAILED

TEXT = """
graph @main (%x : f32[8, 8]@cpu) {
  %mm = aten.mm.default(%x, %x) : f32[8, 8]@cpu {loc = "m.py:1"}
  %put = hop.auto_functionalized_v2(#lib.put.default, %mm) : f32[8, 8]@cpu {loc = "m.py:2"}
  %put_1 = hop.auto_functionalized_v2(#lib.put.default, %put) : f32[8, 8]@cpu {loc = "m.py:3"}
  return (%put_1)
}
"""
MADE = Made("put_default", "lib.put.default", ("put_1",))
RECORD = ProgramRecord(((Step(("buf0",), ("put_default",), True, None, (MADE,)),),), (True,))


def marked(failed: Failed, text: str = TEXT) -> dict[str, str | None]:
    graph = parse(text)
    failed.mark(graph)
    return {node.name: node.meta.get(FAILED) for node in graph.nodes}


def failing(*names: str, before: Failed | None = None, met: str = "host-read: it reads") -> Failed:
    return (before or Failed()).with_nodes(names, met, decide(parse(TEXT), "cpu", ""), RECORD)


def test_nothing_failed_at_first() -> None:
    assert not Failed()
    assert Failed().digest() == ""
    assert set(marked(Failed()).values()) == {None}


def test_a_node_of_the_graph_is_marked_alone() -> None:
    assert marked(failing("mm")) == {"mm": "host-read: it reads", "put": None, "put_1": None}


def test_of_what_inductor_made_the_sources_are_marked() -> None:
    assert marked(failing("put_default")) == {"mm": None, "put": None, "put_1": "host-read: it reads"}


def test_an_operator_that_fails_everywhere_is_marked_in_all_its_calls() -> None:
    decision = decide(parse(TEXT), "cpu", "")
    made = (MADE, Made("put_default_1", "lib.put.default", ("put",)), Made("other", "lib.other.default", ("mm",)))
    record = ProgramRecord(((Step(("buf0",), ("put_default",), True, None, made),),), (True,))
    failed = Failed().with_nodes(("put_default",), "met", decision, record, "lib.put.default")
    assert marked(failed) == {"mm": None, "put": "met", "put_1": "met"}
    assert marked(Failed().with_nodes((), "met", decision, record, "aten.mm.default"))["mm"] == "met"


def test_what_is_unknown_is_left_out() -> None:
    assert not failing("no_such_node")


def test_more_failures_change_the_digest_and_the_same_ones_do_not() -> None:
    once = failing("mm")
    again = failing("mm", before=once, met="another word for it")
    more = failing("put_default", before=once)
    assert again.digest() == once.digest() != ""
    assert again.nodes["mm"] == "host-read: it reads"
    assert more.digest() not in ("", once.digest())


def test_legality_judges_a_marked_node_by_what_was_met() -> None:
    graph = parse(TEXT)
    failing("mm").mark(graph)
    reread = parse(str(graph))
    for one in (graph, reread):
        Legality().run(one, PassContext())
        text = str(one)
        assert 'reason = "failed-capture"' in text
        assert "aten.mm.default was tried: host-read: it reads" in text
        assert text.count("failed-capture") == 1
