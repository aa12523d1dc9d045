"""The warm starts that are timed are warm, and their programs run."""

from __future__ import annotations

import pytest

from benchmarks import warm_start


def test_a_later_process_restores_everything_and_replays() -> None:
    row = warm_start.measure("mlp", "cpu", 1)
    assert row["misses"] == 0
    assert row["replay"] > row["pygraph warm"] > 0
    assert row["ratio warm"] == row["pygraph warm"] / row["inductor warm"]


@pytest.mark.parametrize("name", warm_start.PROGRAMS)
def test_programs_run(name: str) -> None:
    warm_start.program(name, "cpu")(lambda fn: fn)()


def test_the_mean_is_geometric() -> None:
    assert warm_start.mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
