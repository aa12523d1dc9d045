"""Replays of operators of every library that torch calls on CUDA, captured as they are, with every address moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pygraph.runtime.contract import Driver
from tests.gpu.replays import assert_replays

Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]


def rand(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(dtype)


def half(*size: int) -> torch.Tensor:
    return rand(*size, dtype=torch.float16)


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def chain(x: torch.Tensor) -> torch.Tensor:
    y = (x @ x).relu()
    y = torch.softmax(y @ x, -1)
    return y.sum(0) + torch.sigmoid(y)[0]


def cache_write(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, index, rows)
    return cache.sum(0)


def foreach(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch._foreach_mul_([a, b, c], 0.5)
    return tuple(torch._foreach_add([a, b, c], 1.0))


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}


def adam(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p, g, m, v, step = tensors
    torch._fused_adam_([p], [g], [m], [v], [], [step], **ADAM)
    return (p,)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


CASES: dict[str, Case] = {
    "pointwise": (lambda x, y: x.sin() + y * 2, lambda: (rand(1000, 7), rand(1000, 7))),
    "reductions": (lambda x: (x.sum(), x.amax(0), x.mean(1), x.std(), x.norm()), lambda: (rand(300, 517),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (256,), w, b), lambda: (half(64, 256), half(256), half(256))),
    "mm": (torch.mm, lambda: (half(256, 512), half(512, 128))),
    "mm_float": (torch.mm, lambda: (rand(256, 512), rand(512, 128))),
    "mm_double": (torch.mm, lambda: (rand(64, 64, dtype=torch.float64), rand(64, 64, dtype=torch.float64))),
    "addmm": (torch.addmm, lambda: (half(128), half(256, 512), half(512, 128))),
    "linear_gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: (half(64, 256), half(512, 256), half(512))),
    "bmm": (torch.bmm, lambda: (half(8, 64, 96), half(8, 96, 32))),
    "mv": (torch.mv, lambda: (rand(300, 200), rand(200))),
    "large_mm": (torch.mm, lambda: (half(2048, 2048), half(2048, 2048))),
    "chain": (chain, lambda: (rand(128, 128),)),
    "dead_larger_intermediate": (lambda x: (x.repeat(8, 1) * 2).sin().sum(0) + 1, lambda: (rand(64, 64),)),
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda: (half(4, 16, 32, 32), half(32, 16, 3, 3), half(32)),
    ),
    "convolution_float": (lambda x, w: F.conv2d(x, w, stride=2), lambda: (rand(2, 3, 64, 64), rand(16, 3, 7, 7))),
    "batch_norm": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        lambda: (rand(8, 16, 12, 12), torch.zeros(16, device="cuda"), torch.ones(16, device="cuda")),
    ),
    "attention": (attention, lambda: tuple(half(2, 4, 128, 64) for _ in range(3))),
    "attention_float": (attention, lambda: tuple(rand(1, 2, 64, 32) for _ in range(3))),
    "sort": (lambda x: torch.sort(x, -1), lambda: (rand(16, 3000),)),
    "sort_flat": (lambda x: torch.sort(x), lambda: (rand(70000),)),
    "topk": (lambda x: torch.topk(x, 5), lambda: (rand(16, 1000),)),
    "cumsum": (lambda x: (x.cumsum(0), x.cumsum(1)), lambda: (rand(64, 333),)),
    "cumsum_flat": (lambda x: x.cumsum(0), lambda: (torch.arange(100000, device="cuda"),)),
    "embedding": (lambda w, i: F.embedding(i, w), lambda: (half(100, 64), indices(3, 5, 99, 0))),
    "index_put": (cache_write, lambda: (rand(32, 8), indices(4, 0, 2), rand(3, 8))),
    "index_put_accumulate": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda: (rand(16, 8), indices(1, 1, 5), rand(3, 8)),
    ),
    "gather_scatter": (
        lambda x, i: (x.gather(0, i), x.scatter_add(0, i, x[:2])),
        lambda: (rand(8, 4), torch.zeros(2, 4, dtype=torch.int64, device="cuda")),
    ),
    "cat_split": (lambda x, y: (torch.cat([x, y, x]), *torch.cat([x, y]).chunk(2)), lambda: (rand(6, 5), rand(4, 5))),
    "copies": (lambda x, y: (x.clone(), y.copy_(x), x.t().contiguous()), lambda: (rand(64, 48), rand(64, 48))),
    "fills": (lambda x: (torch.zeros_like(x), torch.zeros(7, 3, device="cuda"), x.zero_()), lambda: (rand(65, 3),)),
    "fft": (lambda x: torch.fft.rfft(x).abs(), lambda: (rand(16, 256),)),
    "foreach": (foreach, lambda: (rand(100), rand(7, 3), rand(65536))),
    "fused_adam": (
        adam,
        lambda: (rand(1000), rand(1000), rand(1000), rand(1000).abs(), torch.tensor(3.0, device="cuda")),
    ),
    "random": (
        lambda x: (F.dropout(x, 0.4) + torch.rand_like(x), torch.randn(50, device="cuda"), x.sigmoid().bernoulli()),
        lambda: (rand(33),),
    ),
    "views": (lambda x: (x[1:], x.t(), x, (x * 2)[:, 1:], x.view(-1)), lambda: (rand(6, 4),)),
    "zero_size": (
        lambda x, y: (x + 1, torch.cat([x, y]), x, x.sum(), torch.empty(0, 3, device="cuda")),
        lambda: (rand(0, 4), rand(3, 4)),
    ),
    "nothing_launched": (lambda x: (x, x[1:]), lambda: (rand(3, 4),)),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), lambda: (rand(8, 2),)),
    "integers": (lambda x: (x * 3 + 1, x // 2, x.sum()), lambda: (indices(*range(50)),)),
}


def region(function: Callable[..., Any]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function as a region: arguments in a list, outputs in a tuple."""

    def run(args: list[Any]) -> tuple[Any, ...]:
        result = function(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    return run


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_uncaptured(driver: Driver, name: str) -> None:
    function, make = CASES[name]
    assert_replays(driver, region(function), make())
