"""Compilations cost with the calibrated model of their device, where there is one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import pygraph
from pygraph.calibration.store import identity_of, save
from pygraph.inductor.compile import model_for
from pygraph.ir import HOST, Peak
from pygraph.passes import PassContext
from pygraph.passes.manager import read_header, write_reproducer
from tests.calibration.samples import MODEL, calibration
from tests.passes.build import build

COSTLY, FREE = 1e4, 1e-6
"""Launches that no replay could beat, or that no replay could be beaten by, µs."""


def compiled(fn: object, **options: object) -> pygraph.api.GraphReport:
    """The report of one graph of ``fn`` on a small tensor."""
    torch._dynamo.reset()
    pygraph.reset()
    step = torch.compile(fn, backend="pygraph", options=options)  # type: ignore[call-overload]
    with torch.no_grad():
        for _ in range(3):
            step(torch.ones(8, 8))
    (report,) = pygraph.reports()
    return report


def products(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.relu(x @ x)
    return x


def test_without_a_calibration_the_built_in_model_is_used() -> None:
    assert model_for("cpu") is HOST


def test_float32_may_be_costed_as_tf32() -> None:
    made = calibration(identity_of("cpu"))
    model = dataclasses.replace(made.model, peaks=(Peak("f32", 10.0), Peak("tf32", 70.0)))
    save(dataclasses.replace(made, model=model))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert model_for("cpu").peak("f32").gflops == 10.0
        torch.set_float32_matmul_precision("high")
        assert model_for("cpu").peak("f32").gflops == 70.0
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("launch_us", [COSTLY, FREE], ids=["costly", "free"])
def test_selection_goes_by_the_calibrated_model(launch_us: float) -> None:
    save(calibration(identity_of("cpu"), launch_us=launch_us))
    report = compiled(products)
    (region,) = report.regions
    assert report.model is not None
    assert report.model.launch_us == launch_us
    assert report.decision is not None
    assert bool(report.decision.selected) == (launch_us == COSTLY)
    assert region.wrapped == (launch_us == COSTLY)
    assert region.state == ("replay" if launch_us == COSTLY else "uncaptured")


@pytest.mark.usefixtures("fresh")
def test_a_changed_model_decides_anew_where_the_program_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    states = []
    for launch_us in (COSTLY, FREE, COSTLY):
        save(calibration(identity_of("cpu"), launch_us=launch_us))
        states.append(compiled(products).regions[0].state)
    assert states == ["replay", "uncaptured", "replay"]


@pytest.mark.usefixtures("fresh")
def test_the_report_says_which_model_it_was() -> None:
    from pygraph.report.facts import json_text
    from pygraph.report.text import render_text

    before = render_text([compiled(products)], 160)
    assert "time modelled on host, built-in" in before
    save(calibration(identity_of("cpu")))
    report = compiled(products)
    assert f"time modelled on {MODEL.name}, calibrated 2026-01-02" in render_text([report], 160)
    assert json.loads(json_text([report]))["graphs"][0]["cost_model"] == MODEL.label


def test_a_reproducer_carries_a_calibrated_model(tmp_path: Path) -> None:
    graph = build("a: launch x")
    for model in (HOST, MODEL):
        path = write_reproducer(graph, "legality", PassContext("cpu", model), "name", "error", tmp_path)
        assert path is not None
        found = read_header(Path(path).read_text())
        assert found.ctx is not None
        assert found.ctx.model == model
