"""Pictures: which there are, and that they show what the document has and nothing of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pygraph.bench.plots import draw, kinds
from tests.bench.documents import document

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n"


def texts(kind: str, found: dict[str, Any]) -> list[str]:
    from pygraph.bench import plots

    figure = plots._FIGURES[kind](found)
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_every_picture_is_written(tmp_path: Path) -> None:
    drawn = draw(document(), tmp_path / "results.png")
    assert [path.name for path in drawn] == ["results-gains.png", "results-memory.png", "results-ablations.png"]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    assert kinds({**document(), "workloads": {}}) == {}
    assert draw({**document(), "workloads": {}}, tmp_path / "results.png") == []


def test_bars_stand_for_ratios_and_words_for_what_has_none() -> None:
    from pygraph.bench import plots

    figure = plots._gains(document())
    over_reduce, over_default = figure.axes
    assert [round(float(bar.get_width()), 3) for bar in over_reduce.patches] == [0.25, -0.1, 0.25, 0.25]
    assert len(over_default.patches) == 4
    assert len({bar.get_facecolor() for bar in over_reduce.patches}) == 2
    said = texts("gains", document())
    assert said.count("wrong results") == 3
    assert "failed" in said
    assert over_reduce.get_xscale() == "log"


def test_a_mean_and_a_dot_for_each_workload() -> None:
    from pygraph.bench import plots

    figure = plots._ablations(document())
    (axis,) = figure.axes
    assert [len(dots.get_offsets()) for dots in axis.collections] == [5]
    assert texts("ablations", document()) == ["1.90 (5)"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["without capture"]


def test_the_title_says_on_what(tmp_path: Path) -> None:
    from pygraph.bench import plots

    assert plots._where(document()) == "NVIDIA H200, torch 2.11.0, 2026-11-21"
