"""Writes into tensors of no dimensions, as of counters and meters, whatever their type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pygraph

Write = Callable[[torch.Tensor, torch.Tensor], object]

WRITES: dict[str, Write] = {
    "add": lambda total, value: total.add_(value),
    "add a number": lambda total, _: total.add_(2),
    "multiply": lambda total, value: total.mul_(value + 1),
    "copy": lambda total, value: total.copy_(value),
    "fill": lambda total, _: total.fill_(3),
    "set item": lambda total, value: total.__setitem__(..., value),
    "twice": lambda total, value: total.add_(value).mul_(2),
    "read later": lambda total, value: total.add_(value) * 2,
}


@pytest.fixture(params=["compile", "train_step"])
def wrap(request: pytest.FixtureRequest, fresh: None) -> Callable[..., Callable[..., torch.Tensor]]:
    if request.param == "train_step":
        return pygraph.train_step
    return lambda fn: torch.compile(fn, backend="pygraph")


@pytest.mark.parametrize(
    ("dtype", "where"),
    [
        (torch.float64, "argument"),
        (torch.int64, "closure"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in ((torch.float64, "closure"), (torch.int64, "argument"))
        ),
        *(pytest.param(torch.float32, where, marks=pytest.mark.sweep) for where in ("argument", "closure")),
    ],
)
def test_each_write_happens(wrap: Callable[..., Callable[..., torch.Tensor]], dtype: torch.dtype, where: str) -> None:
    """All of them in one program, each into a tensor of its own."""

    def make() -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
        totals = [torch.ones((), dtype=dtype) for _ in WRITES]

        def step(x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
            value = x.sum()
            for write, total in zip(WRITES.values(), given if where == "argument" else totals, strict=True):
                write(total, value)
            return value * 2

        return totals, step

    (totals, plain), (ours, step) = make(), make()
    compiled = wrap(step)
    for call in range(4):
        x = torch.full((3,), call + 1, dtype=dtype)
        torch.testing.assert_close(compiled(x, ours), plain(x, totals))
        for name, mine, theirs in zip(WRITES, ours, totals, strict=True):
            assert mine.item() == theirs.item(), f"{name}, call {call}"
