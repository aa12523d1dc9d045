"""What a program reads of a tensor has the old value where an operator writes the tensor later, however late Inductor
computes it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering


@torch.library.custom_op("pygraph_late::add_", mutates_args=("x",))
def add(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


add.register_fake(lambda x, y: None)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("named", [False, True])
def test_an_operator_of_another_library_writes_behind_what_was_read_before(named: bool) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        change = y + (doubled * 3).sum()
        if named:
            torch.ops.pygraph_late.add_(y=change, x=x)
        else:
            torch.ops.pygraph_late.add_(x, change)
        return (doubled + 1) * 5

    with config.patch(force_disable_caches=True):
        ours = torch.compile(step, backend="pygraph")
        for call in range(4):
            given = [torch.arange(8.0) + call, torch.ones(8)]
            expected = [tensor.clone() for tensor in given]
            torch.testing.assert_close(ours(*given), step(*expected))
            torch.testing.assert_close(given, expected)


class Listed(Exception):
    """Inductor has listed what it will compute."""


@pytest.mark.usefixtures("fresh")
def test_foreach_operators_write_behind_what_was_read_before() -> None:
    """Inductor writes in place by foreach operators on GPUs only: nothing is compiled here but its list."""
    listed: list[tuple[set[str], set[str]]] = []

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        doubled, tripled = x * 2, y * 3
        torch._foreach_add_([x, y], [z + doubled.sum(), z + tripled.sum()])
        return doubled.amax() + tripled.amax()

    def codegen(self: Any) -> None:
        listed.extend((set(each.get_read_names()), set(each.get_mutation_names())) for each in self.operations)
        raise Listed

    with (
        mock.patch.object(GraphLowering, "has_feature", return_value=True),
        mock.patch.object(GraphLowering, "codegen", codegen),
        config.patch(force_disable_caches=True, reorder_for_locality=False),
        pytest.raises(Exception, match="Listed"),
    ):
        torch.compile(step, backend="pygraph", options={"strict": True})(*(torch.ones(8) for _ in range(3)))
    written = set[str]()
    for reads, writes in listed:
        assert not (reads - writes) & written, f"{reads} is read behind a write of {written}"
        written |= writes
    assert len(written) == 2
