"""Hypothesis strategies for graphs that the verifier accepts, with effects such as views and writes.

For your own pass and operator:

    @given(operator_graphs(kinds=(*KINDS, Kind("mylib.scale.default", operands=2))))
    def test_my_pass(graph): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from pygraph.ir import (
    CAPTURABLE,
    EAGER,
    FREE,
    PURE,
    REASON,
    Arg,
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    ScalarType,
    Stage,
    TensorType,
    Type,
    symbol,
)
from pygraph.ir.operators import listed

__all__ = ["KINDS", "Kind", "operator_graphs"]


@dataclass(frozen=True)
class Kind:
    """A kind of operator.

    With the effect ``sync``, results are floats instead of tensors. With ``reads=()``, as for a view, it costs nothing.

    Args:
        op: operator with overload
        operands: number of tensors that it takes
        results: number of results
        effects: effects besides computing the results
        literals: operands after the tensors
    """

    op: str
    operands: int
    results: int = 1
    effects: Effects = PURE
    literals: tuple[Arg, ...] = ()


KINDS = (
    Kind("aten.relu.default", 1),
    Kind("aten.add.Tensor", 2),
    Kind("aten.var_mean.correction", 1, 2),
    Kind("aten.view.default", 1, 1, Effects(aliases=((0, 0),), reads=()), ((-1, 4),)),
    Kind("aten.split.Tensor", 1, 2, Effects(aliases=((0, 0), (1, 0)), reads=()), (2, 1)),
    Kind("aten.relu_.default", 1, 1, Effects(writes=(0,), aliases=((0, 0),))),
    Kind("aten.add_.Tensor", 2, 1, Effects(writes=(0,), aliases=((0, 0),))),
    Kind("aten.copy_.default", 2, 1, Effects(writes=(0,), aliases=((0, 0),), reads=(1,))),
    Kind("mylib.swap_.default", 2, 0, Effects(writes=(0, 1))),
    Kind("aten.rand_like.default", 1, 1, Effects(rng="cuda:0", reads=())),
    Kind("aten.bernoulli.default", 1, 1, Effects(rng="cpu")),
    Kind("_c10d_functional.all_reduce.default", 1, 1, Effects(collective="0"), ("sum", "0")),
    Kind("aten._local_scalar_dense.default", 1, 1, Effects(sync=True, dynamic=True)),
    Kind("aten._assert_async.default", 1, 0, Effects(barrier=True)),
)
"""Views, in-place operators, random numbers, a collective, a sync and a barrier."""


@st.composite
def operator_graphs(draw: st.DrawFn, max_nodes: int = 10, judged: bool = False, kinds: Sequence[Kind] = KINDS) -> Graph:
    """Graphs of random operators on tensors of one type and device.

    Args:
        max_nodes: maximum number of operators in a graph
        judged: true: draw graphs at stage ``judged``, whose nodes are marked at random as capturable, as not capturable
            (with a reason), or also as ones that a region may call; false: at stage ``lifted``
        kinds: kinds of operators to draw
    """
    graph = Graph(stage=Stage.JUDGED if judged else Stage.LIFTED)
    device = draw(st.sampled_from([Device("cpu"), Device("cuda", 0)]))
    tensor = TensorType(DType.F32, (symbol("s0"), 4), device)
    graph.hints["s0"] = 8
    tensors = [graph.add_input(tensor, f"x{i}") for i in range(draw(st.integers(1, 3)))]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=max_nodes)):
        operands = [draw(st.sampled_from(tensors)) for _ in range(kind.operands)]
        result: Type = ScalarType("float") if kind.effects.sync else tensor
        cost = FREE if kind.effects.reads == () else Cost(symbol("s0") * 4, tensor.nbytes, tensor.nbytes, 1)
        args = (*operands, *kind.literals)
        node = graph.add(kind.op, args, [result] * kind.results, effects=kind.effects, cost=cost)
        if kind.op not in listed():
            graph.operators.add(kind.op)
        if judged:
            verdict = draw(st.sampled_from(["captured", "captured", "called", "outside"]))
            node.meta.set(CAPTURABLE, verdict == "captured")
            if verdict != "captured":
                node.meta.set(REASON, "chosen")
            if verdict == "called":
                node.meta.set(EAGER, True)
        tensors += [out for out in node.outputs if isinstance(out.type, TensorType)]
    for first, then in draw(st.lists(st.tuples(*[st.integers(0, max_nodes)] * 2), max_size=1)):
        if first < then < len(graph.nodes):
            graph.add_order(graph.nodes[first], graph.nodes[then])
    graph.set_outputs(draw(st.lists(st.sampled_from(tensors), max_size=3)))
    return graph
