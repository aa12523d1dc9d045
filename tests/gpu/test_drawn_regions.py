"""Regions that a pass draws are the partitions of programs on the device, forward and backward, and are replayed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pygraph
from pygraph.ir import REGION, SELECTED
from tests.gpu.programs import DEVICE, assert_same, compiled, device_tensor, figures
from tests.property.test_cut_programs import DrawRegions

pytestmark = pytest.mark.usefixtures("fresh")


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with its norm and residual."""

    def __init__(self, size: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.inward, self.outward = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inward(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.outward(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


@pytest.mark.parametrize("seed", range(6))
def test_partitions_are_the_regions_of_a_training_step(seed: int) -> None:
    model = nn.Sequential(Block(), Block()).to(DEVICE)
    expected = copy.deepcopy(model)
    ours = compiled(model, passes=["legality,placement", DrawRegions(seed)])
    with torch.enable_grad():
        for call in range(5):
            x = device_tensor(2, 16, 64)
            for module in (ours, expected):
                module.zero_grad()
                module(x).square().mean().backward()
            gradients = [[each.grad for each in module.parameters()] for module in (model, expected)]
            assert_same(*gradients, call=call)
    for report in pygraph.reports():
        assert report.error is None, figures()
        assert report.record.differences == (), figures()
        decided = {node.name: node.meta.get(REGION) for node in report.graph.nodes if node.cost.launches != 0}
        for region in report.regions:
            (planned,) = region.planned
            assert {decided[name] for name in region.nodes if name in decided} <= {planned}
            assert region.wrapped == (report.graph.regions[planned].meta.get(SELECTED) and bool(region.kernels))
            assert region.state == "replay" or not region.wrapped, figures()
