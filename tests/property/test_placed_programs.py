"""Properties of placement on random graphs that mix the CPU and one GPU: the meaning stays, nothing gets worse, once is
enough."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, note, settings
from hypothesis import strategies as st

from pygraph.ir import (
    CAPTURABLE,
    PURE,
    REASON,
    Arg,
    Device,
    DType,
    Effects,
    Graph,
    KernelNode,
    ScalarType,
    TensorType,
    Type,
    Value,
)
from pygraph.ir.interp import interpret
from pygraph.passes import Pass, PassContext, PassManager
from pygraph.passes.legality.rules import annotate, target_of

CPU = Device("cpu")
CUDA = Device("cuda", 0)

F32, I64 = DType.F32, DType.I64
VECTOR, SCALAR = TensorType(F32, (4,), CPU), TensorType(F32, (), CPU)
INDEX, HALF = TensorType(I64, (4,), CPU), TensorType(DType.F16, (4,), CPU)
NUMBER = ScalarType("int")


def on(device: Device, type: TensorType) -> TensorType:
    """``type`` on ``device``."""
    return TensorType(type.dtype, type.shape, device, type.stride)


GPU_VECTOR, GPU_SCALAR = on(CUDA, VECTOR), on(CUDA, SCALAR)
IN_PLACE = Effects(writes=(0,), aliases=((0, 0),))
VIEW = Effects(aliases=((0, 0),), reads=())


@dataclass(frozen=True)
class Kind:
    """An operator: types of its operands, of its result (None: nothing), further arguments, what it does."""

    op: str
    operands: tuple[Type, ...]
    result: Type | None
    extra: tuple[Arg, ...] = ()
    attrs: tuple[tuple[str, Arg], ...] = ()
    effects: Effects = PURE


def _copy(type: TensorType, device: Device) -> Kind:
    return Kind("prims.device_put.default", (type,), on(device, type), (device,))


MAKERS = (
    Kind("aten.arange.default", (), INDEX, (4,), (("device", CPU), ("pin_memory", False))),
    Kind("aten.full.default", (), VECTOR, ((4,), 0.5), (("device", CPU),)),
    Kind("aten.full.default", (), SCALAR, ((), 2.0), (("device", CPU),)),
    Kind("aten.full.default", (NUMBER,), INDEX, (2,), (("device", CPU),)),
    Kind("pygraph.constant", (), VECTOR, (), (("target", "held"),)),
    Kind("aten.rand.default", (), VECTOR, ((4,),), (("device", CPU),), Effects(rng="cpu")),
)
HOST = (
    Kind("aten.add.Tensor", (INDEX, INDEX), INDEX),
    Kind("aten.mul.Tensor", (INDEX,), INDEX, (3,)),
    Kind("aten.index.Tensor", (VECTOR, INDEX), VECTOR),
    Kind("aten.clone.default", (VECTOR,), VECTOR),
    Kind("aten.view.default", (VECTOR,), VECTOR, ((4,),), (), VIEW),
    Kind("aten.exp.default", (VECTOR,), VECTOR),
    Kind("aten.mul.Tensor", (VECTOR, SCALAR), VECTOR),
    Kind("aten.add_.Tensor", (VECTOR, VECTOR), VECTOR, (), (), IN_PLACE),
    Kind("aten._local_scalar_dense.default", (SCALAR,), NUMBER, (), (), Effects(sync=True)),
)
COPIES = (
    _copy(VECTOR, CUDA),
    _copy(INDEX, CUDA),
    _copy(SCALAR, CUDA),
    _copy(GPU_VECTOR, CPU),
    _copy(GPU_SCALAR, CPU),
    Kind("aten._to_copy.default", (VECTOR,), on(CUDA, HALF), (), (("dtype", DType.F16), ("device", CUDA))),
    Kind("aten.copy_.default", (GPU_VECTOR, VECTOR), GPU_VECTOR, (), (), Effects((0,), ((0, 0),), (1,))),
    Kind("aten.copy_.default", (VECTOR, GPU_VECTOR), VECTOR, (), (), Effects((0,), ((0, 0),), (1,))),
    Kind("aten._local_scalar_dense.default", (GPU_VECTOR,), NUMBER, (), (), Effects(sync=True)),
)
DEVICE = (
    Kind("prims.convert_element_type.default", (GPU_VECTOR,), GPU_VECTOR, (F32,)),
    Kind("aten.add.Tensor", (GPU_VECTOR, GPU_VECTOR), GPU_VECTOR),
    Kind("aten.add.Tensor", (GPU_VECTOR, on(CUDA, HALF)), GPU_VECTOR),
    Kind("aten.mul.Tensor", (GPU_VECTOR, SCALAR), GPU_VECTOR),
    Kind("aten.mul.Tensor", (GPU_VECTOR, GPU_SCALAR), GPU_VECTOR),
    Kind("aten.mul.Tensor", (GPU_VECTOR, NUMBER), GPU_VECTOR),
    Kind("aten.index.Tensor", (GPU_VECTOR, INDEX), GPU_VECTOR),
    Kind("aten.add_.Tensor", (GPU_VECTOR, GPU_VECTOR), GPU_VECTOR, (), (), IN_PLACE),
    Kind("aten.view.default", (GPU_VECTOR,), GPU_VECTOR, ((4,),), (), VIEW),
    Kind("aten.rand.default", (), GPU_VECTOR, ((4,),), (("device", CUDA),), Effects(rng="cuda:0")),
    Kind("mylib.takes_both.default", (GPU_VECTOR, VECTOR), GPU_VECTOR),
    Kind("mylib.fills_.default", (VECTOR, GPU_VECTOR), None, (), (), Effects(writes=(0,))),
)
OTHERS = (Kind("mylib.prints.default", (), None, (), (), Effects(barrier=True)),)
_kinds = st.sampled_from([MAKERS, HOST, COPIES, COPIES, DEVICE, DEVICE, OTHERS]).flatmap(st.sampled_from)


@st.composite
def mixed_graphs(draw: st.DrawFn, max_nodes: int = 16) -> Graph:
    """Graphs at the stage of lifting, whose operands always have the right types; some returned, some repeated."""
    graph = Graph()
    graph.operators.update(kind.op for kind in (*DEVICE, *OTHERS) if kind.op.startswith("mylib."))
    types = (GPU_VECTOR, VECTOR, SCALAR, INDEX)
    pools: dict[Type, list[Value]] = {type: [graph.add_input(type, f"x{i}")] for i, type in enumerate(types)}
    size = draw(st.integers(1, max_nodes))
    for kind in draw(st.lists(_kinds, min_size=size, max_size=size)):
        if all(type in pools for type in kind.operands):
            node = _add(draw, graph, kind, pools)
            for value in node.outputs:
                pools.setdefault(value.type, []).append(value)
    if len(graph.nodes) > 1 and draw(st.integers(0, 5)) == 0:
        graph.add_order(graph.nodes[0], graph.nodes[-1])
    values = list(graph.values())
    chosen = st.lists(st.sampled_from(values[-8:]), max_size=5)
    graph.set_outputs(draw(st.one_of(chosen, chosen, st.just(values))))
    return graph


def _add(draw: st.DrawFn, graph: Graph, kind: Kind, pools: dict[Type, list[Value]]) -> KernelNode:
    # The latest values are the likeliest operands, so that chains come about.
    operands = [pools[type][-1 - draw(st.integers(0, min(3, len(pools[type]) - 1)))] for type in kind.operands]
    args: tuple[Arg, ...] = (*operands, *kind.extra)
    if kind.op == "aten.full.default" and kind.operands:
        args = ((4,), operands[0])
    if kind.op == "aten.index.Tensor":
        args = (operands[0], (operands[1],))
    results = () if kind.result is None else (kind.result,)
    return graph.add(kind.op, args, results, attrs=dict(kind.attrs), effects=kind.effects)


def run(graph: Graph, *passes: str | Pass, device: str = "cuda") -> Graph:
    """A copy after ``passes``, verified; the text goes into the report of a failure."""
    copy = graph.clone()
    PassManager(list(passes), check="full").run(copy, PassContext(device))
    note(str(copy))
    return copy


@settings(max_examples=60)
@given(mixed_graphs())
def test_the_meaning_stays_and_once_is_enough(graph: Graph) -> None:
    once = run(graph, "legality", "placement")
    assert interpret(once) == interpret(graph)
    assert [value.type for value in once.output_values] == [value.type for value in graph.output_values]
    assert run(once, "placement") == once


@settings(max_examples=60)
@given(mixed_graphs())
def test_no_further_node_is_uncapturable(graph: Graph) -> None:
    before = run(graph, "legality")
    after = run(before, "placement")
    refused = {node.name for node in before.nodes if not node.meta.get(CAPTURABLE)}
    now = [node for node in after.nodes if not node.meta.get(CAPTURABLE)]
    assert {node.name for node in now if node.op != "pygraph.upload.default"} <= refused
    assert len(now) <= len(refused)


@settings(max_examples=60)
@given(mixed_graphs())
def test_verdicts_hold_and_what_stays_blocked_could_not_be_helped(graph: Graph) -> None:
    after = run(graph, "legality", "placement")
    target = target_of(after, "cuda")
    for node in after.nodes:
        capturable, code = node.meta.get(CAPTURABLE), node.meta.get(REASON)
        annotate(node, target)
        assert (node.meta.get(CAPTURABLE), node.meta.get(REASON)) == (capturable, code)
        types = [value.type for value in (*node.inputs, *node.outputs) if isinstance(value.type, TensorType)]
        if capturable and node.op != "prims.device_put.default":
            assert CPU not in [type.device for type in types], node
        assert code != "cpu-scalar", node
        if node.op.startswith("aten.index.") and types[-1].device == CUDA:
            assert capturable


@settings(max_examples=20)
@given(mixed_graphs())
def test_nothing_happens_when_the_cpu_is_captured(graph: Graph) -> None:
    before = run(graph, "legality", device="cpu")
    after = run(before, "placement", device="cpu")
    after.stage = before.stage
    assert after == before
