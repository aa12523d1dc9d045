"""Operators that are fine by their schema but cannot be captured on the host, and programs that call them.

They are in a namespace of torch's own: other custom operators are called by each replay from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pygraph
from pygraph import compat
from pygraph.report.model import GraphReport
from tests.small import UNFUSED

CALLS = 4
"""Enough calls to run uncaptured, be captured or fail to be, and be replayed."""


_failed: set[str] = set()


def fails_once(x: torch.Tensor, name: str) -> torch.Tensor:
    """A fake implementation that works while a program is compiled, raises where the operator is first captured, and
    works from then on: it is called once more where the operator is recorded as an eager call."""
    if compat.TracingContext.try_get() is None and name not in _failed:
        _failed.add(name)
        raise RuntimeError("not while capturing")
    return torch.empty_like(x)


def _define(name: str, factor: float) -> Any:
    """A custom operator that is fine by its schema, differentiable, and multiplies by ``factor``."""

    @torch.library.custom_op(f"quantized::pygraphfails_{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    op.register_fake(lambda x: fails_once(x, name))

    @torch.library.custom_op(f"quantized::pygraphfails_{name}_backward", mutates_args=())
    def backward(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    backward.register_fake(lambda x: fails_once(x, f"{name}_backward"))
    op.register_autograd(lambda ctx, g: backward(g.contiguous()))
    return op


double, triple = _define("double", 2.0), _define("triple", 3.0)


@torch.library.custom_op("quantized::pygraphfails_spread", mutates_args=())
def spread(x: torch.Tensor) -> torch.Tensor:
    """Returns elements that share memory, which the host driver refuses."""
    return x.sum(0, keepdim=True).clone().expand_as(x)


@spread.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(1, *x.shape[1:]).expand_as(x)


@torch.library.custom_op("quantized::pygraphfails_add_into", mutates_args={"x"})
def add_into(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@add_into.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> None:
    fails_once(x, "add_into")


def one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    middle = double(hidden)  # the line of double
    return torch.relu(middle @ w).sum(0)


def two(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    hidden = torch.relu(double(hidden) @ w)  # the line of both
    middle = triple(hidden)
    return torch.relu(middle @ w).sum(0)


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ w)
    add_into(hidden, x)  # the line of add_into
    return torch.relu(hidden @ w).sum(0)


def shared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    middle = spread(torch.relu(x @ w))  # the line of spread
    return torch.relu(middle @ w).sum(0)


def place(mark: str) -> str:
    """The line of this file that holds the comment ``mark``, as reports write it."""
    path = Path(__file__)
    (line,) = [i for i, text in enumerate(path.read_text().splitlines(), 1) if text.endswith(f"# {mark}")]
    return f"{path.name}:{line}"


def inputs(rows: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def weight(grad: bool = False) -> torch.Tensor:
    made = torch.randn(16, 16, generator=torch.Generator().manual_seed(99)) / 4
    return made.requires_grad_(grad)


def compiled(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    options = {**UNFUSED, **settings.pop("options", {})}
    return torch.compile(fn, backend="pygraph", fullgraph=True, options=options, **settings)


def again() -> None:
    """Forget all compilations and failures: the next program is compiled anew, and its operators fail again."""
    _failed.clear()
    torch._dynamo.reset()
    pygraph.reset()


def check(ours: Callable[..., Any], fn: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(ours(x, w), fn(x, w))


def states(report: GraphReport) -> list[str]:
    return [region.state for region in report.regions]


def only() -> GraphReport:
    (report,) = pygraph.reports()
    return report
