"""Programs compiled on CUDA, against Inductor alone: values, mutation, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.programs import assert_replayed, assert_same, compiled, figures, wrapped_regions
from tests.gpu.programs import device_tensor as cuda

CALLS = 5

pytestmark = pytest.mark.usefixtures("fresh")


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
    "attention": (attention_block, lambda: (cuda(2, 64, 128, dtype=torch.half), cuda(128, 384, dtype=torch.half))),
    "decode": (decode, lambda: (cuda(4, 32, 16), torch.tensor([7], device="cuda"), cuda(4, 1, 16))),
    "mixed": (mixed, lambda: (cuda(32, 65),)),
    "dropout": (lambda x, w: F.dropout(F.relu(x @ w), 0.3) + torch.rand_like(x), lambda: (cuda(64, 64), cuda(64, 64))),
    "scalars": (lambda x, n: (x * n + x, x.shape[0] + n), lambda: (cuda(8, 8), 3)),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in PROGRAMS]
    + [(name, {"verify": "always"}) for name in ("attention", "dropout", "decode")]
    + [(name, {"verify": "always", "order": "dependences"}) for name in PROGRAMS],
    ids=str,
)
def test_equals_inductor(name: str, options: dict[str, Any]) -> None:
    """Fresh inputs on every call; arguments that are mutated end equal, too."""
    assert_equals_inductor(name, options, CALLS)
    assert_replayed()


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_inductor_while_calls_are_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever order of its launches a call is replayed, while real calls choose among them."""
    monkeypatch.setenv("PYGRAPH_LEDGER", "1")
    assert_equals_inductor(name, {"order": "measured"}, 150)
    records = [region.record for region in wrapped_regions()]
    assert any(record is not None and record.ledger is not None and record.ledger.replays for record in records), (
        figures()
    )


def assert_equals_inductor(name: str, options: dict[str, Any], calls: int) -> None:
    """The results and arguments of ``calls`` calls, each with inputs of its own."""
    function, make = PROGRAMS[name]
    ours, theirs = compiled(function, **options), torch.compile(function)
    for seed in range(calls):
        torch.manual_seed(seed)
        mine = make()
        yours = copy.deepcopy(mine)
        torch.manual_seed(100 + seed)
        actual = ours(*mine)
        torch.manual_seed(100 + seed)
        expected = theirs(*yours)
        assert_same(actual, expected)
        assert_same(mine, yours)
