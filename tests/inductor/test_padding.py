"""Matrices that several products read padded: padded once where that is the same, and the results are eager's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import pygraph
from pygraph.inductor import rewrites
from tests.property.test_cut_programs import DrawRegions
from tests.small import UNFUSED

pad = torch.ops.aten.constant_pad_nd  # as Inductor calls it
Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Of a square matrix of 13 rows, one of 16 rows, and another square matrix of 13 rows."""


def transposed(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g, (0, 3)) @ w, pad(g.t(), (0, 0, 0, 3)) @ h


def transposed_first(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g.permute(-1, -2), (0, 0, 0, 3)) @ h, pad(g, (0, 3)) @ w


def at_all_sides(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g, (1, 2, 0, 4)) @ w, pad(g.t(), (0, 4, 1, 2)) @ pad(h, (0, 0, 1, 3))


def with_bias(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    """The padded matrix is an operand of one product, and what another one is added to."""
    return torch.addmm(pad(g.t(), (0, 0, 0, 3)), pad(h, (0, 0, 0, 3)), h), pad(g, (0, 3)) @ w


def after_a_write(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    g.mul_(2)
    return pad(g, (0, 3)) @ w, pad(g.t(), (0, 0, 0, 3)) @ h


share = rewrites.share_padding


def shared(gm: torch.fx.GraphModule) -> tuple[int, int]:
    """Numbers of paddings before and after. The graph is sound, and stays as it is if nothing is shared."""
    before, text = len(gm.graph.find_nodes(op="call_function", target=pad.default)), str(gm.graph)
    share(gm)
    gm.graph.lint()
    pads = gm.graph.find_nodes(op="call_function", target=pad.default)
    turned = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)
    assert len(pads) < before or str(gm.graph) == text
    for node in (*pads, *turned):
        assert node.users
        expected = node.target(node.args[0].meta["val"], *node.args[1:])
        assert (node.meta["val"].shape, node.meta["val"].stride()) == (expected.shape, expected.stride())
    return before, len(pads)


def noted(counts: list[tuple[int, int]]) -> Any:
    """Context that notes the paddings of each graph that is compiled."""
    return mock.patch.object(rewrites, "share_padding", lambda gm: counts.append(shared(gm)))


def run(program: Program, options: object = None) -> list[tuple[int, int]]:
    """Numbers of paddings before and after, in each graph of ``program``, whose results and inputs are eager's."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) for size in ((13, 13), (16, 5), (13, 13))]
    counts = list[tuple[int, int]]()

    torch.compiler.reset()
    compiled = torch.compile(program, backend="pygraph", options={**UNFUSED, **(options or {})})
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, noted(counts), torch.no_grad():
        for _ in range(4):
            ours, theirs = [each.clone() for each in given], [each.clone() for each in given]
            torch.testing.assert_close(compiled(*ours), program(*theirs), rtol=0, atol=1e-4)
            torch.testing.assert_close(ours, theirs)
    assert not pygraph.reports()[-1].error
    return counts


@pytest.mark.parametrize(
    "program",
    [transposed, transposed_first, at_all_sides, with_bias, after_a_write],
    ids=lambda program: program.__name__,
)
def test_a_matrix_is_padded_once_for_all_products(program: Program) -> None:
    ((before, after),) = run(program)
    assert after == before - 1


def written(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    one = pad(g, (0, 3)) @ w
    g[1:3].copy_(g[3:5])
    return one, pad(g.t(), (0, 0, 0, 3)) @ h


def written_through_a_view(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    turned = g.t()
    one = pad(g, (0, 3)) @ w
    g[0].zero_()
    return one, pad(turned, (0, 0, 0, 3)) @ h


def written_inside(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    x = g.sin()
    one = pad(x, (0, 3)) @ w
    x.diagonal().fill_(0)
    return one, pad(x.t(), (0, 0, 0, 3)) @ h


@torch.library.custom_op("pygraph_test::halve_first_row", mutates_args=("x",))
def halve_first_row(x: torch.Tensor) -> None:
    x[0] /= 2


def written_by_a_user(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    one = pad(g, (0, 3)) @ w
    halve_first_row(g)
    return one, pad(g.t(), (0, 0, 0, 3)) @ h


def other_matrix(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g, (0, 3)) @ w, pad(h.t(), (0, 0, 0, 3)) @ h


def other_side(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g, (0, 3)) @ w, pad(g.t(), (0, 0, 3, 0)) @ h


def other_side_of_the_transpose(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g, (0, 3)) @ w, pad(g.t(), (0, 3)) @ w


def other_number(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g, (0, 3)) @ w, pad(g.t(), (0, 0, 0, 3), 1.0) @ h


def other_reader(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    turned = pad(g.t(), (0, 0, 0, 3))
    return pad(g, (0, 3)) @ w, turned @ h, turned.relu()


def far_away(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    """Held from one product to the other, the padded matrix would take memory meanwhile."""
    one = pad(g, (0, 3)) @ w
    last = functools.reduce(lambda made, _: made.sin(), range(70), one)
    return one, pad(g.t(), (0, 0, 0, 3)) @ (h + last.sum())


def in_a_batch(g: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> object:
    return pad(g[None], (0, 3)).bmm(w[None]), pad(g[None].mT, (0, 0, 0, 3)).bmm(h[None])


@pytest.mark.parametrize(
    "program",
    [
        written,
        written_through_a_view,
        written_inside,
        written_by_a_user,
        other_matrix,
        other_side,
        other_side_of_the_transpose,
        other_number,
        other_reader,
        in_a_batch,
    ],
    ids=lambda program: program.__name__,
)
def test_paddings_that_may_differ_stay(program: Program) -> None:
    ((before, after),) = run(program)
    assert before == after > 0


def test_a_padded_bias_stays() -> None:
    def biases(b: torch.Tensor, h: torch.Tensor) -> object:
        return tuple(torch.addmm(pad(b, (0, 3)), h, h + number) for number in range(2))

    gm = make_fx(biases, tracing_mode="fake")(torch.randn(10), torch.randn(13, 13))
    assert shared(gm) == (2, 2)


def test_a_padded_matrix_is_not_held_for_long() -> None:
    options = {"inductor": {**UNFUSED["inductor"], "reorder_for_locality": False}}
    assert run(far_away, options) == [(2, 2)]


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ pad(weight, (0, 3))).tanh()


def test_what_is_computed_again_has_a_padding_of_its_own() -> None:
    """The first one would be held until then."""
    counts = list[tuple[int, int]]()
    weight = torch.nn.Parameter(torch.ones(13, 13))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @pygraph.train_step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint(block, x, weight, use_reentrant=False).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with torch._inductor.config.patch(force_disable_caches=True), noted(counts):
        step(torch.ones(4, 13))
    assert counts == [(3, 3)], "of the weight, of the weight again, and of its gradient"


def test_regions_of_a_pass_share_no_padding() -> None:
    assert run(transposed, {"passes": ["legality", "placement", DrawRegions(1)]}) == []
