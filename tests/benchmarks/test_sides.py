"""The suite's own sides: where CUDA graphs by hand apply, which sides a device has."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from benchmarks.sides import SUITE_SIDES, why_not_graphed
from pygraph.bench.sides import sides_for


def test_where_it_does_not_apply_it_says_why() -> None:
    x, module = torch.ones(2, 2), nn.Linear(2, 2)
    assert why_not_graphed(torch.sin, [x], {}) == "what is compiled is no nn.Module"
    assert why_not_graphed(module, [], {"input": x}) == "the module is called with keyword arguments (input)"
    assert why_not_graphed(module, [x, 3], {}) == "an argument is no tensor, but int"
    assert why_not_graphed(module, [x], {}) == "an argument is a tensor of the CPU"
    with FakeTensorMode():
        there = torch.empty(2, 2, device="cuda")
    assert why_not_graphed(module, [there], {}) == "a parameter or buffer lies on the CPU"
    assert why_not_graphed(nn.ReLU(), [there], {}) is None


def test_sides_are_those_that_a_device_has() -> None:
    by_hand = ("make-graphed-callables", "whole-step")
    assert sides_for([], "cuda", SUITE_SIDES) == (
        "eager",
        "default",
        "reduce-overhead",
        *by_hand,
        "pygraph",
        "step",
        "graph",
    )
    assert sides_for([], "cpu", SUITE_SIDES) == ("eager", "default", "pygraph", "step", "graph")
    assert sides_for(["pygraph"], "cpu", SUITE_SIDES) == ("eager", "pygraph")
    assert sides_for(["pygraph", "program-order"], "cuda", SUITE_SIDES) == ("eager", "program-order", "pygraph")
