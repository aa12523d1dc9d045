"""Callables in pairs: one is a graph, its twin runs as it is, and both have to do the same, bit by bit."""

from __future__ import annotations

from typing import Any

import torch

from tests.runtime.regions import same_bits


def replayed(graph: Any, *args: Any, calls: int = 2, **kwargs: Any) -> Any:
    """Call ``graph`` until it is captured; the last result."""
    result = None
    for _ in range(calls):
        result = graph(*args, **kwargs)
    assert graph.record.captures, graph.record
    return result


def is_replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a call that has to be a replay."""
    before = graph.record.replays
    result = graph(*args, **kwargs)
    assert graph.record.replays == before + 1, graph.record
    return result


def assert_same(left: Any, right: Any) -> None:
    """Asserts one structure, and equal bits."""
    if isinstance(left, dict):
        assert isinstance(right, dict)
        assert list(left) == list(right)
        left, right = list(left.values()), list(right.values())
    assert same_bits(left, right), (left, right)


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Copies of everything that a step leaves: parameters, buffers, gradients, state of the optimizer."""
    found = [*module.state_dict().values()]
    found += [p.grad for p in module.parameters() if p.grad is not None]
    for parameter in module.parameters():
        state = optimizer.state[parameter] if optimizer is not None else {}
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in found]
