"""Hypothesis strategies for IR graphs, shared by all property tests.

``text_graphs`` holds anything that the Graph API can build, however senseless: for text. ``operator_graphs``
keeps the verifier's rules and has effects that matter: for orders, passes and meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
from hypothesis import strategies as st

from pygraph.ir import (
    CAPTURABLE,
    PURE,
    REASON,
    Arg,
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    GraphRef,
    KernelNode,
    Location,
    Meta,
    OpaqueType,
    Parameter,
    Region,
    ScalarType,
    Stage,
    TensorType,
    Token,
    Type,
    Value,
    canonical,
    symbol,
)
from pygraph.ir.node import RESERVED
from pygraph.ir.types import Dim

__all__ = [
    "costs",
    "devices",
    "dims",
    "effects_for",
    "literals",
    "locations",
    "metas",
    "names",
    "operator_graphs",
    "text_graphs",
    "types",
]

CPU = Device("cpu")
CUDA = Device("cuda", 0)

plain_names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
strings = st.text(st.characters(), max_size=8)
names = st.one_of(plain_names, st.sampled_from(["0", "a.0", "in", "after", "graph", "true", "f32", ""]), strings)
symbols = st.one_of(st.sampled_from(["s0", "s1", "u0"]), names).map(symbol)
devices = st.one_of(
    st.sampled_from([CPU, CUDA, Device("cuda")]),
    st.builds(Device, names, st.none() | st.integers(-3, 10**12)),
)
dtypes = st.sampled_from(DType)
integers = st.one_of(st.integers(-4, 4), st.integers())


def _functions(dims: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
    def build(make: Callable[..., object], *args: Dim) -> Dim:
        try:
            return canonical(make(*map(sympy.sympify, args)))
        except (ArithmeticError, TypeError, ValueError):
            return canonical(args[0])

    both = [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b]
    both += [sympy.Max, sympy.Min, sympy.Mod, lambda a, b: sympy.floor(a / b), lambda a, b: sympy.ceiling(a / b)]
    both += [sympy.Function("opaque"), sympy.Function("Max"), sympy.Function("odd name")]
    both += [lambda a, b: sympy.Add(a, b, evaluate=False), lambda a, b: sympy.Mul(a, b, evaluate=False)]
    one = [lambda a: -a, lambda a: a**2, lambda a: a**-1, sympy.Abs, sympy.Function("unary")]
    return st.one_of(
        st.builds(build, st.sampled_from(both), dims, dims),
        st.builds(build, st.sampled_from(one), dims),
    )


_leaf_dims = st.one_of(
    st.integers(0, 4096),
    integers,
    symbols,
    st.fractions(max_denominator=9).map(lambda f: canonical(sympy.Rational(f.numerator, f.denominator))),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(canonical),
)
dims: st.SearchStrategy[Dim] = st.recursive(_leaf_dims, _functions, max_leaves=5)
shapes = st.lists(dims, max_size=3).map(tuple)
types: st.SearchStrategy[Type] = st.one_of(
    st.builds(TensorType, dtypes, shapes, devices, st.none() | shapes),
    st.builds(ScalarType, st.sampled_from(["int", "float", "bool"]) | names, st.none() | dims),
    st.builds(OpaqueType, strings),
)
_leaf_literals: st.SearchStrategy[Arg] = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    st.complex_numbers(),
    strings,
    dims,
    dtypes,
    devices,
    st.builds(Token, names),
    st.builds(GraphRef, names),
)


def literals(values: Sequence[Value] = ()) -> st.SearchStrategy[Arg]:
    """Operands: ``values`` and literals of every kind, also in nested tuples."""
    leaves = _leaf_literals | st.sampled_from(values) if values else _leaf_literals
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


cost_fields = st.none() | dims
costs = st.builds(Cost, cost_fields, cost_fields, cost_fields, cost_fields, cost_fields)
locations = st.builds(Location, strings, st.integers(-1, 10**6), strings, strings)
_STANDARD = {"capturable", "reason", "detail", "placement", "region", "selected", "tags"}
_free_keys = names.filter(lambda name: name not in RESERVED and name not in _STANDARD)
metas = st.builds(
    lambda free, standard: Meta({**free, **standard}),
    st.dictionaries(_free_keys, literals(), max_size=2),
    st.fixed_dictionaries({}, optional={"capturable": st.booleans(), "reason": strings, "region": st.integers()}),
)
_names_of_groups = st.none() | strings


def effects_for(operands: int, results: int) -> st.SearchStrategy[Effects]:
    """Effects that name ``operands`` and ``results`` that exist."""
    positions = st.lists(st.sampled_from(range(operands)), max_size=2).map(tuple) if operands else st.just(())
    pairs = st.tuples(st.sampled_from(range(max(results, 1))), st.sampled_from(range(max(operands, 1))))
    aliases = st.lists(pairs, max_size=2).map(tuple) if operands and results else st.just(())
    flags = st.booleans()
    return st.builds(
        Effects, positions, aliases, st.none() | positions, _names_of_groups, flags, flags, _names_of_groups, flags
    )


# -- anything that has text --------------------------------------------------------------------------------------------


@st.composite
def text_graphs(draw: st.DrawFn, max_nodes: int = 5, depth: int = 1) -> Graph:
    """Any graph that the API can build: odd names, types, literals, effects, orders, regions, subgraphs."""
    graph = Graph(draw(names), draw(names), draw(st.sampled_from(Stage)))
    graph.hints = draw(st.dictionaries(names, integers, max_size=2))
    taken = draw(st.lists(names, max_size=3 + max_nodes, unique=True))
    for _ in range(draw(st.integers(0, 3))):
        name = taken.pop() if taken else None
        graph.add_input(draw(types), name, role=draw(names), static=draw(st.booleans()))
    for _ in range(draw(st.integers(0, max_nodes))):
        _draw_node(draw, graph, taken.pop() if taken else None)
    _draw_orders(draw, graph)
    graph.set_outputs(draw(st.lists(literals(list(graph.values())), max_size=3)))
    _draw_regions(draw, graph)
    if depth:
        subgraphs = st.dictionaries(names, text_graphs(max_nodes=2, depth=depth - 1), max_size=2)
        graph.subgraphs = draw(subgraphs)
    return graph


def _draw_node(draw: st.DrawFn, graph: Graph, name: str | None) -> KernelNode:
    operands = literals(list(graph.values()))
    args = draw(st.lists(operands, max_size=3))
    attrs = draw(st.dictionaries(names, operands, max_size=2))
    results = draw(st.lists(types, max_size=3))
    before = draw(st.none() | st.sampled_from(graph.nodes)) if graph.nodes else None
    node = graph.add(
        draw(names),
        args,
        results,
        attrs=attrs,
        name=name,
        cost=draw(costs),
        loc=draw(st.none() | locations),
        before=before,
        effects=draw(effects_for(3, 3)),
    )
    node.meta = draw(metas)
    return node


def _draw_orders(draw: st.DrawFn, graph: Graph) -> None:
    if len(graph.nodes) < 2:
        return
    pairs = st.lists(st.sampled_from(graph.nodes), min_size=2, max_size=2, unique_by=lambda node: node.name)
    for first, then in draw(st.lists(pairs, max_size=3)):
        graph.add_order(first, then)


def _draw_regions(draw: st.DrawFn, graph: Graph) -> None:
    values = list(graph.values())
    parameters = st.builds(Parameter, names, strings, st.none() | st.floats())
    table = st.dictionaries(st.sampled_from(values), parameters, max_size=2) if values else st.just({})
    for index in draw(st.lists(st.integers(-2, 5), max_size=2, unique=True)):
        graph.regions[index] = Region(index, draw(table), draw(metas))


# -- graphs with meaning -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A kind of operator: how many operands, results, and what it does beside computing them."""

    op: str
    operands: int
    results: int = 1
    effects: Effects = PURE


_KINDS = (
    _Kind("aten.relu.default", 1),
    _Kind("aten.add.Tensor", 2),
    _Kind("aten.var_mean.correction", 1, 2),
    _Kind("aten.view.default", 1, 1, Effects(aliases=((0, 0),), reads=())),
    _Kind("aten.split.Tensor", 1, 2, Effects(aliases=((0, 0), (1, 0)), reads=())),
    _Kind("aten.relu_.default", 1, 1, Effects(writes=(0,), aliases=((0, 0),))),
    _Kind("aten.add_.Tensor", 2, 1, Effects(writes=(0,), aliases=((0, 0),))),
    _Kind("aten.copy_.default", 2, 1, Effects(writes=(0,), aliases=((0, 0),), reads=(1,))),
    _Kind("mylib.swap_.default", 2, 0, Effects(writes=(0, 1))),
    _Kind("aten.rand_like.default", 1, 1, Effects(rng="cuda:0", reads=())),
    _Kind("aten.bernoulli.default", 1, 1, Effects(rng="cpu")),
    _Kind("_c10d_functional.all_reduce.default", 1, 1, Effects(collective="0")),
    _Kind("aten._local_scalar_dense.default", 1, 1, Effects(sync=True, dynamic=True)),
    _Kind("aten._assert_async.default", 1, 0, Effects(barrier=True)),
)


@st.composite
def operator_graphs(
    draw: st.DrawFn, max_nodes: int = 10, judged: bool = False, kinds: Sequence[_Kind] = _KINDS
) -> Graph:
    """Operators on tensors: views, mutation, random numbers, collectives, syncs and barriers, at most one device each.

    With ``judged`` each node is marked capturable or not (with a reason), at random.
    """
    graph = Graph(stage=Stage.JUDGED if judged else Stage.LIFTED)
    device = draw(st.sampled_from([CPU, CUDA]))
    tensor = TensorType(DType.F32, (symbol("s0"), 4), device)
    graph.hints["s0"] = 8
    tensors = [graph.add_input(tensor, f"x{i}") for i in range(draw(st.integers(1, 3)))]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=max_nodes)):
        node = _add_kind(draw, graph, kind, tensors, tensor)
        if judged:
            capturable = draw(st.booleans())
            node.meta.set(CAPTURABLE, capturable)
            if not capturable:
                node.meta.set(REASON, "chosen")
        tensors += [out for out in node.outputs if isinstance(out.type, TensorType)]
    for first, then in draw(st.lists(st.tuples(*[st.integers(0, max_nodes)] * 2), max_size=1)):
        if first < then < len(graph.nodes):
            graph.add_order(graph.nodes[first], graph.nodes[then])
    graph.set_outputs(draw(st.lists(st.sampled_from(tensors), max_size=3)))
    return graph


def _add_kind(draw: st.DrawFn, graph: Graph, kind: _Kind, tensors: list[Value], tensor: TensorType) -> KernelNode:
    operands = [draw(st.sampled_from(tensors)) for _ in range(kind.operands)]
    result: Type = ScalarType("float") if kind.effects.sync else tensor
    size = tensor.nbytes
    cost = Cost(0, 0, 0, 0, 0) if kind.effects.reads == () else Cost(symbol("s0") * 4, size, size, 1, 0)
    return graph.add(kind.op, operands, [result] * kind.results, effects=kind.effects, cost=cost)
