"""Matrices that several products read padded: one padding, and the same results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.inductor.rewrites import share_padding

aten = torch.ops.aten
GRADIENT, WEIGHT, STATES = torch.Size((6, 13)), torch.Size((13, 5)), torch.Size((6, 5))
Results = tuple[torch.Tensor, ...]


def both(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    """The gradients of both operands of a product, each with its operands padded, as Inductor does."""
    states = aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0]), aten.constant_pad_nd(w, [0, 0, 0, 3]))
    weight = aten.mm(aten.constant_pad_nd(aten.permute(g, [1, 0]), [0, 0, 0, 3]), x)
    return states, weight


def transposed_first(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    weight = aten.mm(aten.constant_pad_nd(aten.permute(g, [1, 0]), [0, 0, 0, 3]), x)
    return weight, aten.mm(aten.constant_pad_nd(g, [0, 3]), aten.constant_pad_nd(w, [0, 0, 0, 3]))


def twice(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    narrow, wide = aten.constant_pad_nd(w, [0, 0, 0, 3]), aten.constant_pad_nd(w, [0, 2, 0, 3])
    return tuple(aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0]), each) for each in (narrow, wide))


def batched(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    stack = torch.stack([g, g + 1])
    weights = aten.constant_pad_nd(w, [0, 0, 0, 3]).expand(2, -1, -1)
    turned = aten.permute(stack, [0, 2, 1])
    one = aten.bmm(aten.constant_pad_nd(stack, [0, 3, 0, 2, 0, 0]), weights)
    return one, aten.bmm(aten.constant_pad_nd(turned, [0, 2, 0, 3]), torch.ones(2, 8, 4, dtype=g.dtype))


def rewritten(function: Callable[..., Results]) -> tuple[int, int]:
    """Numbers of paddings before and after, where the results are the same."""
    torch.manual_seed(0)
    given = [torch.randn(size, dtype=torch.double) for size in (GRADIENT, WEIGHT, STATES)]
    gm = make_fx(function, tracing_mode="fake")(*given)
    before = len(gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default))
    share_padding(gm)
    gm.graph.lint()
    gm.recompile()
    for ours, theirs in zip(gm(*given), function(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for node in gm.graph.find_nodes(op="call_function", target=aten.permute.default):
        source, order = node.args
        assert node.meta["val"].shape == source.meta["val"].permute(order).shape
    return before, len(gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default))


@pytest.mark.parametrize(
    ("function", "paddings"),
    [(both, (3, 2)), (transposed_first, (3, 2)), (twice, (4, 3)), (batched, (3, 2))],
)
def test_a_matrix_is_padded_once_for_all_products(function: Callable[..., Results], paddings: Sequence[int]) -> None:
    assert rewritten(function) == paddings


def other_ends(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    left = aten.mm(aten.constant_pad_nd(g, [3, 0, 0, 0]), aten.constant_pad_nd(w, [0, 0, 3, 0]))
    return left, aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0]), aten.constant_pad_nd(w, [0, 0, 0, 3]))


def other_values(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    ones = aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0], 1.0), aten.constant_pad_nd(w, [0, 0, 0, 3]))
    return ones, aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0]), aten.constant_pad_nd(x.mT, [0, 0, 0, 11]))


def written(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    """A padded matrix that is no operand of a product alone may be written later."""
    other = aten.constant_pad_nd(aten.permute(g, [1, 0]), [0, 0, 0, 3])
    made = aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0]), aten.constant_pad_nd(w, [0, 0, 0, 3]))
    return made, other.add_(1)


def far(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Results:
    """Held from one product to the other, the padded matrix would take memory meanwhile."""
    first = aten.mm(aten.constant_pad_nd(g, [0, 3, 0, 0]), aten.constant_pad_nd(w, [0, 0, 0, 3]))
    between = functools.reduce(lambda made, _: made.sin(), range(80), x)
    return first, aten.mm(aten.constant_pad_nd(aten.permute(g, [1, 0]), [0, 0, 0, 3]), between)


@pytest.mark.parametrize("function", [other_ends, other_values, written, far])
def test_paddings_that_differ_or_are_far_apart_stay(function: Callable[..., Results]) -> None:
    before, after = rewritten(function)
    assert before == after
