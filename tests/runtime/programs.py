"""Small programs compiled by Inductor once per session, for tests that replay their regions over and over.

Each is here for one thing that a replay could get wrong; what is done with them is the tests' business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch._inductor.ir import DynamicScalar

from tests.runtime.regions import Cut, RegionCall, compile_regions

__all__ = ["KINDS", "PROGRAMS", "Source", "calls", "region_calls"]


@dataclass(frozen=True)
class Source:
    """A function, the arguments of the calls made of it (one per size), and how it is compiled."""

    function: Callable[..., Any]
    arguments: Sequence[Callable[[], Sequence[Any]]]
    train: bool = False
    cut: Cut | None = None
    options: dict[str, Any] = field(default_factory=dict)


def randn(*size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(size)


def calls(*makers: Callable[[], Any]) -> Callable[[], Sequence[Any]]:
    """One call whose arguments are made anew."""
    return lambda: [make() for make in makers]


def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    hidden = F.gelu(x @ w + b)
    return torch.softmax(hidden @ v, -1), hidden.sum(0)


def cache(x: Any, keys: Any, total: Any) -> Any:
    keys.mul_(0.5).add_(x)
    total.copy_(keys.sum(0))
    return keys.t() * 2, total


def as_is(x: Any, y: Any) -> Any:
    return x, y.t(), x + y, y[1:]


def reused(x: Any, w: Any) -> Any:
    a = torch.relu(x @ w)
    b = torch.sigmoid(a @ w)
    c = (b @ w).sum(-1)
    return torch.outer(c[:3], c[3:6]).contiguous(), c


def fallbacks(x: Any, w: Any) -> Any:
    values, order = torch.sort(x, -1)
    top, _ = torch.topk(x, 3)
    return F.conv1d(values[:, None], w), order, torch.cumsum(top, -1)


def random(x: Any) -> Any:
    return F.dropout(x, 0.3), torch.rand_like(x) + x


def draws(x: Any, y: Any) -> Any:
    left = torch.multinomial(x.softmax(-1), 5, replacement=True)
    right = torch.multinomial(y.softmax(-1), 5, replacement=True)
    return left, right * 2, torch.randperm(6)


def sliced(x: Any, w: Any, total: Any) -> Any:
    total[3:].add_(x[1])
    return x[2:] @ w[3:], torch.cumsum(x[1:], 0), w[1:]


def indexed(x: Any, where: Any, values: Any) -> Any:
    x.index_put_((where,), values, accumulate=True)
    return x[where] * 2


def sized(x: Any, y: Any) -> Any:
    return (x @ y).relu() + 1, x.sum(0), y.t()


def scaled(x: Any, n: int, scale: float) -> Any:
    return x * n + scale, (x / scale).sum()


def empty(x: Any, y: Any) -> Any:
    return torch.sort(x, 0)[0] * 2, y + 1, x.sum()


def read_back(x: Any, y: Any) -> Any:
    factor = x.sum().item()
    return torch.clamp(torch.tanh(y @ y), max=factor), y.sum(0) + torch.full((5,), factor)


def double(x: Any, y: Any) -> Any:
    return x.double() @ y, (x > 0).any(-1)


def branches(x: Any, y: Any, w: Any, total: Any) -> Any:
    left, right = torch.relu(x @ w), torch.tanh(y @ w)
    noise = torch.rand(6), torch.randn(6)
    sorted_left, _ = torch.sort(left, -1)
    total.add_((left @ w).sum(0))
    both = (right @ w) @ (sorted_left @ w)
    return both + noise[0], right.cumsum(0) * noise[1], torch.cumsum(left, -1), total * 2


def layouts(turned: Any, expanded: Any, scalar: Any, half: Any) -> Any:
    return turned * 2 + turned.t(), expanded + scalar, half.float().exp().to(torch.bfloat16) + half


def dtypes(x: Any) -> Any:
    spectrum = torch.fft.rfft(torch.view_as_complex(x).real * 2)
    return torch.view_as_real(spectrum), (x > 0).any(), torch.where(x > 0, x, -x), x / 0 + x.sqrt()


def operators(x: Any, a: Any, q: Any, table: Any, where: Any) -> Any:
    pooled, places = F.max_pool2d(x, 2, return_indices=True)
    attended = F.scaled_dot_product_attention(q, q, q)
    summed = F.embedding(where, table).sum(1)
    return (
        pooled,
        places,
        torch.linalg.solve(a, a + 1),
        attended,
        torch.bmm(q[0], q[1]),
        summed.scatter_add(0, where, table),
    )


def layer(x: Any, w: Any, b: Any) -> Any:
    return F.layer_norm(torch.tanh(x @ w), (8,)) * b


PROGRAMS: dict[str, Source] = {
    "mlp": Source(mlp, [calls(randn(6, 8), randn(8, 12), randn(12), randn(12, 5))]),
    "cache": Source(cache, [calls(randn(4, 8), randn(4, 8), randn(8))]),
    "as-is": Source(as_is, [calls(randn(4, 4), randn(4, 4))]),
    "reused": Source(reused, [calls(randn(6, 6), randn(6, 6))]),
    "planned": Source(
        reused, [calls(randn(6, 6), randn(6, 6))], options={"memory_planning": True, "memory_pool": "combined"}
    ),
    "fallbacks": Source(fallbacks, [calls(randn(3, 9), randn(2, 1, 3))]),
    "random": Source(random, [calls(randn(4, 7))]),
    "draws": Source(draws, [calls(randn(4, 7), randn(4, 7))]),
    "sliced": Source(sliced, [calls(randn(5, 6), randn(9, 4), randn(9))]),
    "indexed": Source(indexed, [calls(randn(5, 3), lambda: torch.tensor([0, 3, 3, 1]), randn(4, 3))]),
    "sized": Source(sized, [calls(randn(n, 8), randn(8, n)) for n in (5, 3, 16, 7)], options={"dynamic": True}),
    "scaled": Source(
        scaled, [calls(randn(4), lambda n=n: n, lambda n=n: n / 8) for n in (3, 4, 5, 6)], options={"dynamic": True}
    ),
    "empty": Source(empty, [calls(randn(0, 4), randn(3))]),
    "read-back": Source(
        read_back, [calls(randn(4), randn(5, 5))] * 3, cut=lambda node: isinstance(node.node, DynamicScalar)
    ),
    "double": Source(double, [calls(randn(3, 4), lambda: torch.randn(4, 2, dtype=torch.float64))]),
    "branches": Source(branches, [calls(randn(6, 6), randn(6, 6), randn(6, 6), randn(6))]),
    "train": Source(layer, [calls(randn(5, 8), randn(8, 8), randn(8))], train=True),
}

KINDS: dict[str, Source] = {
    "threads": Source(layer, [calls(randn(1024, 8), randn(8, 8), randn(8))], options={"cpp.threads": 4}),
    "layouts": Source(
        layouts,
        [
            calls(
                lambda: torch.randn(6, 6).t(),
                lambda: torch.randn(1, 6).expand(4, 6),
                randn(),
                lambda: torch.randn(64).to(torch.bfloat16),
            )
        ],
    ),
    "dtypes": Source(dtypes, [calls(randn(4, 16, 2))]),
    "operators": Source(
        operators,
        [
            calls(
                randn(1, 2, 8, 8),
                randn(4, 4),
                randn(2, 3, 8, 8),
                randn(3, 5),
                lambda: torch.tensor([[0, 2, 1, 1, 2], [1, 0, 0, 2, 2], [2, 1, 0, 0, 1]]),
            )
        ],
    ),
}
"""Operators, layouts and types of many kinds, for arguments that do not overlap."""


@functools.cache
def region_calls(name: str) -> tuple[tuple[RegionCall, ...], ...]:
    """The regions of a program, each with the calls that it received (one per size)."""
    source = (PROGRAMS | KINDS)[name]
    torch.manual_seed(0)
    compiled = compile_regions(source.function, cut=source.cut, **source.options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for make in source.arguments:
            args = [_trained(arg) if source.train else arg for arg in make()]
            result = compiled.call(*args)
            if source.train:
                result.sum().backward()
    regions: dict[int, list[RegionCall]] = {}
    for call in compiled.regions:
        regions.setdefault(id(call.fn), []).append(call)
    return tuple(tuple(each) for each in regions.values())


def _trained(arg: Any) -> Any:
    return arg.requires_grad_() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
