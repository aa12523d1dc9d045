"""Programs compiled on CUDA, against Inductor alone: values, gradients, mutation, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pygraph
from pygraph.backend import pygraph as backend

CALLS = 5

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(autouse=True)
def _with_gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


def cuda(*size: int, **kind: Any) -> torch.Tensor:
    return torch.randn(*size, device="cuda", **kind)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, options=options or None, dynamic=options.pop("dynamic", None))


def assert_replayed(at_least: int = 1) -> None:
    """Every wrapped region was replayed, and no capture was refused."""
    reports = pygraph.reports()
    assert [r.error for r in reports] == [None] * len(reports)
    regions = [region for report in reports for region in report.regions if region.wrapped]
    assert len(regions) >= at_least
    refused = [f"{region.index}: {region.state} {region.why}" for region in regions if region.state != "replay"]
    assert not refused, "\n".join(refused)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal but for rounding: two compilations may tune one reduction to other block sizes. (That a replay has the
    bits of the uncaptured run is checked by the runtime itself, here and in the tests of operators.)"""
    for a, b in zip(torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.device == b.device
            torch.testing.assert_close(a, b, equal_nan=True)
        else:
            assert a == b


def against_inductor(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **options: Any) -> None:
    """Fresh inputs on every call; arguments that are mutated end equal, too."""
    ours, theirs = compiled(function, **options), torch.compile(function, dynamic=options.get("dynamic"))
    with torch.no_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            mine = make()
            yours = copy.deepcopy(mine)
            torch.manual_seed(100 + seed)
            actual = ours(*mine)
            torch.manual_seed(100 + seed)
            expected = theirs(*yours)
            assert_same(actual, expected)
            assert_same(mine, yours)
    assert_replayed()


def attention_block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ w).view(2, 64, 3, 4, 32).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 64, 128) + x


def decode(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache[:, position] = row
    return torch.softmax(cache.sum(1) @ row[:, 0].t(), -1)


def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, order = torch.sort(x, -1)
    return values.cumsum(0), order, x.t(), x[1:] * 2, torch.topk(x, 3)[0], x


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "pointwise": (lambda x, y: (x.sin() * y, x + 1), lambda: (cuda(100, 37), cuda(100, 37))),
    "attention": (attention_block, lambda: (cuda(2, 64, 128, dtype=torch.half), cuda(128, 384, dtype=torch.half))),
    "decode": (decode, lambda: (cuda(4, 32, 16), torch.tensor([7], device="cuda"), cuda(4, 1, 16))),
    "mixed": (mixed, lambda: (cuda(32, 65),)),
    "dropout": (lambda x, w: F.dropout(F.relu(x @ w), 0.3) + torch.rand_like(x), lambda: (cuda(64, 64), cuda(64, 64))),
    "scalars": (lambda x, n: (x * n, x.shape[0] + n), lambda: (cuda(8, 8), 3)),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1).relu().sum((2, 3)), lambda: (cuda(2, 8, 16, 16), cuda(4, 8, 3, 3))),
    "embedding": (
        lambda t, i: F.layer_norm(F.embedding(i, t), (32,)).sum(1),
        lambda: (cuda(100, 32), torch.randint(0, 100, (4, 9), device="cuda")),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_inductor(name: str) -> None:
    against_inductor(*PROGRAMS[name])


@pytest.mark.parametrize("name", ["attention", "dropout", "decode"])
def test_equals_inductor_with_every_replay_verified(name: str) -> None:
    against_inductor(*PROGRAMS[name], verify="always")


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.LayerNorm(64)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(64, 8)).cuda()


def train(
    call: Callable[..., Any], model: nn.Module, steps: int = 6, *, set_to_none: bool = True, accumulate: int = 1
) -> list[Any]:
    """Losses, then every parameter and buffer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = cuda(16, 32)
        loss = call(x).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return losses + [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("options", [{}, {"set_to_none": False}, {"accumulate": 2}], ids=str)
def test_training_equals_inductor(options: dict[str, Any]) -> None:
    first, second = network(), network()
    actual = train(compiled(first), first, **options)
    assert_replayed(2)
    assert_same(actual, train(torch.compile(second), second, **options))


def test_autocast() -> None:
    first, second = network(), network()

    def under(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return call(x).float()

        return run

    actual = train(under(compiled(first)), first)
    assert_replayed(2)
    assert_same(actual, train(under(torch.compile(second)), second))


def test_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    def wrapped(model: nn.Module) -> Callable[..., Any]:
        return lambda x: checkpoint(model, x, use_reentrant=False)

    first, second = network(), network()
    actual = train(compiled(wrapped(first)), first)
    assert_replayed(2)
    assert_same(actual, train(torch.compile(wrapped(second)), second))


def test_a_compiled_optimizer_step() -> None:
    def steps(compile_: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        parameters = [cuda(64, 64).requires_grad_(), cuda(64).requires_grad_()]
        optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.01, device="cuda"), capturable=True)
        step = compile_(optimizer.step)
        for seed in range(5):
            torch.manual_seed(seed)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            step()
        return [p.detach().clone() for p in parameters]

    actual = steps(compiled)
    assert_replayed()
    assert_same(actual, steps(torch.compile))


def test_parameters_that_are_reassigned_and_moved() -> None:
    model = network().eval()
    ours, reference = compiled(model), torch.compile(copy.deepcopy(model))
    with torch.no_grad():
        for turn in range(CALLS + 2):
            x = cuda(16, 32)
            assert_same(ours(x), reference(x))
            if turn >= 3:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
    assert_replayed()


def test_dynamic_sizes() -> None:
    ours, theirs = (
        compiled(lambda x, w: (x @ w).relu().sum(1), dynamic=True),
        torch.compile(lambda x, w: (x @ w).relu().sum(1), dynamic=True),
    )
    w = cuda(32, 48)
    with torch.no_grad():
        for n in (5, 9, 5, 9, 5, 17, 17, 9, 17, 5):
            x = cuda(n, 32)
            assert_same(ours(x, w), theirs(x, w))
    assert_replayed()
