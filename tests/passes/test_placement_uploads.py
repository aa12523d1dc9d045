"""Uploads by placement: what is batched, when a value is read, and which operands are left on the CPU."""

from __future__ import annotations

import pytest

from pygraph.ir import CAPTURABLE, PLACEMENT, Device, DType, TensorType
from tests.passes.placed import COPY, CPU, GPU, place, shown


def test_scalars_parameters_and_indices_go_in_one_upload() -> None:
    graph, result = place(
        f"%d = {COPY}(%w, @cuda:0) : {GPU}",
        f"%a = aten.add.Tensor(%x, %d) : {GPU}",
        f"%b = aten.mul.Tensor(%a, %s) : {GPU}",
        f"%c = aten.index.Tensor(%b, [%i]) : {GPU}",
        f"%r = aten.mul.Tensor(%c, %s) : {GPU}",
        returns="%r",
    )
    assert shown(graph) == [
        "upload0 = upload(w, s, i) @cuda:0✗",
        "a = add(x, upload0.0) @cuda:0",
        "b = mul(a, upload0.1) @cuda:0",
        "c = index(b, upload0.2) @cuda:0",
        "r = mul(c, upload0.1) @cuda:0",
    ]
    upload = graph.node("upload0")
    assert upload.op == "pygraph.upload.default"
    assert upload.args == (graph.inputs[4:5] + graph.inputs[2:3] + graph.inputs[5:6], Device("cuda", 0))
    assert (upload.cost.read, upload.cost.written, upload.cost.launches) == (52, 52, 1)
    assert upload.meta.get(PLACEMENT) == "uploads 3 CPU tensors in one batch to cuda:0"
    assert "CPU tensors uploaded for each call: 3, in batches: 1" in result.notes


def test_a_value_that_is_written_is_uploaded_as_it_was_when_used() -> None:
    graph, _ = place(
        f"%a = aten.mul.Tensor(%x, %s) : {GPU}",
        "%v = aten.add_.Tensor(%s, 1) : f32[]@cpu !writes[0] !aliases[0:0]",
        f"%r = aten.mul.Tensor(%a, %s) : {GPU}",
        returns="%r",
    )
    assert shown(graph) == [
        "upload0 = upload(s) @cuda:0✗",
        "a = mul(x, upload0) @cuda:0",
        "v = add_(s) @cpu✗",
        "upload1 = upload(s) @cuda:0✗",
        "r = mul(a, upload1) @cuda:0",
    ]


def test_nothing_is_uploaded_across_a_barrier() -> None:
    graph, _ = place(
        f"%a = aten.relu.default(%x) : {GPU}",
        "^b = mylib.log.default() !barrier",
        f"%r = aten.mul.Tensor(%a, %s) : {GPU}",
        returns="%r",
    )
    assert [node.name for node in graph.nodes] == ["a", "b", "upload0", "r"]


def test_a_copy_into_the_device_is_captured_once_its_source_is_there() -> None:
    graph, _ = place(
        f"%a = aten.copy_.default(%x, %w) : {GPU} !reads[1] !writes[0] !aliases[0:0]",
        f"%r = aten.relu.default(%x) : {GPU}",
        returns="%r",
    )
    assert shown(graph) == ["upload0 = upload(w) @cuda:0✗", "a = copy_(x, upload0) @cuda:0", "r = relu(x) @cuda:0"]


def test_what_is_filled_and_returned_has_an_upload_of_its_own() -> None:
    """Inductor leaves out a copy within a device: the upload is what is returned."""
    graph, _ = place(
        f"%a = aten.copy.default(%x, %w) : {GPU}",
        f"%b = aten.copy.default(%y, %w) : {GPU}",
        f"%c = aten.copy.default(%y, %w) : {GPU}",
        f"%r = aten.mul.Tensor(%c, %x) : {GPU}",
        returns="%a, %b, %r",
    )
    assert shown(graph) == [
        "upload0 = upload(w, w, w) @cuda:0✗",
        "a = copy(x, upload0.0) @cuda:0",
        "b = copy(y, upload0.1) @cuda:0",
        "c = copy(y, upload0.2) @cuda:0",
        "r = mul(c, x) @cuda:0",
    ]


def test_strides_of_a_dense_tensor_are_kept() -> None:
    graph, _ = place(
        "%v = mylib.columns.default(%w) : f32[2, 2]{1, 2}@cpu",
        f"%d = {COPY}(%v, @cuda:0) : f32[2, 2]{{1, 2}}@cuda:0",
        "%r = aten.relu.default(%d) : f32[2, 2]@cuda:0",
        returns="%r",
    )
    assert graph.node("upload0").output.type == TensorType(DType.F32, (2, 2), Device("cuda", 0), (1, 2))


@pytest.mark.parametrize(
    "line",
    [
        f"%r = mylib.plan.default(%x, %i) : {GPU}",
        f"%r = hop.triton_kernel_wrapper_functional(kernel_idx = 0, kwargs = [%x, %s]) : {GPU}",
        f"%r = aten.index_fill.int_Tensor(%x, 0, %y, %s) : {GPU}",
        f"%r = aten.add.Tensor(%x, %w) : {GPU}",
        f"%r = {COPY}(%w, @cuda:1) : f32[4]@cuda:1",
        f"%r = aten.copy_.default(%w, %x) : {CPU} !reads[1] !writes[0] !aliases[0:0]",
        f"%r = aten.mul.Tensor(%x, %s) : {GPU} !sync",
        "^r = aten._foreach_copy_.default([%s], [%z]) !writes[0]",
    ],
)
def test_operands_that_must_stay_on_the_cpu_are_left_there(line: str) -> None:
    graph, result = place(f"%q = aten.mul.Tensor(%x, %y) : {GPU}", line, returns="%q" if line[0] == "^" else "%q, %r")
    assert not result.modified
    assert not graph.node("r").meta.get(CAPTURABLE)


@pytest.mark.parametrize("source", ["%w", "%p"])
def test_a_copy_that_an_explicit_order_names_stays_a_node(source: str) -> None:
    graph, _ = place(
        f"%p = aten.zeros.default([4], device = @cpu) : {CPU}",
        f"%a = aten.relu.default(%x) : {GPU}",
        f"%d = {COPY}({source}, @cuda:0) after(^a) : {GPU}",
        f"%r = aten.add.Tensor(%x, %d) : {GPU}",
        returns="%r",
    )
    assert list(graph.node("d").after) == [graph.node("a")]
    assert graph.node("d").meta.get(CAPTURABLE)
