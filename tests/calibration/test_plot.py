"""The picture: a PNG, with every point in its panel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pygraph.calibration.plot import PlotError, draw, figure_of
from pygraph.calibration.records import PANELS
from tests.calibration.samples import calibration

PNG = b"\x89PNG\r\n\x1a\n"


def scattered(axes: Any) -> set[tuple[float, float]]:
    """(measured, predicted) of all markers."""
    drawn = [collection for collection in axes.collections if collection.get_gid()]
    return {(float(x), float(y)) for collection in drawn for x, y in collection.get_offsets()}


def test_every_point_is_in_its_panel_and_range() -> None:
    pytest.importorskip("matplotlib")
    made = calibration()
    panels = figure_of(made).axes
    assert [axes.get_title() for axes in panels] == list(PANELS.values())
    for axes, name in zip(panels, PANELS, strict=True):
        points = made.panel(name)
        assert points
        assert scattered(axes) == {(point.measured_us, point.predicted_us) for point in points}
        low, high = axes.get_xlim()
        assert axes.get_ylim() == (low, high)
        assert all(low < time < high for p in points for time in (p.measured_us, p.predicted_us))
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == ["equal", "within a factor of 2", *dict.fromkeys(point.kind for point in points)]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_device_and_the_error_are_said() -> None:
    pytest.importorskip("matplotlib")
    figure = figure_of(calibration())
    assert "some device, calibrated 2026-01-02" in figure.get_suptitle()
    assert "within a factor of 1.17 for half of them" in figure.axes[0].get_xlabel()


def test_a_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    draw(calibration(), path)
    assert path.read_bytes().startswith(PNG)


def test_without_matplotlib_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"install pygraph\[plot\].*--json.*--from"):
        draw(calibration(), tmp_path / "out.png")
