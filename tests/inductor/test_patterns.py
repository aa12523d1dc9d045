"""Patterns of Inductor's take operators with all of their arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._inductor import config


def product_last(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(x, a @ b, alpha=3)


def product_first(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(a @ b, x, alpha=0.5)


def in_place(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x * 0.9).add_(a @ b, alpha=0.5)


def of_batches(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(x, a[None] @ b[None], alpha=3)


def subtracted(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sub(x, a @ b, alpha=3)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fn", [product_last, product_first, in_place, of_batches, subtracted])
def test_a_product_that_is_added_times_a_factor_keeps_the_factor(fn: Callable[..., torch.Tensor]) -> None:
    given = torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)
    with config.patch(force_disable_caches=True):
        ours = torch.compile(fn, backend="pygraph")
        for _ in range(4):
            torch.testing.assert_close(ours(*given), fn(*given))
