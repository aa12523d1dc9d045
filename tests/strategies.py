"""Strategies for anything that the Graph API can build, however senseless: for tests of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
from hypothesis import strategies as st

from pygraph.ir import (
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

__all__ = ["dims", "structure", "text_graphs"]

CPU = Device("cpu")
CUDA = Device("cuda", 0)

_ODD_NAMES = ["0", "a.0", "a.0.b", "0.weight", "a.0b.1", ".a", "in", "after", "graph", "true", "f32", ""]
plain_names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
strings = st.text(st.characters(), max_size=8)
names = st.one_of(plain_names, st.sampled_from(_ODD_NAMES), strings)
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
    st.builds(ScalarType, st.sampled_from(["int", "float", "bool"]), st.none() | dims),
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
costs = st.builds(Cost, cost_fields, cost_fields, cost_fields, cost_fields)
locations = st.builds(
    Location, strings, st.integers(-1, 10**6), strings, strings, st.lists(strings, max_size=2).map(tuple)
)
_STANDARD = {"capturable", "reason", "detail", "placement", "region", "selected", "tags", "made_from"}
_free_keys = names.filter(lambda name: name not in RESERVED and name not in _STANDARD)
metas = st.builds(
    lambda free, standard: Meta({**free, **standard}),
    st.dictionaries(_free_keys, literals(), max_size=2),
    st.fixed_dictionaries({}, optional={"capturable": st.booleans(), "reason": strings, "region": st.integers()}),
)
_names_of_groups = st.none() | strings


_positions = st.lists(st.integers(0, 2), max_size=2).map(tuple)
_pairs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=2).map(tuple)
_flags = st.booleans()
effects = st.builds(
    Effects, _positions, _pairs, st.none() | _positions, _names_of_groups, _flags, _flags, _names_of_groups, _flags
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
        placeholder = draw(st.none() | names)
        graph.add_input(draw(types), name, role=draw(names), static=draw(st.booleans()), placeholder=placeholder)
    for _ in range(draw(st.integers(0, max_nodes))):
        _draw_node(draw, graph, taken.pop() if taken else None)
    if len(graph) > 1:
        for first, then, *_ in draw(st.lists(st.permutations(graph.nodes), max_size=3)):
            graph.add_order(first, then)
    values = list(graph.values())
    graph.set_outputs(draw(st.lists(literals(values), max_size=3)))
    parameters = st.builds(Parameter, names, strings)
    table = st.dictionaries(st.sampled_from(values), parameters, max_size=2) if values else st.just({})
    for index in draw(st.lists(st.integers(-2, 5), max_size=2, unique=True)):
        graph.regions[index] = Region(draw(table), draw(metas))
    if depth:
        graph.subgraphs = draw(st.dictionaries(names, text_graphs(max_nodes=2, depth=depth - 1), max_size=2))
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
        module=draw(strings),
        before=before,
        effects=draw(effects),
    )
    node.meta = draw(metas)
    return node


def structure(graph: Graph) -> tuple[object, ...]:
    """All that a graph holds, names included, as nested tuples: what its text has to bring back."""
    nodes = []
    for node in graph.nodes:
        operands = (repr(node.args), repr(list(node.attrs.items())), tuple(before.name for before in node.after))
        said = (node.effects, node.cost, node.loc, node.module, repr(node.meta.items()))
        nodes.append((node.name, node.op, operands, tuple(out.type for out in node.outputs), said))
    regions = []
    for index, region in sorted(graph.regions.items()):
        parameters = tuple((value.name, repr(parameter)) for value, parameter in region.parameters.items())
        regions.append((index, parameters, repr(region.meta.items())))
    return (
        (graph.name, graph.kind, graph.stage, tuple(sorted(graph.hints.items()))),
        tuple((v.name, v.type, v.role, v.static, v.placeholder) for v in graph.inputs),
        (nodes, repr(graph.outputs), regions),
        tuple((name, structure(inner)) for name, inner in graph.subgraphs.items()),
    )
