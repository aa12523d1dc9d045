"""The rules that judge single nodes: the codes and sentences that they give, and what they must not refuse."""

from __future__ import annotations

import pytest

from pygraph.ir import REASON
from pygraph.passes.base import PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.legality.reasons import REASONS
from pygraph.passes.legality.rules import judge
from tests.passes.judged import CPU, CUDA, GPU, graph_of, judge_line, subgraph

REFUSED = [
    ("host-read", "%r = aten._local_scalar_dense.default(%v) : float !sync"),
    ("host-read", "%r = aten.equal.default(%x, %x) : bool"),
    ("host-read", "%r = mylib.waits.default(%x) : f32[4]@cuda:0 !sync"),
    ("host-read", "%r = aten.histc.default(%x, 10) : f32[10]@cuda:0"),
    ("host-read", '%r = aten.segment_reduce.default(%x, "sum", lengths = %i) : f32[4]@cuda:0'),
    ("host-read", "%r = aten.linspace.Tensor_Tensor(%v, %v, 5, device = @cuda:0) : f32[5]@cuda:0"),
    ("host-read", f"%r = aten.index_put.default(%x, [%m], %x) : {GPU} !sync"),
    ("failed-capture", f'%r = aten.mm.default(%x, %x) : {GPU} {{failed = "host-read: it reads"}}'),
    ("attention-dropout", f"%r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x, 0.1) : {GPU}"),
    (
        "attention-dropout",
        f"%r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x, dropout_p = 0.1) : {GPU}",
    ),
    (
        "attention-dropout",
        f"%r = aten._scaled_dot_product_efficient_attention.default(%x, %x, %x, None, true, 0.5) : {GPU}",
    ),
    (
        "attention-dropout",
        "%r = aten._scaled_dot_product_efficient_attention_backward.default("
        f"%x, %x, %x, %x, None, %x, %x, %i, %i, 0.1, [true, true, true, false]) : {GPU}",
    ),
    ("attention-dropout", f"%r = aten._scaled_dot_product_cudnn_attention.default(%x, %x, %x, None, true, %f) : {GPU}"),
    ("host-assert", '^e = aten._assert_scalar.default(%u, "positive")'),
    ("dynamic-shape", "%r = aten.nonzero.default(%x) : i64[u1, 2]@cuda:0"),
    ("dynamic-shape", "%r = aten.masked_select.default(%x, %m) : f32[u1]@cuda:0"),
    ("dynamic-shape", "%r = aten.index.Tensor(%x, [%m]) : f32[u1]@cuda:0 !sync !dynamic"),
    ("dynamic-shape", "%r = mylib.filter.default(%x) : f32[u1]@cuda:0 !dynamic"),
    ("cudagraph-unsafe-tag", f'%r = mylib.op.default(%x) : {GPU} {{tags = "cudagraph_unsafe,pointwise"}}'),
    ("unsafe-operator", "%r:2 = aten._linalg_eigh.default(%x) : (f32[4]@cuda:0, f32[4, 4]@cuda:0)"),
    ("unsafe-operator", "%r:2 = aten.mode.default(%x) : (f32[4]@cuda:0, i64[4]@cuda:0)"),
    ("unsafe-operator", "%r = fbgemm.dense_to_jagged.default(%x, [%i], 4) : f32[4]@cuda:0"),
    ("storage-change", f"%r = aten.set_.source_Tensor(%x, %x) : {GPU}"),
    ("storage-change", "^e = inductor.resize_storage_bytes_.default(%x, 0)"),
    ("host-code", f"%r = py.operator.truediv(%x, %x) : {GPU}"),
    ("host-code", f"%r = hop.with_effects(%o, #aten._print.default) : {GPU}"),
    ("stream-operator", "^e = streams.record_event.default(1, 2) !barrier"),
    ("barrier", "^e = mylib.log.default(%x) !barrier"),
    ("rng-state", f"%r = hop.run_and_save_rng_state(#aten.rand.default) : {GPU}"),
    ("generator-argument", f"%r = aten.rand.generator([4, 4], generator = %g, device = @cuda:0) : {GPU}"),
    ("generator-argument", f"%r = hop.graphsafe_run_with_rng_state(#aten.rand.default, rng_state = %g) : {GPU}"),
    ("opaque-operand", f"%r = mylib.script.default(%o, %x) : {GPU}"),
    ("opaque-operand", f"%r = aten.mm.default(%sp, %x) : {GPU}"),
    ("opaque-operand", f"%r = mylib.linear.default(%p, %x) : {GPU}"),
    ("collective", f'%r = _c10d_functional.all_reduce.default(%x, "sum", "0") : {GPU} !collective("0")'),
    ("collective", f'%r = mylib.reduce.default(%x) : {GPU} !collective("1")'),
    ("collective", f'%r = symm_mem.one_shot_all_reduce.default(%x, "sum", "0") : {GPU}'),
    ("unknown-higher-order", f"%r = hop.something_new(%x) : {GPU}"),
    ("stochastic", f'%r = mylib.dropout.default(%x) : {GPU} !rng("cpu")'),
    ("multi-device", f"%r = aten.add.Tensor(%x, %y) : {GPU}"),
    ("multi-device", "%r = aten.relu.default(%y) : f32[4, 4]@cuda:1"),
    ("unsupported-device", "%r = aten.rand.default([4], device = @xpu) : f32[4]@xpu"),
    ("device-copy", f"%r = prims.device_put.default(%c, @cuda:0) : {GPU}"),
    ("device-copy", "%r = aten._to_copy.default(%x, device = @cpu) : f32[4, 4]@cpu !sync"),
    ("device-copy", f"%r = aten.copy_.default(%x, %c) : {GPU} !reads[1] !writes[0] !aliases[0:0]"),
    ("device-copy", "%r = pygraph.upload.default([%c], @cuda:0) : f32[4, 4]@cuda:0"),
    ("device-copy", "%r:2 = mylib.stats.default(%x) : (f32[4, 4]@cuda:0, f32[]@cpu)"),
    ("cpu-scalar", f"%r = aten.mul.Tensor(%x, %s) : {GPU}"),
    ("cpu-operand", f"%r = aten.index.Tensor(%x, [%ci]) : {GPU}"),
    ("cpu-operand", f"%r = mylib.plan.default(%x, %c) : {GPU}"),
    ("cpu-operator", "%r = aten.relu.default(%c) : f32[4, 4]@cpu"),
    ("cpu-operator", '%r = aten.rand.default([4], device = @cpu) : f32[4]@cpu !rng("cpu")'),
]

CAPTURED = [
    f"%r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x) : {GPU}",
    f"%r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x, 0.0, true) : {GPU}",
    f"%r = aten._scaled_dot_product_efficient_attention.default(%x, %x, %x, None, true) : {GPU}",
    f"%r = aten._scaled_dot_product_cudnn_attention.default(%x, %x, %x, None, true, 0.0, true) : {GPU}",
    f"%r = aten.mm.default(%x, %x) : {GPU}",
    f"%r = mylib.pure.default(%x) : {GPU}",
    "%r = aten.view.default(%x, [16]) : f32[16]@cuda:0 !reads[] !aliases[0:0]",
    f"%r = aten.add_.Tensor(%x, %x) : {GPU} !writes[0] !aliases[0:0]",
    "%r = sym.mul(%k, 2) : int(2*s0)",
    "%r = sym.add(%u, 1) : int(u0 + 1)",
    f"%r = aten.mul.Tensor(%x, %u) : {GPU}",
    f"%r = aten.mul.Tensor(%x, %f) : {GPU}",
    "%r = aten.full.default([%u], 0.0, device = @cuda:0) : f32[u0]@cuda:0",
    f'%r = aten.rand.default([4, 4], device = @cuda:0) : {GPU} !rng("cuda:0")',
    f'%r = aten.rand.default([4, 4], device = @cuda) : {GPU} !rng("cuda")',
    f"%r = aten.index.Tensor(%x, [%i]) : {GPU}",
    f"%r = aten.index_put.default(%x, [%i], %x) : {GPU}",
    "%r = aten.histc.default(%x, 10, 0, 1) : f32[10]@cuda:0",
    '%r = aten.segment_reduce.default(%x, "sum", lengths = %i, unsafe = true) : f32[4]@cuda:0',
    "%r:2 = aten.linalg_cholesky_ex.default(%x) : (f32[4, 4]@cuda:0, i32[]@cuda:0)",
    "%r = aten._to_copy.default(%x, dtype = f16) : f16[4, 4]@cuda:0",
    f"%r = prims.device_put.default(%x, @cuda:0) : {GPU}",
    # Attention returns its random state without memory, as it does not know yet whether it is captured.
    "%r:2 = aten._scaled_dot_product_efficient_attention.default(%x, %x, %x) : (f32[4, 4]@cuda:0, i64[]@meta)",
    '^e = hop.triton_kernel_wrapper_mutation(kernel_idx = 0, kwargs = [#dict, ["p", %x]]) !writes[0]',
    f"%r = hop.auto_functionalized(#mylib.write.default, x = %x) : {GPU}",
    f"%r = hop.flex_attention(%x, %x, %x) : {GPU}",
]


@pytest.mark.parametrize(("code", "line"), REFUSED, ids=[f"{code}-{line.split()[2]}" for code, line in REFUSED])
def test_a_node_is_refused_with_a_code_and_a_sentence(code: str, line: str) -> None:
    objection = judge_line(line)
    assert objection is not None
    assert objection.code == code
    assert line.split("(")[0].split()[-1] in objection.detail or "depends on" in objection.detail


@pytest.mark.parametrize("line", CAPTURED, ids=[line.split("(")[0].split()[-1] for line in CAPTURED])
def test_a_node_is_captured(line: str) -> None:
    assert judge_line(line) is None


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (f"%r = aten.mul.Tensor(%x, %s) : {GPU}", "aten.mul.Tensor takes %s, a CPU tensor of no dimensions"),
        (
            f"%r = prims.device_put.default(%c, @cuda:0) : {GPU}",
            "prims.device_put.default copies %c from cpu to cuda:0",
        ),
        (
            f"%r = aten.copy_.default(%x, %c) : {GPU} !reads[1] !writes[0] !aliases[0:0]",
            "aten.copy_.default copies %c from cpu to cuda:0",
        ),
        (
            "%r = aten.copy_.default(%c, %x) : f32[4, 4]@cpu !reads[1] !writes[0] !aliases[0:0]",
            "aten.copy_.default copies %x from cuda:0 to cpu",
        ),
        ("%r = aten.index.Tensor(%x, [%m]) : f32[u1]@cuda:0 !dynamic", "the shape of %r depends on %x, %m"),
        (
            "%r = aten.relu.default(%y) : f32[4, 4]@cuda:1",
            "aten.relu.default has %y on cuda:1, and the graph computes on cuda:0",
        ),
        (
            f"%r = hop.auto_functionalized(#aten.nonzero.default, x = %x) : {GPU}",
            "hop.auto_functionalized runs an operator: "
            "aten.nonzero.default returns as many elements as the data says: %x",
        ),
    ],
)
def test_the_sentence_names_operator_and_operand(line: str, detail: str) -> None:
    objection = judge_line(line)
    assert objection is not None
    assert objection.detail == detail


# -- subgraphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["hop.invoke_subgraph", "hop.associative_scan", "hop.wrap"])
def test_a_subgraph_is_captured_when_its_nodes_are(op: str) -> None:
    line = f'%r = {op}(graph @body, "name", %x) : {GPU}'
    assert judge_line(line, subgraphs=subgraph(f"%b = aten.relu.default(%a) : {GPU}")) is None
    refused = judge_line(line, subgraphs=subgraph("%b = aten.nonzero.default(%a) : i64[u3, 2]@cuda:0"))
    assert refused is not None
    assert refused.code == "subgraph"
    assert refused.detail == (
        f"{op} runs %b of @body: aten.nonzero.default returns as many elements as the data says: %a"
    )


@pytest.mark.parametrize("op", ["hop.cond", "hop.while_loop", "hop.map_impl", "hop.scan"])
def test_control_flow_is_refused_whatever_its_branches(op: str) -> None:
    line = f"%r = {op}(%v, graph @body, graph @body, [%x]) : {GPU}"
    objection = judge_line(line, subgraphs=subgraph(f"%b = aten.relu.default(%a) : {GPU}"))
    assert objection is not None
    assert objection.code == "control-flow"


def test_a_missing_subgraph_is_refused() -> None:
    graph = graph_of(f'%r = hop.invoke_subgraph(graph @gone, "name", %x) : {GPU}')
    objection = judge(graph.nodes[0], CUDA)
    assert objection is not None
    assert objection.code == "subgraph"


def test_nodes_of_subgraphs_are_annotated_too() -> None:
    body = subgraph("%b = aten.relu.default(%z) : f32[4, 4]@cpu")
    graph = graph_of(f"%r = hop.cond(%v, graph @body, graph @body, [%x]) : {GPU}", subgraphs=body)
    Legality().run(graph, PassContext("cuda"))
    assert graph.subgraphs["body"].nodes[0].meta.get(REASON) == "cpu-operator"


# -- the CPU as what is captured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "%r = aten.relu.default(%c) : f32[4, 4]@cpu",
        "%r = aten.mul.Tensor(%c, %s) : f32[4, 4]@cpu",
        '%r = aten.rand.default([4], device = @cpu) : f32[4]@cpu !rng("cpu")',
        "%r:2 = aten._linalg_eigh.default(%c) : (f32[4]@cpu, f32[4, 4]@cpu)",
        "%r:2 = aten.mode.default(%c) : (f32[4]@cpu, i64[4]@cpu)",
        "%r = aten.histc.default(%c, 10) : f32[10]@cpu",
        "%r = mkldnn._linear_pointwise.default(%c, %p) : f32[4, 4]@cpu",
    ],
)
def test_what_only_a_device_waits_for_is_captured_on_the_cpu(line: str) -> None:
    assert judge_line(line, CPU) is None


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("host-read", "%r = aten._local_scalar_dense.default(%s) : float !sync"),
        ("dynamic-shape", "%r = aten.nonzero.default(%c) : i64[u1, 2]@cpu"),
        ("dynamic-shape", "%r = aten.index.Tensor(%c, [%cm]) : f32[u1]@cpu !dynamic"),
        ("unsupported-device", f"%r = aten.relu.default(%x) : {GPU}"),
        ("device-copy", "%r = prims.device_put.default(%x, @cpu) : f32[4, 4]@cpu"),
        ("collective", '%r = _c10d_functional.all_reduce.default(%c, "sum", "0") : f32[4, 4]@cpu !collective("0")'),
        ("opaque-operand", "%r = mylib.script.default(%o, %c) : f32[4, 4]@cpu"),
        ("opaque-operator", "%r = mylib.op.default(%c) : f32[4, 4]@cpu"),
        ("opaque-operator", "%r = hop.auto_functionalized(#mylib.op.default, x = %c) : f32[4, 4]@cpu"),
        ("generator-argument", "%r = aten.rand.generator([4], generator = %g) : f32[4]@cpu"),
    ],
)
def test_what_the_cpu_cannot_replay_is_refused_there(code: str, line: str) -> None:
    objection = judge_line(line, CPU)
    assert objection is not None
    assert objection.code == code


# -- constants ---------------------------------------------------------------------------------------------------------


def test_a_constant_put_on_the_device_is_captured() -> None:
    graph = graph_of(
        '%h = pygraph.constant(target = "h") : f32[4]@cpu', "%r = prims.device_put.default(%h, @cuda:0) : f32[4]@cuda:0"
    )
    assert judge(graph.nodes[1], CUDA) is None


def test_a_constant_that_is_written_is_copied() -> None:
    graph = graph_of(
        '%h = pygraph.constant(target = "h") : f32[4]@cpu',
        "%r = prims.device_put.default(%h, @cuda:0) : f32[4]@cuda:0",
        "%w = aten.add_.Tensor(%h, 1) : f32[4]@cpu !writes[0] !aliases[0:0]",
    )
    objection = judge(graph.nodes[1], CUDA)
    assert objection is not None
    assert objection.code == "device-copy"


# -- tables ------------------------------------------------------------------------------------------------------------


def test_every_code_that_rules_give_is_in_the_table() -> None:
    codes = {code for code, _ in REFUSED} | {"forbidden", "control-flow", "subgraph", "opaque-operator"}
    of_later_stages = {"no-launch", "max-regions", "not-partitioned", "unknown-node"}
    assert codes | of_later_stages == set(REASONS)
    assert not codes & of_later_stages
