"""Bisecting: pipelines cut short, and the first pass after which something no longer holds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from pygraph.ir import Graph, Stage
from pygraph.passes import Pass, PassManager, bisect
from tests.passes.sample_passes import PIPELINE, Idle, Raising, sample


def test_a_bisect_limit_stops_the_pipeline_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graph = sample()
    with caplog.at_level(logging.WARNING, "pygraph"):
        result = PassManager(PIPELINE, bisect_limit=1).run(graph)
    assert [record.name for record in result.passes] == ["partitioning"]
    assert result.skipped == ("indirection", "selection")
    assert graph.stage is Stage.PARTITIONED
    assert [record.message for record in caplog.records] == [
        "BISECT: running pass (1) partitioning on main",
        "BISECT: NOT running pass (2) indirection on main",
        "BISECT: NOT running pass (3) selection on main",
    ]


@pytest.mark.parametrize("limit", [0, 3, 99])
def test_the_limit_counts_executions(limit: int) -> None:
    result = PassManager(PIPELINE, bisect_limit=limit).run(sample())
    assert len(result.passes) == min(limit, 3)


def not_two_regions(graph: Graph) -> bool:
    return len(graph.regions) != 2


@pytest.mark.parametrize(
    ("pipeline", "good", "culprit"),
    [
        ([Idle(), PIPELINE], not_two_regions, (2, "partitioning")),
        ([PIPELINE], lambda graph: graph.stage is not Stage.SELECTED, (3, "selection")),
        (["partitioning", Raising(), "indirection"], lambda graph: True, (2, "raising")),
    ],
)
def test_bisect_finds_the_pass(
    pipeline: list[Pass | str], good: Callable[[Graph], bool], culprit: tuple[int, str]
) -> None:
    graph = sample()
    found = bisect(pipeline, graph, good)
    assert found is not None
    step, before = found
    assert (step.number, step.name) == culprit
    assert good(before)
    assert graph == sample()


def test_bisect_finds_nothing_where_all_is_well() -> None:
    assert bisect(PIPELINE, sample(), lambda graph: True) is None


def test_bisect_needs_a_good_start() -> None:
    with pytest.raises(ValueError, match="not good before the first pass"):
        bisect(PIPELINE, sample(), lambda graph: False)
