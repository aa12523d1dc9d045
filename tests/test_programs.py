"""Small programs of many kinds against eager, call after call: values, mutation, aliasing, devices, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import pygraph

pytestmark = pytest.mark.usefixtures("fresh")

CALLS = 4
EVERYTHING = {"passes": "legality,placement,partitioning,indirection"}
"""Capture whatever can be captured, however little a graph would save."""
Make = Callable[[], tuple[Any, ...]]


@torch.library.custom_op("pygraph_programs::scaled_add_", mutates_args=("out",))
def scaled_add_(out: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    out.add_(x, alpha=factor)


@torch.library.custom_op("pygraph_programs::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def mutate_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(a)
    return (a @ b.t()).relu()


def view_of_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[1:].t(), (x + 1).sum(0)


def input_returned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x, torch.tanh(y) @ y.t(), y


def aliased_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x @ x.t())
    return y, y.view(-1)[2:6]


def several_lengths(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, order = torch.sort(x, dim=-1, descending=True)
    top, at = torch.topk(x.abs(), 3)
    return values.cumsum(-1), order, top, at, torch.cat([values, top], -1)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(x @ x.t()).abs() + 1


def branches(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x.t())
    z = torch.cond(y.sum() > 10, torch.sin, torch.cos, (y,))
    return z @ y


def with_custom_operators(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    y = twice(torch.relu(x))
    scaled_add_(out, y, 0.5)
    return out.sum() + y.mean()


def stepped(x: torch.Tensor) -> torch.Tensor:
    for i in range(4):
        x = torch.where(x > 0.1 * i, x - 0.1, x * 1.5)
    return x @ x.t()


def scatter(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(6, x.shape[1])
    return base.index_add(0, index, x).scatter(0, index[:, None].expand_as(x), x)


def numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.to(torch.float64).exp() / 3, (x * 7).to(torch.int32) // 3, x > 0


def rand(*size: int) -> Make:
    return lambda: (torch.randn(size),)


PROGRAMS: dict[str, tuple[Callable[..., Any], Make]] = {
    "mutate-two": (mutate_two, lambda: (torch.randn(4, 4), torch.randn(4, 4))),
    "view-of-input": (view_of_input, rand(4, 5)),
    "input-returned": (input_returned, lambda: (torch.randn(3), torch.randn(4, 4))),
    "aliased-outputs": (aliased_outputs, rand(4, 5)),
    "sort-topk-cat": (several_lengths, rand(4, 7)),
    "fft": (spectrum, rand(4, 8)),
    "cond": (branches, rand(4, 4)),
    "custom-operators": (with_custom_operators, lambda: (torch.randn(4), torch.zeros(4))),
    "unrolled": (stepped, rand(5, 5)),
    "scatter": (scatter, lambda: (torch.randn(4, 3), torch.tensor([0, 2, 5, 1]))),
    "dtypes": (numbers, rand(4, 9)),
    "empty": (lambda x: (x * 2).sum(0) + x.shape[0], rand(0, 4)),
    "scalar": (lambda x: (x.sin() + 1).mean() * 2, rand()),
    "conv": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)).eval(), rand(2, 3, 9, 9)),
    "gru-cell": (nn.GRUCell(8, 8), rand(2, 8)),
    "attention": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), rand(2, 6, 16)),
    "embedding": (nn.EmbeddingBag(20, 8), lambda: (torch.randint(0, 20, (4, 3)),)),
}


def compiled(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="pygraph", options=EVERYTHING, **keywords)


def leaves(tree: Any) -> list[Any]:
    return tree_flatten(tree)[0]


def shared(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor with elements, the first one that lies in the same memory, and how many bytes behind it."""
    some = [t for t in tensors if t.numel()]
    memories = [t.untyped_storage().data_ptr() for t in some]
    firsts = [memories.index(memory) for memory in memories]
    return [(first, t.data_ptr() - some[first].data_ptr()) for first, t in zip(firsts, some, strict=True)]


SEVERAL_KERNELS = ("unrolled", "gru-cell", "scalar")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name in SEVERAL_KERNELS)) for name in PROGRAMS]
)
def test_program_equals_eager(name: str) -> None:
    function, make = PROGRAMS[name]
    ours = compiled(function)
    with torch.no_grad():
        for _ in range(CALLS):
            inputs = make()
            twins = tuple(x.clone() for x in inputs)
            expected, actual = leaves(function(*twins)), leaves(ours(*inputs))
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(inputs, twins)
            assert shared([*actual, *inputs]) == shared([*expected, *twins])
    assert [report.error for report in pygraph.reports()] == [None] * len(pygraph.reports())
    regions = [region for report in pygraph.reports() for region in report.regions]
    assert regions
    assert [region.why for region in regions if region.state != "replay"] == []


def test_the_same_tensor_twice_and_overlapping_inputs() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * 2 + b).cumsum(0) @ b.t()

    ours = compiled(f)
    base = torch.randn(10, 4)
    for i in range(6):
        a, b = base[i % 3 : i % 3 + 5], base[i % 2 : i % 2 + 5]
        torch.testing.assert_close(ours(a, b), f(a, b))
    x = torch.randn(5, 4)
    torch.testing.assert_close(ours(x, x), f(x, x))


def test_an_error_of_the_program_reaches_the_caller_each_time() -> None:
    def f(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).index_select(0, index) * 2

    ours = compiled(f)
    x = torch.randn(4, 3)
    for _ in range(CALLS):
        torch.testing.assert_close(ours(x, torch.tensor([0, 3])), f(x, torch.tensor([0, 3])))
    with pytest.raises((RuntimeError, IndexError)):
        ours(x, torch.tensor([0, 9]))
    torch.testing.assert_close(ours(x, torch.tensor([1, 2])), f(x, torch.tensor([1, 2])))


def test_a_float_that_changes_with_each_call() -> None:
    def f(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.relu(x * factor) @ x.t()

    with torch._dynamo.config.patch(specialize_float=False):
        ours = compiled(f, dynamic=True)
        for i in range(8):
            x = torch.randn(4, 4)
            torch.testing.assert_close(ours(x, 0.5 + i), f(x, 0.5 + i))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_grad_modes(mode: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    ours = compiled(model)
    for _ in range(CALLS):
        x = torch.randn(3, 8)
        with mode():
            y = ours(x)
        assert y.is_inference() == (mode is torch.inference_mode)
        torch.testing.assert_close(y.clone(), model(x).detach())


def test_parameters_that_are_reassigned_are_followed() -> None:
    model = nn.Linear(8, 8)
    ours = compiled(model)
    with torch.no_grad():
        for _ in range(6):
            model.weight.data = torch.randn(8, 8)
            x = torch.randn(3, 8)
            torch.testing.assert_close(ours(x), model(x))


def test_accumulated_gradients() -> None:
    model, eager = nn.Linear(8, 8), nn.Linear(8, 8)
    eager.load_state_dict(model.state_dict())
    ours = compiled(model)
    for _ in range(CALLS):
        x = torch.randn(3, 8)
        ours(x).sin().sum().backward()
        eager(x).sin().sum().backward()
        torch.testing.assert_close(model.weight.grad, eager.weight.grad)
