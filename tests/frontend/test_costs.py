"""Bytes, launches and flops of operators that are no products; views are free, unknown operators unknown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.frontend import cost_of
from pygraph.ir import FREE, UNKNOWN, Cost, Graph, symbol
from tests.frontend.capture import Builder, lift_inference

aten = torch.ops.aten
prims = torch.ops.prims


def cost(op: Any, *args: Any, result: Any = (), dtype: torch.dtype = torch.float32, **kwargs: Any) -> Cost:
    """The cost of ``op``; tuples among its arguments are shapes of tensors, tensors are what they are."""
    builder = Builder()
    nodes = [_node(builder, i, arg) for i, arg in enumerate(args)]
    builder.call(op, tuple(nodes), _value(builder, result, dtype), **kwargs)
    return builder.lift().nodes[0].cost


def _node(builder: Builder, index: int, arg: Any) -> Any:
    if isinstance(arg, list) and arg and isinstance(arg[0], (tuple, torch.Tensor)):
        return [_node(builder, 10 * (index + 1) + i, item) for i, item in enumerate(arg)]
    if isinstance(arg, tuple):
        return builder.input(f"x{index}", builder.fake(*arg))
    return builder.input(f"x{index}", arg) if isinstance(arg, torch.Tensor) else arg


def _value(builder: Builder, result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, list):
        return tuple(builder.fake(*shape, dtype=dtype) for shape in result)
    return builder.fake(*result, dtype=dtype)


def ints(*size: int) -> torch.Tensor:
    return Builder().fake(*size, dtype=torch.int64)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (cost(aten.add.Tensor, (4, 5), (5,), result=(4, 5)), Cost(20, 100, 80, 1, 0)),
        (cost(aten.relu.default, (4, 5), result=(4, 5)), Cost(20, 80, 80, 1, 0)),
        (cost(aten.relu_.default, (4, 5), result=(4, 5)), Cost(20, 80, 80, 1, 0)),
        (cost(aten.sum.dim_IntList, (4, 5), [1], result=(4,)), Cost(20, 80, 16, 1, 0)),
        (cost(aten.var_mean.correction, (4, 5), [1], result=[(4,), (4,)]), Cost(80, 80, 32, 1, 0)),
        (cost(aten._softmax.default, (4, 5), 1, False, result=(4, 5)), Cost(100, 80, 80, 1, 0)),
        (cost(aten.where.self, ints(4), (4,), (4,), result=(4,)), Cost(0, 64, 16, 1, 0)),
        (
            cost(prims.convert_element_type.default, (4,), torch.float64, result=(4,), dtype=torch.float64),
            Cost(0, 16, 32, 1, 0),
        ),
    ],
    ids=["add", "relu", "relu_", "sum", "var_mean", "softmax", "where", "convert"],
)
def test_plain_traffic(found: Cost, expected: Cost) -> None:
    assert found == expected


def test_an_operand_used_twice_is_read_once() -> None:
    assert lift_inference(lambda x: x * x, torch.randn(4)).node("mul").cost.read == 16


def test_memory_that_strides_repeat_counts_once() -> None:
    builder = Builder()
    spread = builder.input("spread", builder.fake(5).expand(1000, 5))
    windows = builder.input("windows", builder.fake(10).unfold(0, 4, 1))
    builder.call(aten.neg.default, (spread,), builder.fake(1000, 5))
    builder.call(aten.neg.default, (windows,), builder.fake(7, 4))
    first, second = builder.lift().nodes
    assert first.cost == Cost(5000, 20, 20000, 1, 0)
    assert second.cost == Cost(28, 40, 112, 1, 0)


def test_gaps_between_elements_are_not_read() -> None:
    builder = Builder()
    column = builder.input("column", builder.fake(100, 100)[:, 0])
    builder.call(aten.neg.default, (column,), builder.fake(100))
    assert builder.lift().nodes[0].cost.read == 400


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.view.default, ((4, 5), [20])),
        (aten.permute.default, ((4, 5), [1, 0])),
        (aten._unsafe_view.default, ((4, 5), [20])),
        (aten.expand.default, ((1, 5), [4, 5])),
        (aten.slice.Tensor, ((4, 5), 0, 0, 2)),
        (aten.sym_size.int, ((4, 5), 0)),
        (aten.empty.memory_format, ([4, 5],)),
    ],
    ids=str,
)
def test_nothing_runs_for_views_and_sizes(op: Any, args: tuple[Any, ...]) -> None:
    assert cost(op, *args, result=(20,)) == FREE


def test_sizes_of_symbols_are_free() -> None:
    graph = lift_inference(lambda x: x[: x.shape[0] // 2].relu(), torch.randn(6, 4), dynamic=True)
    assert all(node.cost == FREE for node in graph.nodes if node.op.startswith("sym."))


def test_costs_of_dynamic_sizes_are_symbolic() -> None:
    graph = lift_inference(lambda x: x.relu(), torch.randn(6, 4), dynamic=True)
    rows, columns = (symbol(name) for name, hint in sorted(graph.hints.items(), key=lambda item: -item[1]))
    found = graph.node("relu").cost
    assert found == Cost(rows * columns, 4 * rows * columns, 4 * rows * columns, 1, 0)


# -- memory movers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (cost(aten.cat.default, [(2, 5), (3, 5)], result=(5, 5)), Cost(0, 100, 100, 1, 0)),
        (cost(aten.copy_.default, (4,), (4,), result=(4,)), Cost(0, 16, 16, 1, 0)),
        (cost(aten.copy_.default, (4, 5), (1,), result=(4, 5)), Cost(0, 4, 80, 1, 0)),
        (cost(aten.full.default, [4, 5], 1.0, result=(4, 5)), Cost(0, 0, 80, 1, 0)),
        (cost(aten.zeros_like.default, (4, 5), result=(4, 5)), Cost(0, 0, 80, 1, 0)),
        (cost(aten.zero_.default, (4, 5), result=(4, 5)), Cost(0, 0, 80, 1, 0)),
        (cost(aten.rand.default, [4, 5], result=(4, 5)), Cost(20, 0, 80, 1, 0)),
        (cost(aten.embedding.default, (1000, 8), ints(3), result=(3, 8)), Cost(0, 24 + 96, 96, 1, 0)),
        (cost(aten.index.Tensor, (1000, 8), [ints(3)], result=(3, 8)), Cost(0, 24 + 96, 96, 1, 0)),
        (cost(aten.gather.default, (100, 8), 0, ints(2, 8), result=(2, 8)), Cost(0, 128 + 64, 64, 1, 0)),
        (cost(aten.index_put_.default, (100, 8), [ints(3)], (3, 8), result=(100, 8)), Cost(0, 24 + 96, 96, 1, 0)),
        (cost(aten.index_put.default, (100, 8), [ints(3)], (3, 8), result=(100, 8)), Cost(0, 3320, 3296, 2, 0)),
        (cost(aten.scatter_add_.default, (9,), 0, ints(3), (3,), result=(9,)), Cost(3, 24 + 12 + 12, 12, 1, 0)),
        (cost(aten.topk.default, (100,), 3, result=[(3,), (3,)]), Cost(0, 1600, 24, 1, 0)),
        (cost(aten._local_scalar_dense.default, (1,), result=()), Cost(0, 4, 0, 0, None)),
    ],
    ids=[
        *("cat", "copy_", "copy_ broadcast", "full", "zeros_like", "zero_", "rand", "embedding", "index", "gather"),
        *("index_put_", "index_put", "scatter_add_", "topk", "item"),
    ],
)
def test_movers(found: Cost, expected: Cost) -> None:
    written = expected.written if found.host_us == 0 else found.written
    assert found == Cost(expected.flops, expected.read, written, expected.launches, expected.host_us)


def test_the_gradient_of_an_embedding_clears_its_table_first() -> None:
    found = cost(aten.embedding_dense_backward.default, (3, 8), ints(3), 100, -1, False, result=(100, 8))
    assert found == Cost(24, 96 + 24 + 96, 3200 + 96, 2, 0)


def test_a_copy_that_strides_make_needless_is_free() -> None:
    builder = Builder()
    x, t = builder.input("x", builder.fake(4, 5)), builder.input("t", builder.fake(5, 4).t())
    builder.call(aten.contiguous.default, (x,), builder.fake(4, 5))
    builder.call(aten.contiguous.default, (t,), builder.fake(4, 5))
    assert [node.cost for node in builder.lift().nodes] == [FREE, Cost(0, 80, 80, 1, 0)]


def test_pooling_visits_each_window() -> None:
    found = cost(aten.max_pool2d_with_indices.default, (1, 2, 8, 8), [2, 2], result=[(1, 2, 4, 4), (1, 2, 4, 4)])
    assert found.flops == 2 * 4 * 4 * 2 * 2
    assert cost(aten.avg_pool2d.default, (1, 2, 8, 8), [4], result=(1, 2, 2, 2)).flops == 2 * 2 * 2 * 16


# -- unknown -----------------------------------------------------------------------------------------------------------


def test_an_operator_without_a_formula_is_unknown() -> None:
    assert cost(aten.grid_sampler_2d.default, (1, 2, 4, 4), (1, 3, 3, 2), 0, 0, False, result=(1, 2, 3, 3)) == UNKNOWN


def test_an_operator_that_this_torch_lacks_is_unknown() -> None:
    graph = Graph()
    assert cost_of(graph.add("nowhere.at_all.default", name="x")) == UNKNOWN
    assert cost_of(graph.add("hop.nothing", name="y"), graph) == UNKNOWN


def test_waiting_takes_a_time_that_nobody_knows() -> None:
    assert cost(aten.nonzero.default, (4,), result=(2, 1), dtype=torch.int64).host_us is None
