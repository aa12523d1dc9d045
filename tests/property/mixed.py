"""A strategy for graphs that mix the CPU and one GPU: factories, copies both ways, scalars, mutation, host reads."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from pygraph.ir import PURE, Arg, Device, DType, Effects, Graph, KernelNode, ScalarType, TensorType, Type, Value

__all__ = ["CPU", "CUDA", "mixed_graphs"]

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
    Kind("aten.full.default", (NUMBER,), INDEX, (), (("device", CPU),)),
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
