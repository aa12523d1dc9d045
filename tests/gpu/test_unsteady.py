"""Programs that do not repeat themselves on a GPU are replayed, where each of their calls is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import pygraph


def replays(function: Any, *args: Any, calls: int = 6) -> tuple[int, list[Any]]:
    """Replays of ``function`` compiled, and what its last call returned."""
    pygraph.reset()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="pygraph", fullgraph=True, options={"cache_dir": None})
    outputs: Any = None
    for _ in range(calls):
        outputs = compiled(*args)
    assert all(region.record.reason is None for report in pygraph.reports() for region in report.regions), [
        region.record for report in pygraph.reports() for region in report.regions
    ]
    return pygraph.counters().get("replays", 0), outputs


def test_sums_in_any_order_and_a_sign_that_depends_on_them() -> None:
    """A sign of mere rounding decides results: whole runs differ now and then by far more than they mostly do."""
    torch.manual_seed(0)
    index = torch.randint(0, 4096, (1 << 18,), device="cuda")
    values = torch.randn(1 << 18, device="cuda")
    values[index < 64] *= 1e-3

    def function(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = torch.zeros(4096, device="cuda").index_add_(0, index, values)
        again = torch.zeros(4096, device="cuda").index_add_(0, index.flip(0), values.flip(0))
        rounding = (sums - again).relu()
        return sums, sums + (rounding > 0) * 1e-3

    count, (sums, _) = replays(function, values)
    assert count > 0
    expected = torch.zeros(4096, device="cuda", dtype=torch.float64).index_add_(0, index, values.double())
    assert (sums - expected).abs().max() < 1e-3


class Net(torch.nn.Module):
    """Grouped convolutions, once each sample has gradients of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 32), (32, 64), (64, 64)))
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(4, conv.out_channels) for conv in self.convs)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def test_gradients_of_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net().cuda()
    params = {name: value.detach() for name, value in net.named_parameters()}
    x, y = torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(0, 10, (16,), device="cuda")

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(net, params, (x[None],)), y[None])

    def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        each = vmap(grad(loss), (None, 0, 0))(params, x, y)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in each.values()]).norm(dim=0)
        factor = (1 / (norms + 1e-6)).clamp(max=1)
        return {name: torch.einsum("b,b...->...", factor, value) for name, value in each.items()}

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding is larger than what is looked for
    expected = step(params, x, y)
    before = torch.cuda.memory_allocated()
    count, found = replays(step, params, x, y)
    assert count > 0
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 1e-3 * expected[name].norm() + 1e-6, name
    found.clear()
    assert torch.cuda.memory_allocated() - before < 32 << 20


def test_a_decoder_whose_attention_varies() -> None:
    """With one query, and more than 64 keys that count, cuDNN's attention differs now and then from call to call."""
    torch.manual_seed(0)
    heads, width, length = 8, 1024, 1024
    weights = [torch.randn(4, width, width, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(8)]
    columns, place = torch.arange(length, device="cuda"), torch.zeros(1, device="cuda", dtype=torch.long)

    def step(x: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        mask = (columns <= place).view(1, 1, 1, -1)
        for (query, key, value, out), (keys, values) in zip(weights, caches, strict=True):
            parts = [(x @ each).view(8, 1, heads, -1).transpose(1, 2) for each in (query, key, value)]
            keys.index_copy_(2, place, parts[1])
            values.index_copy_(2, place, parts[2])
            found = F.scaled_dot_product_attention(parts[0], keys, values, attn_mask=mask)
            x = x + found.transpose(1, 2).reshape(x.shape) @ out
        return x

    def decoded(step: Any) -> list[torch.Tensor]:
        shape = 2, 8, heads, length, width // heads
        caches, found = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in weights], []
        x = torch.ones(8, 1, width, device="cuda", dtype=torch.bfloat16)
        for call in range(120):
            place.fill_(call)
            found.append(step(x, caches).clone())
        return found

    pygraph.reset()
    torch._dynamo.reset()
    options = {"cache_dir": None, "verify": "always"}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        expected, found = decoded(step), decoded(torch.compile(step, backend="pygraph", options=options))
    for call, pair in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(*pair, rtol=0.1, atol=0.1, msg=f"call {call}")
    assert pygraph.counters()["replays"] == 118
