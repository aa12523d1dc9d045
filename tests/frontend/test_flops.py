"""Flops against ``torch.utils.flop_counter``, operator by operator and on whole models in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pygraph.frontend import op_name
from pygraph.ir import Graph
from pygraph.ir.cost import evaluate
from tests.frontend.capture import Builder, Captured, capture, first_tensor

aten = torch.ops.aten

COUNTED = frozenset(
    op_name(op).rsplit(".", 1)[0] if op_name(op).count(".") == 2 else op_name(op) for op in flop_registry
)


def counted_flops(graph: Graph) -> float:
    """The flops of the operators that torch's counter knows."""
    known = [node for node in graph.nodes if ".".join(node.op.split(".")[:2]) in COUNTED]
    flops = [evaluate(node.cost.flops, graph.hints) for node in known]
    assert all(count is not None for count in flops)
    return sum(count or 0.0 for count in flops)


# -- models ------------------------------------------------------------------------------------------------------------


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


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 97, "attn_implementation": "eager"}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **small
        )
        return transformers.BertModel(config, add_pooling_layer=False)
    if name == "gpt2":
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **ends, **small)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        use_cache=False,
        **small,
    )
    return transformers.LlamaForCausalLM(config)


def model_and_input(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "conv":
        return ConvNet(), torch.randn(2, 3, 16, 16, requires_grad=True)
    return transformer(name), torch.randint(0, 97, (2, 11))


MODELS = ["bert", "gpt2", "llama", "conv"]


@pytest.fixture(scope="module", params=MODELS)
def training(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, list[Captured]]:
    model, value = model_and_input(request.param)
    return model, value, capture(model, value, backward=True, count_flops=True)


def test_each_graph_has_the_flops_that_torch_counts(training: tuple[nn.Module, Tensor, list[Captured]]) -> None:
    graphs = training[2]
    assert [captured.kind for captured in graphs] == ["forward", "backward"]
    for captured in graphs:
        assert captured.flops > 0
        assert counted_flops(captured.lift()) == captured.flops


def test_a_step_has_the_flops_of_the_eager_one(training: tuple[nn.Module, Tensor, list[Captured]]) -> None:
    model, value, graphs = training
    with FlopCounterMode(display=False) as counter:
        first_tensor(model(value)).float().sum().backward()
    assert sum(counted_flops(captured.lift()) for captured in graphs) == counter.get_total_flops()


def test_no_operator_of_a_model_is_of_unknown_cost(training: tuple[nn.Module, Tensor, list[Captured]]) -> None:
    for captured in training[2]:
        graph = captured.lift()
        unknown = {node.op for node in graph.nodes if None in (node.cost.flops, node.cost.read, node.cost.written)}
        assert unknown == set()


def attend(x: Tensor, w: Tensor) -> Tensor:
    heads = (x @ w).unflatten(-1, (2, -1)).transpose(1, 2)
    return torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads


def test_dynamic_sizes_give_the_same_flops() -> None:
    x, w = torch.randn(3, 11, 8), torch.randn(8, 8)
    torch._dynamo.mark_static(w)
    torch._dynamo.mark_static(x, 2)
    with torch.no_grad():
        (captured,) = capture(attend, x, w, dynamic=True, count_flops=True)
    graph = captured.lift()
    assert set(graph.hints.values()) == {3, 11}
    assert any(not isinstance(node.cost.flops, int) for node in graph.nodes)
    assert counted_flops(graph) == captured.flops


# -- operators ---------------------------------------------------------------------------------------------------------


def build(op: Any, args: list[Any], value: Callable[[Builder], Any]) -> tuple[Graph, fx.Node]:
    builder = Builder()
    nodes = [builder.input(f"x{i}", builder.fake(*a)) if isinstance(a, tuple) else a for i, a in enumerate(args)]
    call = builder.call(op, tuple(nodes), value(builder))
    return builder.lift(), call


Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
GRAD = (2, 4, 5, 6)
OUT = (GRAD, (2, 4, 5))
SDPA_CASES = [
    (aten._scaled_dot_product_flash_attention.default, [Q, K, V]),
    (aten._scaled_dot_product_efficient_attention.default, [Q, K, V, None, True]),
    (aten._scaled_dot_product_cudnn_attention.default, [Q, K, V, None, True]),
    (aten._scaled_dot_product_flash_attention_backward.default, [GRAD, Q, K, V]),
    (aten._scaled_dot_product_efficient_attention_backward.default, [GRAD, Q, K, V]),
    (aten._scaled_dot_product_cudnn_attention_backward.default, [GRAD, Q, K, V]),
]


@pytest.mark.parametrize(("op", "args"), SDPA_CASES, ids=[str(op) for op, _ in SDPA_CASES])
def test_fused_attention(op: Any, args: list[Any]) -> None:
    graph, _ = build(op, args, lambda b: b.fake(*GRAD))
    shapes = [torch.Size(a) for a in args if isinstance(a, tuple)]
    assert graph.nodes[0].cost.flops == flop_registry[op._overloadpacket](*map(_tensor, shapes), out_val=None)


def _tensor(shape: torch.Size) -> Tensor:
    return torch.empty(shape, device="meta")


def test_heads_that_share_keys_count_for_each_query() -> None:
    shared = [Q, (2, 2, 7, 8), (2, 2, 7, 6)]
    graph, _ = build(aten._scaled_dot_product_flash_attention.default, shared, lambda b: b.fake(*GRAD))
    assert graph.nodes[0].cost.flops == 2 * 2 * 4 * 5 * 7 * (8 + 6)


def test_attention_on_the_cpu_counts_as_on_an_accelerator() -> None:
    graph, _ = build(aten._scaled_dot_product_flash_attention_for_cpu.default, [Q, K, V], lambda b: b.fake(*GRAD))
    assert graph.nodes[0].cost.flops == 2 * 2 * 4 * 5 * 7 * (8 + 6)


@pytest.mark.parametrize(
    ("op", "args", "result", "expected"),
    [
        (aten.mm.default, [(3, 4), (4, 5)], (3, 5), 2 * 3 * 4 * 5),
        (aten.addmm.default, [(5,), (3, 4), (4, 5)], (3, 5), 2 * 3 * 4 * 5),
        (aten.bmm.default, [(2, 3, 4), (2, 4, 5)], (2, 3, 5), 2 * 2 * 3 * 4 * 5),
        (aten.baddbmm.default, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], (2, 3, 5), 2 * 2 * 3 * 4 * 5),
        (aten.addbmm.default, [(3, 5), (2, 3, 4), (2, 4, 5)], (3, 5), 2 * 2 * 3 * 4 * 5),
        (aten.mv.default, [(3, 4), (4,)], (3,), 2 * 3 * 4),
        (aten.addmv.default, [(3,), (3, 4), (4,)], (3,), 2 * 3 * 4),
        (aten.dot.default, [(4,), (4,)], (), 2 * 4),
        (aten.addr.default, [(3, 4), (3,), (4,)], (3, 4), 2 * 3 * 4),
        (aten._int_mm.default, [(3, 4), (4, 5)], (3, 5), 2 * 3 * 4 * 5),
    ],
)
def test_products(op: Any, args: list[Any], result: tuple[int, ...], expected: int) -> None:
    graph, _ = build(op, args, lambda b: b.fake(*result))
    assert graph.nodes[0].cost.flops == expected


def test_grouped_convolution_counts_each_group_alone() -> None:
    """Torch's counter leaves the groups out of the weight gradient; a gradient costs what the forward pass does."""
    forward, _ = build(
        aten.convolution.default,
        [(2, 8, 6, 6), (8, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 8],
        lambda b: b.fake(2, 8, 4, 4),
    )
    once = 2 * 2 * 8 * 4 * 4 * 3 * 3
    assert forward.nodes[0].cost.flops == once
    for mask, times in (([True, True, False], 2), ([False, True, True], 1), ([False, False, True], 0)):
        backward, _ = build(
            aten.convolution_backward.default,
            [(2, 8, 4, 4), (2, 8, 6, 6), (8, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 8, mask],
            lambda b: (b.fake(2, 8, 6, 6), b.fake(8, 1, 3, 3), None),
        )
        assert backward.nodes[0].cost.flops == times * once
