"""Placement: what moves, what is fetched last, what must stay where it is. Uploads: ``test_placement_uploads``."""

from __future__ import annotations

import pytest

from pygraph.ir import PLACEMENT, REASON, parse_graph
from pygraph.passes.placement.moves import is_exact
from tests.passes.placed import COPY, CPU, GPU, INPUTS, place, shown

# -- factories ---------------------------------------------------------------------------------------------------------


def test_the_name_of_a_twin_is_free() -> None:
    graph, result = place(
        f"%p = aten.zeros.default([4], device = @cpu) : {CPU}",
        f"%p_cuda = {COPY}(%p, @cuda:0) : {GPU}",
        f"%r = aten.add.Tensor(%x, %p_cuda) : {GPU}",
        returns="%r, %p",
    )
    assert [node.name for node in graph.nodes] == ["p", "p_cuda_", "r"]
    assert "CPU nodes moved to the device: 0, made there beside the CPU's own: 1" in result.notes
    assert "single copies to the device that fell away: 1" in result.notes


def test_copies_that_can_be_told_apart_are_no_two_copies_of_one_value_on_the_device() -> None:
    """Inductor leaves out copies within a device: of several, each would be that one value."""
    graph, _ = place(
        f"%p = aten.zeros.default([4], device = @cpu) : {CPU}",
        f"%d = {COPY}(%p, @cuda:0) : {GPU}",
        f"%e = {COPY}(%p, @cuda:0) : {GPU}",
        f"%f = {COPY}(%p, @cuda:0) : {GPU}",
        f"%g = aten.add_.Tensor(%f, %x) : {GPU} !writes[0] !aliases[0:0]",
        f"%h = {COPY}(%p, @cuda:0) : {GPU}",
        f"%c = prims.convert_element_type.default(%h, f32) : {GPU}",
        returns="%d, %e, %c",
    )
    assert shown(graph) == [
        "p = zeros() @cpu✗",
        "upload0 = upload(p, p, p) @cuda:0✗",
        "p_cuda = zeros() @cuda:0",
        "d = device_put(p_cuda) @cuda:0",
        "g = add_(upload0.1, x) @cuda:0",
        "c = convert_element_type(upload0.2) @cuda:0",
    ]
    assert [value.name for value in graph.output_values] == ["d", "upload0.0", "c"]


def test_copies_of_views_of_one_value_are_told_apart_as_well() -> None:
    graph, _ = place(
        "%p = aten.arange.default(4, device = @cpu) : i64[4]@cpu",
        "%v = aten.view.default(%p, [2, 2]) : i64[2, 2]@cpu !reads[] !aliases[0:0]",
        f"%d = {COPY}(%p, @cuda:0) : i64[4]@cuda:0",
        f"%e = {COPY}(%v, @cuda:0) : i64[2, 2]@cuda:0",
        returns="%d, %e",
    )
    assert [value.name for value in graph.output_values] == ["d", "upload0"]
    assert [node.name for node in graph.node("upload0").inputs[0].users] == ["upload0"]


def test_constants_become_constants_of_the_device() -> None:
    graph, _ = place(
        '%h = pygraph.constant(target = "h") : f32[]@cpu',
        "%l = aten.lift_fresh_copy.default(%h) : f32[]@cpu",
        f"%r = aten.mul.Tensor(%x, %l) : {GPU}",
        returns="%r",
    )
    assert shown(graph) == [
        "h = constant() @cpu✗",
        "h_cuda = device_put(h) @cuda:0",
        "l = lift_fresh_copy(h_cuda) @cuda:0",
        "r = mul(x, l) @cuda:0",
    ]


def test_sizes_that_are_read_from_data_do_not_hinder_a_factory() -> None:
    graph, result = place(
        "%n = aten._local_scalar_dense.default(%x) : int(u0) !sync",
        "%p = aten.full.default([%n], 0.5, device = @cpu) : f32[u0]@cpu",
        f"%d = {COPY}(%p, @cuda:0) : f32[u0]@cuda:0",
        "%r = aten.relu.default(%d) : f32[u0]@cuda:0",
        returns="%r",
    )
    assert shown(graph)[1:] == ["p = full(n) @cuda:0", "r = relu(p) @cuda:0"]
    assert "CPU nodes moved to the device: 1, made there beside the CPU's own: 0" in result.notes


# -- what must not move ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        [f'%p = aten.rand.default([4], device = @cpu) : {CPU} !rng("cpu")'],
        # The table alone keeps it: its author forgot the effect.
        [f"%p = aten.rand.default([4], device = @cpu) : {CPU}"],
        [f"%a = aten.arange.start_step(0.0, 1.0, 0.25, device = @cpu) : {CPU}", f"%p = aten.clone.default(%a) : {CPU}"],
        [f"%a = aten.ones.default([4], device = @cpu) : {CPU}", f"%p = aten.exp.default(%a) : {CPU}"],
        [f"%a = aten.ones.default([4], device = @cpu) : {CPU}", f"%p = aten.mul.Tensor(%a, 0.1) : {CPU}"],
        [f"%a = aten.ones.default([4], device = @cpu) : {CPU}", f"%p = aten.index.Tensor(%a, [%i]) : {CPU}"],
        [f"%p = aten.relu.default(%w) : {CPU}"],
        [f"%a = aten.ones.default([4], device = @cpu) : {CPU}", f"%p = aten.where.self(%i, %a, %w) : {CPU}"],
        [
            f"%p = aten.zeros.default([4], device = @cpu) : {CPU}",
            f"%a = aten.add_.Tensor(%p, %w) : {CPU} !writes[0] !aliases[0:0]",
        ],
        [
            f"%p = aten.zeros.default([4], device = @cpu) : {CPU}",
            f"%v = aten.view.default(%p, [4]) : {CPU} !reads[] !aliases[0:0]",
            f"%a = aten.copy_.default(%v, %w) : {CPU} !reads[1] !writes[0] !aliases[0:0]",
        ],
        [f"%p = mylib.zeros.default([4], device = @cpu) : {CPU}"],
        [f"%p = aten.zeros.default([4], device = @cpu) : {CPU} !sync"],
    ],
)
def test_what_is_not_the_same_on_the_device_is_uploaded(lines: list[str]) -> None:
    before = [line.split()[0].removeprefix("%") for line in lines]
    graph, _ = place(*lines, f"%d = {COPY}(%p, @cuda:0) : {GPU}", f"%r = aten.add.Tensor(%x, %d) : {GPU}", returns="%r")
    assert [node.name for node in graph.nodes][: len(before)] == before
    assert all("@cpu✗" in line for line in shown(graph)[: len(before)])
    assert shown(graph)[len(before) :] == ["upload0 = upload(p) @cuda:0✗", "r = add(x, upload0) @cuda:0"]


def test_what_only_the_cpu_uses_stays() -> None:
    graph, result = place(
        "%p = aten.arange.default(4, device = @cpu) : i64[4]@cpu",
        "%q = aten.add.Tensor(%p, %i) : i64[4]@cpu",
        f"%r = aten.add.Tensor(%x, %y) : {GPU}",
        returns="%q, %r",
    )
    assert not result.modified
    assert result.notes == ()
    assert shown(graph)[0] == "p = arange() @cpu✗"


def test_forbidden_nodes_are_left_alone() -> None:
    graph, _ = place(
        "%p = aten.full.default([], 1.0, device = @cpu) : f32[]@cpu",
        f"%r = aten.mul.Tensor(%x, %p) : {GPU}",
        f"%q = aten.add.Tensor(%r, %p) : {GPU}",
        returns="%q",
        forbid="aten.mul",
    )
    assert graph.node("r").meta.get(REASON) == "forbidden"
    assert shown(graph) == [
        "p = full() @cpu✗",
        "p_cuda = full() @cuda:0",
        "r = mul(x, p)" + " @cuda:0✗",
        "q = add(r, p_cuda) @cuda:0",
    ]


# -- copies to the host ------------------------------------------------------------------------------------------------


def test_copies_that_are_only_returned_come_last() -> None:
    graph, result = place(
        f"%a = aten.relu.default(%x) : {GPU}",
        f"%h = {COPY}(%a, @cpu) : {CPU} !sync",
        "%c = prims.convert_element_type.default(%h, f64) : f64[4]@cpu",
        f"%b = aten.relu.default(%a) : {GPU}",
        f"%g = {COPY}(%b, @cpu) : {CPU} !sync",
        f"%r = aten.relu.default(%b) : {GPU}",
        returns="%c, %g, %r",
    )
    assert [node.name for node in graph.nodes] == ["a", "b", "r", "h", "c", "g"]
    assert [graph.node(name).meta.get(PLACEMENT) for name in "hcg"] == ["moved to the end"] * 2 + [None]
    assert "copies to the host, and work on them, moved to the end: 2" in result.notes


@pytest.mark.parametrize(
    "last",
    [
        f"%b = aten.add_.Tensor(%a, %x) : {GPU} !writes[0] !aliases[0:0]",
        f"%b = aten.copy_.default(%w, %h) : {CPU} !reads[1] !writes[0] !aliases[0:0]",
        "%b = aten._local_scalar_dense.default(%h) : float !sync",
        "^b = mylib.log.default() !barrier",
    ],
)
def test_a_copy_that_something_waits_for_stays(last: str) -> None:
    graph, result = place(f"%a = aten.clone.default(%x) : {GPU}", f"%h = {COPY}(%a, @cpu) : {CPU}", last, returns="%h")
    assert not result.modified
    assert [node.name for node in graph.nodes] == ["a", "h", "b"]


DOUBLE = "%d = aten.full.default([4], 0.1, device = @cpu) : f64[4]@cpu"


@pytest.mark.parametrize(
    ("line", "exact"),
    [
        ("%r = aten.arange.start_step(0, %k, 2, device = @cpu) : i64[4]@cpu", True),
        ("%r = aten.arange.default(4, device = @cpu) : f32[4]@cpu", False),
        ("%r = aten.full.default([4], 1.5, device = @cpu) : f8e4m3fn[4]@cpu", True),
        ("%r = aten.randperm.default(4, device = @cpu) : i64[4]@cpu", False),
        ("%r = aten.add.Tensor(%i, 2) : i64[4]@cpu", True),
        ("%r = aten.add.Tensor(%i, 2.5) : f32[4]@cpu", False),
        ("%r = aten.lt.Scalar(%i, 2.5) : b8[4]@cpu", False),
        ("%r = aten.add.Tensor(%w, %w) : f32[4]@cpu", False),
        ("%r = aten.floor_divide.default(%i, 2) : i64[4]@cpu", True),
        ("%r = aten.floor_divide.default(%i, 0) : i64[4]@cpu", False),
        ("%r = aten.floor_divide.default(%i, %i) : i64[4]@cpu", False),
        ("%r = aten.remainder.Scalar(%i, 3) : i64[4]@cpu", True),
        ('%r = aten.div.Tensor_mode(%i, 2, rounding_mode = "trunc") : i64[4]@cpu', True),
        ("%r = aten.__lshift__.Scalar(%i, 70) : i64[4]@cpu", False),
        ("%r = prims.convert_element_type.default(%i, f32) : f32[4]@cpu", True),
        ("%r = prims.convert_element_type.default(%i, f16) : f16[4]@cpu", False),
        ("%r = prims.convert_element_type.default(%w, bf16) : bf16[4]@cpu", True),
        ("%r = prims.convert_element_type.default(%w, i64) : i64[4]@cpu", False),
        (f"{DOUBLE} %r = prims.convert_element_type.default(%d, f32) : f32[4]@cpu", True),
        (f"{DOUBLE} %r = prims.convert_element_type.default(%d, f16) : f16[4]@cpu", False),
        (f"{DOUBLE} %r = prims.convert_element_type.default(%d, bf16) : bf16[4]@cpu", False),
        ("%r = prims.convert_element_type.default(%w, f8e5m2) : f8e5m2[4]@cpu", False),
        ("%r = aten.cat.default([%w, %w]) : f32[8]@cpu", True),
        ("%r = aten.cat.default([%w, %i]) : f32[8]@cpu", False),
        ("%r = aten.cumsum.default(%i, 0) : i64[4]@cpu", True),
        ("%r = aten.cumsum.default(%w, 0) : f32[4]@cpu", False),
        ("%r = aten.gather.default(%w, 0, %i) : f32[4]@cpu", False),
    ],
)
def test_which_operators_are_exact(line: str, exact: bool) -> None:
    node = parse_graph(f"graph @main ({INPUTS}) {{ {line} return (%r) }}").node("r")
    assert is_exact(node) == exact
