"""Legality: the codes and sentences that single nodes get, what must not be refused, notes, option, subgraphs."""

from __future__ import annotations

import pytest

from pygraph.ir import CAPTURABLE, DETAIL, EAGER, REASON, Device, Graph, parse_graph
from pygraph.passes import PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.legality.reasons import REASONS
from pygraph.passes.legality.rules import Objection, Target, annotate

INPUTS = """
  %x : f32[4, 4]@cuda:0, %y : f32[4, 4]@cuda:1, %i : i64[4]@cuda:0, %m : b8[4, 4]@cuda:0, %v : f32[]@cuda:0,
  %c : f32[4, 4]@cpu, %ci : i64[4]@cpu, %cm : b8[4, 4]@cpu, %s : f32[]@cpu,
  %k : int(s0), %u : int(u0), %f : float,
  %g : opaque<"Generator">, %o : opaque<"FakeScriptObject">, %sp : opaque<"tensor.sparse_coo.float32">,
  %p : opaque<"tensor._mkldnn.float32">
"""
GPU = "f32[4, 4]@cuda:0"
CUDA, CPU = Target(Device("cuda", 0)), Target(Device("cpu"))


def graph_of(*lines: str, subgraphs: str = "", returns: str = "") -> Graph:
    """A graph of ``lines`` over INPUTS."""
    body = "\n".join(lines)
    return parse_graph(f"graph @main ({INPUTS}) {{\n{body}\nreturn ({returns})\n}}\n{subgraphs}")


def legal(graph: Graph, *forbid: str) -> list[str | None]:
    """The reason of each node after the pass."""
    Legality(forbid).run(graph, PassContext("cuda"))
    return [node.meta.get(REASON) for node in graph.nodes]


def objection_to(line: str, target: Target = CUDA) -> Objection | None:
    node = graph_of(line.replace("$T", GPU)).nodes[-1]
    annotate(node, target)
    code = node.meta.get(REASON)
    return None if code is None else Objection(code, node.meta.get(DETAIL) or "", node.meta.get(EAGER) is True)


# -- single nodes ------------------------------------------------------------------------------------------------------

ON_CUDA = """
host-read: %r = aten._local_scalar_dense.default(%v) : float !sync
host-read: %r = aten.equal.default(%x, %x) : bool
host-read: %r = mylib.waits.default(%x) : f32[4]@cuda:0 !sync
host-read: %r = aten.histc.default(%x, 10) : f32[10]@cuda:0
host-read: %r = aten.segment_reduce.default(%x, "sum", lengths = %i) : f32[4]@cuda:0
host-read: %r = aten.linspace.Tensor_Tensor(%v, %v, 5, device = @cuda:0) : f32[5]@cuda:0
host-read: %r = aten.index_put.default(%x, [%m], %x) : $T !sync
attention-dropout: %r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x, 0.1) : $T
attention-dropout: %r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x, dropout_p = 0.1) : $T
attention-dropout: %r = aten._scaled_dot_product_cudnn_attention.default(%x, %x, %x, None, true, %f) : $T
attention-dropout: %r = aten._flash_attention_backward.default(%x, %x, %x, %x, %x, %x, %i, %i, 4, 4, 0.1, true) : $T
rng-state: %r = aten._cudnn_rnn.default(%x, [%x], 1, None, %x, None, 2, 4, 0, 1, true, 0.5, true, false, [], %x) : $T
host-assert: ^e = aten._assert_scalar.default(%u, "positive")
dynamic-shape: %r = aten.nonzero.default(%x) : i64[u1, 2]@cuda:0
dynamic-shape: %r = aten.masked_select.default(%x, %m) : f32[u1]@cuda:0
dynamic-shape: %r = aten.index.Tensor(%x, [%m]) : f32[u1]@cuda:0 !sync !dynamic
dynamic-shape: %r = mylib.filter.default(%x) : f32[u1]@cuda:0 !dynamic
cudagraph-unsafe-tag: %r = mylib.op.default(%x) : $T {tags = "cudagraph_unsafe,pointwise"}
unsafe-operator: %r:2 = aten._linalg_eigh.default(%x) : (f32[4]@cuda:0, f32[4, 4]@cuda:0)
unsafe-operator: %r:2 = aten.mode.default(%x) : (f32[4]@cuda:0, i64[4]@cuda:0)
unsafe-operator: %r = fbgemm.dense_to_jagged.default(%x, [%i], 4) : f32[4]@cuda:0
storage-change: %r = aten.set_.source_Tensor(%x, %x) : $T
storage-change: ^e = inductor.resize_storage_bytes_.default(%x, 0)
host-code: %r = py.operator.truediv(%x, %x) : $T
host-code: %r = hop.with_effects(%o, #aten._print.default) : $T
stream-operator: ^e = streams.record_event.default(1, 2) !barrier
barrier: ^e = mylib.log.default(%x) !barrier
rng-state: %r = hop.run_and_save_rng_state(#aten.rand.default) : $T
generator-argument: %r = aten.rand.generator([4, 4], generator = %g, device = @cuda:0) : $T
generator-argument: %r = hop.graphsafe_run_with_rng_state(#aten.rand.default, rng_state = %g) : $T
opaque-operand: %r = mylib.script.default(%o, %x) : $T
opaque-operand: %r = aten.mm.default(%sp, %x) : $T
opaque-operand: %r = mylib.linear.default(%p, %x) : $T
collective: %r = _c10d_functional.all_reduce.default(%x, "sum", "0") : $T !collective("0")
collective: %r = mylib.reduce.default(%x) : $T !collective("1")
collective: %r = symm_mem.one_shot_all_reduce.default(%x, "sum", "0") : $T
control-flow: %r = hop.while_loop_stack_output(graph @body, graph @body, [%x]) : $T
control-flow: %r = hop.map_impl(graph @body, [%x]) : $T
control-flow: %r = hop.scan(graph @body, [%x]) : $T
subgraph: %r = hop.invoke_subgraph(graph @gone, "name", %x) : $T
unknown-higher-order: %r = hop.something_new(%x) : $T
stochastic: %r = mylib.dropout.default(%x) : $T !rng("cpu")
multi-device: %r = aten.add.Tensor(%x, %y) : $T
multi-device: %r = aten.relu.default(%y) : f32[4, 4]@cuda:1
unsupported-device: %r = aten.rand.default([4], device = @xpu) : f32[4]@xpu
device-copy: %r = prims.device_put.default(%c, @cuda:0) : $T
device-copy: %r = aten._to_copy.default(%x, device = @cpu) : f32[4, 4]@cpu !sync
device-copy: %r = aten.copy_.default(%x, %c) : $T !reads[1] !writes[0] !aliases[0:0]
device-copy: %r = pygraph.upload.default([%c], @cuda:0) : f32[4, 4]@cuda:0
device-copy: %r:2 = mylib.stats.default(%x) : (f32[4, 4]@cuda:0, f32[]@cpu)
cpu-scalar: %r = aten.mul.Tensor(%x, %s) : $T
cpu-operand: %r = aten.index.Tensor(%x, [%ci]) : $T
cpu-operand: %r = mylib.plan.default(%x, %c) : $T
cpu-operator: %r = aten.relu.default(%c) : f32[4, 4]@cpu
cpu-operator: %r = aten.rand.default([4], device = @cpu) : f32[4]@cpu !rng("cpu")
captured: %r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x) : $T
captured: %r = aten._scaled_dot_product_flash_attention.default(%x, %x, %x, 0.0, true) : $T
captured: %r:2 = aten._scaled_dot_product_efficient_attention.default(%x, %x, %x) : (f32[4, 4]@cuda:0, i64[]@meta)
captured: %r = aten._scaled_dot_product_cudnn_attention.default(%x, %x, %x, None, true, 0.0, true) : $T
captured: %r = aten.mm.default(%x, %x) : $T
captured: %r = mylib.pure.default(%x) : $T
captured: %r = aten.view.default(%x, [16]) : f32[16]@cuda:0 !reads[] !aliases[0:0]
captured: %r = aten.add_.Tensor(%x, %x) : $T !writes[0] !aliases[0:0]
captured: %r = sym.mul(%k, 2) : int(2*s0)
captured: %r = sym.add(%u, 1) : int(u0 + 1)
captured: %r = aten.mul.Tensor(%x, %u) : $T
captured: %r = aten.mul.Tensor(%x, %f) : $T
captured: %r = aten.full.default([%u], 0.0, device = @cuda:0) : f32[u0]@cuda:0
captured: %r = aten.rand.default([4, 4], device = @cuda:0) : $T !rng("cuda:0")
captured: %r = aten.rand.default([4, 4], device = @cuda) : $T !rng("cuda")
captured: %r = aten.index.Tensor(%x, [%i]) : $T
captured: %r = aten.index_put.default(%x, [%i], %x) : $T
captured: %r = aten.histc.default(%x, 10, 0, 1) : f32[10]@cuda:0
captured: %r = aten.segment_reduce.default(%x, "sum", lengths = %i, unsafe = true) : f32[4]@cuda:0
captured: %r:2 = aten.linalg_cholesky_ex.default(%x) : (f32[4, 4]@cuda:0, i32[]@cuda:0)
captured: %r = aten._to_copy.default(%x, dtype = f16) : f16[4, 4]@cuda:0
captured: %r = prims.device_put.default(%x, @cuda:0) : $T
captured: ^e = hop.triton_kernel_wrapper_mutation(kernel_idx = 0, kwargs = [#dict, ["p", %x]]) !writes[0]
captured: %r = hop.auto_functionalized(#mylib.write.default, x = %x) : $T
captured: %r = hop.flex_attention(%x, %x, %x) : $T
"""
ON_CPU = """
host-read: %r = aten._local_scalar_dense.default(%s) : float !sync
dynamic-shape: %r = aten.nonzero.default(%c) : i64[u1, 2]@cpu
dynamic-shape: %r = aten.index.Tensor(%c, [%cm]) : f32[u1]@cpu !dynamic
unsupported-device: %r = aten.relu.default(%x) : $T
device-copy: %r = prims.device_put.default(%x, @cpu) : f32[4, 4]@cpu
collective: %r = _c10d_functional.all_reduce.default(%c, "sum", "0") : f32[4, 4]@cpu !collective("0")
opaque-operand: %r = mylib.script.default(%o, %c) : f32[4, 4]@cpu
opaque-operator: %r = mylib.op.default(%c) : f32[4, 4]@cpu
opaque-operator: %r = hop.auto_functionalized(#mylib.op.default, x = %c) : f32[4, 4]@cpu
generator-argument: %r = aten.rand.generator([4], generator = %g) : f32[4]@cpu
captured: %r = aten.relu.default(%c) : f32[4, 4]@cpu
captured: %r = aten.mul.Tensor(%c, %s) : f32[4, 4]@cpu
captured: %r = aten.rand.default([4], device = @cpu) : f32[4]@cpu !rng("cpu")
captured: %r:2 = aten._linalg_eigh.default(%c) : (f32[4]@cpu, f32[4, 4]@cpu)
captured: %r:2 = aten.mode.default(%c) : (f32[4]@cpu, i64[4]@cpu)
captured: %r = aten.histc.default(%c, 10) : f32[10]@cpu
captured: %r = mkldnn._linear_pointwise.default(%c, %p) : f32[4, 4]@cpu
"""
CASES = [(target, row) for target, rows in ((CUDA, ON_CUDA), (CPU, ON_CPU)) for row in rows.strip().splitlines()]


@pytest.mark.parametrize(("target", "row"), CASES, ids=[f"{t.device.kind}-{row.partition('(')[0]}" for t, row in CASES])
def test_a_node_is_captured_or_refused_with_a_code_and_a_sentence(target: Target, row: str) -> None:
    code, _, line = row.partition(": ")
    objection = objection_to(line, target)
    assert code == (objection.code if objection else "captured")
    assert objection is None or line.partition("(")[0].split()[-1] in objection.detail or "shape" in objection.detail


def test_every_code_that_legality_gives_is_in_the_table() -> None:
    codes = {row.partition(":")[0] for _, row in CASES} - {"captured"} | {"forbidden"}
    assert codes | {"no-launch", "max-regions", "not-partitioned", "unknown-node"} == set(REASONS)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("%r = prims.device_put.default(%c, @cuda:0) : $T", "prims.device_put.default copies %c from cpu to cuda:0"),
        (
            "%r = aten.copy_.default(%c, %x) : f32[4, 4]@cpu !writes[0]",
            "aten.copy_.default copies %x from cuda:0 to cpu",
        ),
        ("%r = aten.index.Tensor(%x, [%m]) : f32[u1]@cuda:0 !dynamic", "the shape of %r depends on %x, %m"),
        (
            "%r = hop.auto_functionalized(#aten.nonzero.default, x = %x) : $T",
            "hop.auto_functionalized runs an operator: aten.nonzero.default returns as many elements as the data says",
        ),
    ],
)
def test_the_sentence_names_operator_and_operand(line: str, detail: str) -> None:
    objection = objection_to(line)
    assert objection is not None
    assert detail in objection.detail


@pytest.mark.parametrize(
    ("after", "reason"),
    [("", None), ("%w = aten.add_.Tensor(%h, 1) : f32[4]@cpu !writes[0] !aliases[0:0]", "device-copy")],
)
def test_a_constant_put_on_the_device_is_captured_unless_it_is_written(after: str, reason: str | None) -> None:
    constant = '%h = pygraph.constant(target = "h") : f32[4]@cpu'
    graph = graph_of(constant, "%r = prims.device_put.default(%h, @cuda:0) : f32[4]@cuda:0", after)
    assert legal(graph)[1] == reason


# -- the pass ----------------------------------------------------------------------------------------------------------


def test_notes_count_reasons_and_name_what_is_keyed_by_data() -> None:
    graph = graph_of(
        f"%a = aten.mm.default(%x, %x) : {GPU}",
        f"%b = aten.mul.Tensor(%a, %s) : {GPU}",
        "%n = aten._local_scalar_dense.default(%v) : int(u1) !sync",
        "%d = sym.add(%n, 1) : int(u1 + 1)",
        "%e = aten.full.default([%d], 0.0, device = @cuda:0) : f32[u1 + 1]@cuda:0",
        f"%h = aten.mul.Tensor(%a, %k) : {GPU}",
        "%t = aten.relu.default(%e) : f32[u1 + 1]@cuda:0",
    )
    assert Legality().run(graph, PassContext("cuda")).notes == (
        "nodes that can be captured: 5 of 7",
        "nodes that cannot, for cpu-scalar: 1",
        "nodes that cannot, for host-read: 1",
        "d and 2 more can be captured, but replay only while a number read from data repeats",
    )


def test_judging_anew_replaces_what_was_judged_before() -> None:
    graph = graph_of(f"%a = aten.mm.default(%x, %x) : {GPU}")
    meta = graph.nodes[0].meta
    for forbid, modified, reason in ((("aten.mm.default",), True, "forbidden"), ((), True, None), ((), False, None)):
        assert Legality(forbid).run(graph, PassContext("cuda")).modified is modified
        assert (meta.get(CAPTURABLE), meta.get(REASON)) == (reason is None, reason)
    assert meta.items() == [("capturable", True)]


@pytest.mark.parametrize("op", ["hop.invoke_subgraph", "hop.associative_scan", "hop.wrap"])
def test_a_subgraph_is_captured_when_its_nodes_are(op: str) -> None:
    body = "subgraphs {{ graph @body (%a : {0}) {{\n%b = {1}\nreturn (%b)\n}} }}"
    line = f'%r = {op}(graph @body, "name", %x) : {GPU}'
    fine = body.format(GPU, f"aten.mm.default(%a, %a) : {GPU}")
    assert legal(graph_of(line, subgraphs=fine)) == [None]
    assert legal(graph_of(line, subgraphs=fine), "aten.mm") == ["subgraph"]
    graph = graph_of(line, subgraphs=body.format(GPU, "aten.nonzero.default(%a) : i64[u3, 2]@cuda:0"))
    assert legal(graph) == ["subgraph"]
    found = f"{op} runs %b of @body: aten.nonzero.default returns as many elements as the data says: %a"
    assert graph.nodes[0].meta.get(DETAIL) == found
    assert legal(graph_of(f"%q = hop.auto_functionalized(#aten.mm.default, x = %x) : {GPU}"), "aten.mm") == [
        "forbidden"
    ]


def test_the_captured_device_is_the_one_that_most_nodes_compute_on() -> None:
    graph = graph_of(
        f"%a = aten.relu.default(%x) : {GPU}",
        "%b = aten.relu.default(%y) : f32[4, 4]@cuda:1",
        "%c1 = aten.relu.default(%b) : f32[4, 4]@cuda:1",
    )
    assert legal(graph) == ["multi-device", None, None]


CALLED = """
cudagraph-unsafe-tag: %r = mylib.op.default(%x) : $T {tags = "cudagraph_unsafe"}
forbidden: %r = mylib.forbidden.default(%x) : $T
forbidden: %r = hop.auto_functionalized(#mylib.forbidden.default, x = %x) : $T
unsafe-operator: %r:2 = aten.mode.default(%x) : (f32[4]@cuda:0, i64[4]@cuda:0)
collective: %r = _c10d_functional.all_reduce.default(%x, "sum", "0") : $T !collective("0")
collective: %r = _c10d_functional.wait_tensor.default(%x) : $T !collective("0")
"""

CUT = """
cudagraph-unsafe-tag: %r = mylib.op.default(%x) : f32[u1]@cuda:0 !dynamic {tags = "cudagraph_unsafe"}
cudagraph-unsafe-tag: %r = mylib.op.default(%x) : int {tags = "cudagraph_unsafe"}
forbidden: %r = aten.forbidden.default(%x) : $T
collective: %r = c10d.allreduce_.default(%x) : $T !collective("0")
collective: %r = symm_mem.one_shot_all_reduce.default(%x) : $T !collective("0")
unsafe-operator: %r = fbgemm.dense_to_jagged.default(%x, [%i], 4) : f32[4]@cuda:0
host-read: %r = mylib.waits.default(%x) : f32[4]@cuda:0 !sync {tags = "cudagraph_unsafe"}
barrier: ^e = mylib.log.default(%x) !barrier
"""


@pytest.mark.parametrize(
    ("row", "eager"),
    [*((row, True) for row in CALLED.strip().splitlines()), *((row, None) for row in CUT.strip().splitlines())],
)
def test_a_region_may_call_what_takes_tensors_and_returns_tensors_of_known_sizes(row: str, eager: bool | None) -> None:
    reason, _, line = row.partition(": ")
    graph = graph_of(line.replace("$T", GPU))
    found = legal(graph, "mylib.forbidden", "aten.forbidden")[-1]
    assert graph.nodes[-1].meta.get(EAGER) == eager
    assert found == reason or not eager
