"""Numbers that foreach operators combine with larger tensors: converted once, with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.inductor.rewrites import compute_scalars_once

CONVERT = torch.ops.prims.convert_element_type.default


def update(weights: list[torch.Tensor], steps: list[torch.Tensor], beta: torch.Tensor) -> list[torch.Tensor]:
    corrections = torch._foreach_sqrt(torch._foreach_sub(torch._foreach_pow([beta] * len(steps), steps), 1.5))
    scaled = torch._foreach_div(weights, torch._foreach_abs(corrections))
    return list(torch._foreach_mul(scaled, [beta] * len(scaled)))


def traced(beta: torch.dtype, weight: torch.dtype = torch.float) -> tuple[torch.fx.GraphModule, list[Any]]:
    torch.manual_seed(0)
    weights = [torch.randn(size).to(weight) for size in ((3, 4), (5,))]
    given = [weights, [torch.tensor(3.0), torch.tensor(7.0)], torch.tensor(1.9, dtype=beta)]
    return make_fx(update)(*given), given


@pytest.mark.parametrize("weight", [torch.float, torch.bfloat16], ids=str)
def test_doubles_that_a_foreach_operator_makes_are_converted_and_results_are_the_same(weight: torch.dtype) -> None:
    gm, given = traced(torch.double, weight)
    before = gm(*given)
    compute_scalars_once(gm)
    converted = gm.graph.find_nodes(op="call_function", target=CONVERT)
    assert len(converted) == 2  # the number that came from outside is no power of anything
    assert {node.args[1] for node in converted} == {torch.float}
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(gm(*given), before, strict=True))


@pytest.mark.parametrize(("beta", "weight"), [(torch.float, torch.float), (torch.double, torch.double)])
def test_other_numbers_stay_as_they_are(beta: torch.dtype, weight: torch.dtype) -> None:
    gm, _ = traced(beta, weight)
    compute_scalars_once(gm)
    assert not gm.graph.find_nodes(op="call_function", target=CONVERT)
