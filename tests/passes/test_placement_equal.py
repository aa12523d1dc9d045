"""Placement: CPU operators that compute the same are merged, and nothing that could be told apart."""

from __future__ import annotations

import pytest

from tests.passes.placed import CPU, GPU, place, shown


def test_a_chain_that_a_loop_repeats_is_computed_and_uploaded_once() -> None:
    lines = [
        line
        for i in range(4)
        for line in (
            f"%m{i} = aten.mul.Tensor(%s, 0.1) : f32[]@cpu",
            f"%d{i} = aten.rsub.Scalar(%m{i}, 1) : f32[]@cpu",
            f"%r{i} = aten.mul.Tensor(%x, %d{i}) : {GPU}",
        )
    ]
    graph, result = place(*lines, returns="%r0, %r1, %r2, %r3")
    assert shown(graph) == [
        "m0 = mul(s) @cpu✗",
        "d0 = rsub(m0) @cpu✗",
        "upload0 = upload(d0) @cuda:0✗",
        *(f"r{i} = mul(x, upload0) @cuda:0" for i in range(4)),
    ]
    assert "CPU nodes that computed what another one does: 6 removed" in result.notes
    assert "CPU tensors uploaded for each call: 1, in batches: 1" in result.notes
    assert result.modified


TWICE = "%a = aten.mul.Tensor(%s, 0.1) : f32[]@cpu"
RAND = f"aten.rand.default([4], device = @cpu) : {CPU}"
APART = {
    "number": (TWICE, "", "aten.mul.Tensor(%s, 0.2) : f32[]@cpu", ""),
    "operand": (TWICE, "", "aten.mul.Tensor(%t, 0.1) : f32[]@cpu", ""),
    "operator": (TWICE, "", "aten.div.Tensor(%s, 0.1) : f32[]@cpu", ""),
    "zeros": ("%a = aten.add.Tensor(%s, 0.0) : f32[]@cpu", "", "aten.add.Tensor(%s, -0.0) : f32[]@cpu", ""),
    "integer and float": ("%a = aten.add.Tensor(%s, 1) : f32[]@cpu", "", "aten.add.Tensor(%s, 1.0) : f32[]@cpu", ""),
    "integer and truth": ("%a = aten.add.Tensor(%s, 1) : f32[]@cpu", "", "aten.add.Tensor(%s, true) : f32[]@cpu", ""),
    "a barrier": (TWICE, "^n = mylib.log.default() !barrier", "aten.mul.Tensor(%s, 0.1) : f32[]@cpu", ""),
    "an operand is written": (
        TWICE,
        "%v = aten.copy_.default(%s, %t) : f32[]@cpu !reads[1] !writes[0] !aliases[0:0]",
        "aten.mul.Tensor(%s, 0.1) : f32[]@cpu",
        "",
    ),
    "written later": (
        TWICE,
        "",
        "aten.mul.Tensor(%s, 0.1) : f32[]@cpu\n"
        "%v = aten.copy_.default(%b, %t) : f32[]@cpu !reads[1] !writes[0] !aliases[0:0]",
        "",
    ),
    "returned": (TWICE, "", "aten.mul.Tensor(%s, 0.1) : f32[]@cpu", ", %a, %b"),
    "random": (f'%a = {RAND} !rng("cpu")', "", f'{RAND} !rng("cpu")', ""),
    "random, forgotten": (f"%a = {RAND}", "", RAND, ""),
}


@pytest.mark.parametrize(("first", "between", "second", "returns"), APART.values(), ids=APART)
def test_what_could_be_told_apart_stays(first: str, between: str, second: str, returns: str) -> None:
    graph, result = place(
        first,
        between,
        f"%b = {second}",
        f"%p = aten.mul.Tensor(%x, %a) : {GPU}",
        f"%q = aten.mul.Tensor(%x, %b) : {GPU}",
        returns=f"%p, %q{returns}",
    )
    assert not any("computed what" in note for note in result.notes)
    assert {"a", "b"} <= {node.name for node in graph.nodes}
