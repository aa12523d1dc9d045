"""Placement: CPU operators that compute the same are merged, and nothing that could be told apart."""

from __future__ import annotations

import pytest

from tests.passes.placed import CPU, GPU, place, shown

SCALED = ("%a = aten.mul.Tensor(%s, 0.1) : f32[]@cpu", "%b = aten.mul.Tensor(%s, 0.1) : f32[]@cpu")
"""Twice the same, on a scalar of the CPU."""

WRITES_S = "%w1 = aten.copy_.default(%s, %t) : f32[]@cpu !reads[1] !writes[0] !aliases[0:0]"


def merged(notes: tuple[str, ...]) -> int:
    """How many CPU operators fell away, by the pass's note."""
    (count, *_) = [int(note.split(": ")[1].split()[0]) for note in notes if "computed what" in note] or [0]
    return count


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
    assert merged(result.notes) == 6
    assert "CPU tensors uploaded for each call: 1, in batches: 1" in result.notes
    assert result.modified


@pytest.mark.parametrize(
    "other",
    [
        "aten.mul.Tensor(%s, 0.2) : f32[]@cpu",
        "aten.mul.Tensor(%t, 0.1) : f32[]@cpu",
        "aten.div.Tensor(%s, 0.1) : f32[]@cpu",
    ],
    ids=["number", "operand", "operator"],
)
def test_other_computations_stay(other: str) -> None:
    first = SCALED[0]
    uses = (f"%p = aten.mul.Tensor(%x, %a) : {GPU}", f"%q = aten.mul.Tensor(%x, %b) : {GPU}")
    graph, result = place(first, f"%b = {other}", *uses, returns="%p, %q")
    assert merged(result.notes) == 0
    assert {"a", "b"} <= {node.name for node in graph.nodes}


@pytest.mark.parametrize(("one", "other"), [("0.0", "-0.0"), ("1", "1.0"), ("1", "true")])
def test_equal_numbers_that_are_not_the_same_stay(one: str, other: str) -> None:
    graph, result = place(
        f"%a = aten.add.Tensor(%s, {one}) : f32[]@cpu",
        f"%b = aten.add.Tensor(%s, {other}) : f32[]@cpu",
        f"%p = aten.mul.Tensor(%x, %a) : {GPU}",
        f"%q = aten.mul.Tensor(%x, %b) : {GPU}",
        returns="%p, %q",
    )
    assert merged(result.notes) == 0
    assert {"a", "b"} <= {node.name for node in graph.nodes}


def test_what_is_returned_stays_memory_of_its_own() -> None:
    graph, result = place(*SCALED, f"%p = aten.mul.Tensor(%x, %a) : {GPU}", returns="%p, %a, %b")
    assert merged(result.notes) == 0
    assert {"a", "b"} <= {node.name for node in graph.nodes}


def test_what_is_written_later_stays_memory_of_its_own() -> None:
    graph, result = place(
        *SCALED,
        "%w1 = aten.copy_.default(%b, %t) : f32[]@cpu !reads[1] !writes[0] !aliases[0:0]",
        f"%p = aten.mul.Tensor(%x, %a) : {GPU}",
        f"%q = aten.mul.Tensor(%x, %w1) : {GPU}",
        returns="%p, %q",
    )
    assert merged(result.notes) == 0
    assert {"a", "b"} <= {node.name for node in graph.nodes}


@pytest.mark.parametrize(
    "between",
    [WRITES_S, "^n = mylib.log.default() !barrier"],
    ids=["an operand is written", "a barrier"],
)
def test_what_happens_in_between_may_make_a_difference(between: str) -> None:
    first, second = SCALED
    graph, result = place(
        first,
        between,
        second,
        f"%p = aten.mul.Tensor(%x, %a) : {GPU}",
        f"%q = aten.mul.Tensor(%x, %b) : {GPU}",
        returns="%p, %q",
    )
    assert merged(result.notes) == 0
    assert {"a", "b"} <= {node.name for node in graph.nodes}


@pytest.mark.parametrize("effect", ['!rng("cpu")', ""], ids=["stated", "forgotten"])
def test_random_numbers_are_drawn_as_often_as_before(effect: str) -> None:
    draws = [f"%{name} = aten.rand.default([4], device = @cpu) : {CPU} {effect}" for name in "ab"]
    copies = [f"%{new} = prims.device_put.default(%{old}, @cuda:0) : {GPU}" for new, old in ("pa", "qb")]
    graph, result = place(*draws, *copies, f"%r = aten.add.Tensor(%p, %q) : {GPU}", returns="%r")
    assert merged(result.notes) == 0
    assert {"a", "b"} <= {node.name for node in graph.nodes}
