"""Costs of operators: flops as torch counts them, bytes, launches; views are free, unknown operators unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import flop_counter

from pygraph.frontend.costs import cost_of
from pygraph.frontend.names import op_name
from pygraph.ir import FREE, UNKNOWN, Cost, Graph, base_name, symbol
from pygraph.ir.cost import evaluate
from tests.frontend.capture import Builder, Captured, capture, fake, lift_inference, node_of, run

aten = torch.ops.aten
prims = torch.ops.prims
COUNTED = frozenset(base_name(op_name(op)) for op in flop_counter.flop_registry)
Q, K, V, SHARED = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), (2, 2, 7, 8)
GRAD = (2, 4, 5, 6)
CONVOLUTION = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 8)


def cost(op: Any, *args: Any, result: Any = (), **kwargs: Any) -> Cost:
    """The cost of ``op``; tuples among its arguments and results are shapes of tensors, tensors are what they are."""
    value = tuple(shape and fake(*shape) for shape in result) if isinstance(result, list) else fake(*result)
    return node_of(op, *map(_given, args), value=value, **kwargs).cost


def _given(arg: Any) -> Any:
    if isinstance(arg, list):
        return [_given(item) for item in arg]
    return fake(*arg) if isinstance(arg, tuple) else arg


def ints(*size: int) -> torch.Tensor:
    return fake(*size, dtype=torch.int64)


def counted_flops(graph: Graph) -> float:
    """The flops of the operators that torch's counter knows."""
    flops = [evaluate(node.cost.flops, graph.hints) for node in graph.nodes if base_name(node.op) in COUNTED]
    assert None not in flops
    return sum(count or 0.0 for count in flops)


# -- bytes and launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (cost(aten.add.Tensor, (4, 5), (5,), result=(4, 5)), Cost(20, 100, 80, 1)),
        (cost(aten.relu_.default, (4, 5), result=(4, 5)), Cost(20, 80, 80, 1)),
        (cost(aten.sum.dim_IntList, (4, 5), [1], result=(4,)), Cost(20, 80, 16, 1)),
        (cost(aten.var_mean.correction, (4, 5), [1], result=[(4,), (4,)]), Cost(20, 80, 32, 1)),
        (cost(aten.max_pool2d_with_indices.default, (2, 8, 8), [2], result=[(2, 4, 4)]), Cost(128, 512, 128, 1)),
        (cost(aten.cat.default, [(2, 5), (3, 5)], result=(5, 5)), Cost(0, 100, 100, 1)),
        (cost(aten.copy_.default, (4, 5), (1,), result=(4, 5)), Cost(0, 4, 80, 1)),
        (cost(aten.zeros_like.default, (4, 5), result=(4, 5)), Cost(20, 0, 80, 1)),
        (cost(aten.zero_.default, (4, 5), result=(4, 5)), Cost(20, 0, 80, 1)),
        (cost(aten.rand.default, [4, 5], result=(4, 5)), Cost(20, 0, 80, 1)),
        (cost(aten.embedding.default, (1000, 8), ints(3), result=(3, 8)), Cost(0, 24 + 96, 96, 1)),
        (cost(aten.index.Tensor, (1000, 8), [ints(3)], result=(3, 8)), Cost(0, 24 + 96, 96, 1)),
        (cost(aten.index_put_.default, (100, 8), [ints(3)], (3, 8), result=(100, 8)), Cost(24, 24 + 96, 96, 1)),
        (cost(aten.index_put.default, (100, 8), [ints(3)], (3, 8), result=(100, 8)), Cost(24, 3320, 3296, 2)),
        (cost(aten._local_scalar_dense.default, (1,), result=()), Cost(0, 4, 4, 1)),
        # nothing runs for views, sizes and memory
        (cost(aten.view.default, (4, 5), [20], result=(20,)), FREE),
        (cost(aten._unsafe_view.default, (4, 5), [20], result=(20,)), FREE),
        (cost(aten.expand.default, (1, 5), [4, 5], result=(4, 5)), FREE),
        (cost(aten.sym_size.int, (4, 5), 0), FREE),
        (cost(aten.empty.memory_format, [4, 5], result=(4, 5)), FREE),
        # operators without a formula
        (cost(aten.grid_sampler_2d.default, (1, 2, 4, 4), (1, 3, 3, 2), 0, 0, False, result=(1, 2, 3, 3)), UNKNOWN),
        (cost_of(Graph().add("nowhere.at_all.default", name="x")), UNKNOWN),
    ],
)
def test_operands_are_read_and_results_written(found: Cost, expected: Cost) -> None:
    assert found == expected


def test_memory_that_is_expanded_or_given_twice_counts_once() -> None:
    builder = Builder()
    spread = builder.input("spread", builder.fake(5).expand(1000, 5))
    call = builder.call(aten.mul.Tensor, (spread, spread), builder.fake(1000, 5))
    assert builder.lift(call).nodes[0].cost == Cost(5000, 20, 20000, 1)


def test_costs_of_dynamic_sizes_are_symbolic() -> None:
    graph = lift_inference(lambda x: x[: x.shape[0] // 2] @ x.t(), torch.randn(6, 4), dynamic=True)
    assert {node.cost for node in graph.nodes if node.op.startswith("sym.")} <= {FREE}
    rows, columns = (symbol(name) for name, hint in sorted(graph.hints.items(), key=lambda item: -item[1]))
    product = graph.node("mm").cost
    assert evaluate(product.flops, graph.hints) == 2 * 3 * 6 * 4
    assert evaluate(product.written, {rows.name: 8, columns.name: 1}) == 4 * 4 * 8


# -- flops -------------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Strides, padding, dilation and a transposed convolution, in one, two and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 6, (3, 2), stride=2, dilation=(1, 2))
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2)
        self.line = nn.Conv1d(4, 5, 3)
        self.solid = nn.Conv3d(1, 2, 2)
        self.head = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = self.up(self.wide(x))
        y = self.solid(x[:, :1, :3, :3].unsqueeze(2).expand(-1, -1, 3, -1, -1))
        return self.head(self.line(x.flatten(2)).mean(-1)) + y.mean()


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 6, 16)), (ConvNet(), (2, 3, 16, 16))],
    ids=["transformer", "convolutions"],
)
def test_a_training_step_has_the_flops_that_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    counted = []

    def count(captured: Captured, values: list[Any]) -> Any:
        with flop_counter.FlopCounterMode(display=False) as counter:
            results = run(captured, values)
        counted.append(counter.get_total_flops())
        return results

    graphs = capture(model, torch.randn(shape, requires_grad=True), backward=True, around=count)
    assert [captured.kind for captured in graphs] == ["forward", "backward"]
    for captured, flops in zip(graphs, counted, strict=True):
        graph = captured.lift()
        assert counted_flops(graph) == flops > 0
        assert not [n.op for n in graph.nodes if None in (n.cost.flops, n.cost.read, n.cost.launches)]


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        (aten._scaled_dot_product_flash_attention.default, [Q, K, V], 2 * 2 * 4 * 5 * 7 * (8 + 6)),
        (aten._scaled_dot_product_flash_attention.default, [Q, SHARED, SHARED], 2 * 2 * 4 * 5 * 7 * (8 + 8)),
        (aten._scaled_dot_product_cudnn_attention_backward.default, [GRAD, Q, K, V], 2 * 2 * 4 * 5 * 7 * 36),
        (aten._int_mm.default, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (aten.baddbmm_.default, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (aten.convolution.default, [(2, 8, 6, 6), (8, 1, 3, 3), *CONVOLUTION], 2 * 2 * 8 * 4 * 4 * 3 * 3),
    ],
)
def test_products(op: Any, shapes: list[Any], expected: int) -> None:
    assert cost(op, *shapes, result=GRAD if op is not aten.convolution.default else (2, 8, 4, 4)).flops == expected


@pytest.mark.parametrize(("mask", "times"), [([True, True, False], 2), ([False, True, True], 1), ([False] * 3, 0)])
def test_each_gradient_of_a_grouped_convolution_takes_what_the_forward_pass_does(mask: list[bool], times: int) -> None:
    """Torch's counter leaves the groups out of the gradient of the weight."""
    operands = [(2, 8, 4, 4), (2, 8, 6, 6), (8, 1, 3, 3), *CONVOLUTION, mask]
    results = [
        shape if wanted else None for shape, wanted in zip([(2, 8, 6, 6), (8, 1, 3, 3), (8,)], mask, strict=True)
    ]
    found = cost(aten.convolution_backward.default, *operands, result=results)
    assert found.flops == times * 2 * 2 * 8 * 4 * 4 * 3 * 3


@pytest.fixture
def twice() -> Iterator[Any]:
    """A custom operator that nothing is known of yet."""
    library = torch.library.Library("pygraph_costs", "FRAGMENT")
    library.define("twice(Tensor x, int[] sizes) -> Tensor")
    packet = torch.ops.pygraph_costs.twice
    yield packet
    flop_counter.flop_registry.pop(packet, None)
    library._destroy()


def test_a_custom_operator_is_unknown_until_its_formula_is_registered(twice: Any) -> None:
    assert cost(twice.default, (4, 5), [1], result=(4, 5)) == UNKNOWN

    @flop_counter.register_flop_formula(twice)
    def formula(x: tuple[int, ...], sizes: list[int], out_shape: tuple[int, ...], **_: Any) -> int:
        return 7 * x[0] * out_shape[1] + sizes[0]

    assert cost(twice.default, (4, 5), [1], result=(4, 5)) == Cost(141, 80, 80, 1)
    assert cost(twice.default, (4, 5), [], result=(4, 5)) == Cost(None, 80, 80, 1), "the formula raises"
