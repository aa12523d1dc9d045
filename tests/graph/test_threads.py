"""Threads that call graphs while another one captures."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import pygraph
from pygraph.graphs import entry
from tests.graph.calls import assert_same, is_replay

X = torch.arange(1.0, 5.0)


def test_a_callable_waits_for_a_thread_that_calls_another_graph() -> None:
    inner, others = pygraph.graph(lambda x: x * 2), torch.ones(4)
    with ThreadPoolExecutor(1) as pool:

        def function(x: torch.Tensor) -> torch.Tensor:
            made = x + 1
            pool.submit(inner, others).result(timeout=5)
            return made

        graph = pygraph.graph(function)
        for call in range(4):
            assert_same(is_replay(graph, X) if call > 1 else graph(X), X + 1)


def test_a_callable_waits_for_a_thread_that_calls_a_graph_with_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_LONGEST", 0.1)
    weight = torch.ones(4)
    inner, others = pygraph.graph(lambda x: x * weight, held=weight), torch.ones(4)
    with ThreadPoolExecutor(1) as pool:

        def function(x: torch.Tensor) -> torch.Tensor:
            made = x * weight
            pool.submit(inner, others).result(timeout=5)
            return made

        graph = pygraph.graph(function, held=weight)
        for _ in range(6):
            assert_same(graph(X), X)
        assert list(graph.record.refusals) == ["uncaptured-work"]


def test_calls_with_other_tensors_wait_for_no_capture() -> None:
    """And a capture waits for no long call but of its own tensors."""
    go, running = threading.Event(), threading.Event()

    def long(x: torch.Tensor) -> torch.Tensor:
        running.set()
        go.wait(30)
        return x + 1

    graph, same = pygraph.graph(lambda x: x * 2), pygraph.graph(lambda x: x * 2)
    thread = threading.Thread(target=pygraph.graph(long), args=(X,))
    thread.start()
    running.wait(30)
    try:
        other = X.clone()
        for call in range(20):
            assert_same(is_replay(graph, other) if call > 1 else graph(other), X * 2)
            assert_same(same(X), X * 2)
        assert list(same.record.refusals) == ["capture-busy"]
        assert not same.record.replays
    finally:
        go.set()
        thread.join()
