"""A whole calibration of the CPU, with little effort, and the command that makes one."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pygraph.calibration import run
from pygraph.calibration.records import DEVICE, HOST_CALL, Calibration, error_of
from pygraph.calibration.store import identity_of, load, stored_model
from pygraph.calibration.targets import CHECKED_CHAINS, CHECKED_WIDES
from pygraph.calibration.validation import LEAST_US, Check, points, workloads
from pygraph.cli import main
from pygraph.runtime import counters
from tests.calibration.samples import QUICK, calibration, point

FEW = 4


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return run.calibrate("cpu", QUICK, chosen=workloads("cpu")[:FEW])


def test_all_figures_of_the_model_are_measured(measured: Calibration) -> None:
    fields = {figure.field for figure in measured.figures} - {""}
    needed = {"launch_us", "replay_us", "node_us", "patch_us", "copy_us", "kernel_us", "bandwidth_gbs", "peak_gflops"}
    assert fields >= needed
    for figure in measured.figures:
        assert figure.low <= figure.value <= figure.high
        assert not figure.field or getattr(measured.model, figure.field) == figure.value
    assert {"f32", "bf16", "f16"} <= {peak.dtype for peak in measured.model.peaks}
    assert measured.model.peak_gflops == measured.model.peak("f32").gflops
    assert measured.model.source == f"calibrated {measured.date[:10]}"
    assert measured.model.name == measured.identity.device


def test_figures_are_possible_on_any_cpu(measured: Calibration) -> None:
    model = measured.model
    assert 0.01 < model.launch_us < 1000
    assert 0.01 < model.replay_us < 1000
    assert 0 <= model.node_us < model.launch_us, "a captured launch is cheaper than an uncaptured one"
    assert 0 <= model.patch_us < 100
    assert 0.1 < model.bandwidth_gbs < 5000
    assert 0.1 < model.peak_gflops < 100_000


def test_predictions_are_of_what_nothing_was_fitted_to(measured: Calibration) -> None:
    assert [point.name for point in measured.panel(DEVICE)] == [work.name for work in workloads("cpu")[:FEW]]
    calls = [point.name for point in measured.panel(HOST_CALL)]
    counts = [*CHECKED_CHAINS, *CHECKED_CHAINS, *CHECKED_WIDES]
    assert calls == [f"{count} launches" for count in counts]
    assert all(0 < point.predicted_us < math.inf and point.low_us <= point.high_us for point in measured.points)


def test_a_prediction_of_nothing_has_an_error_all_the_same() -> None:
    check = Check(HOST_CALL, "replay", "2 launches", lambda: 1.0, lambda model: model.node_us * 0)
    unknown = dataclasses.replace(check, predict=lambda model: None)
    found = points([check, unknown], [(1.0, 2.0, 3.0), (1.0, 2.0, 3.0)], calibration().model)
    assert [(point.predicted_us, point.measured_us) for point in found] == [(LEAST_US, 2.0)]
    error = error_of(found)
    assert error is not None
    assert error.median == pytest.approx(2.0 / LEAST_US)


def test_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    run.calibrate("cpu", QUICK, step=told.append, chosen=[])
    assert told[0] == "getting ready"
    assert told[-QUICK.rounds :] == [f"round {i + 1} of {QUICK.rounds}" for i in range(QUICK.rounds)]


def test_measuring_counts_as_nothing() -> None:
    before = counters.counters()
    run.calibrate("cpu", QUICK, chosen=[])
    assert counters.counters() == before


def test_every_workload_of_the_cpu_has_a_cost() -> None:
    kinds = {work.kind for work in workloads("cpu")}
    assert kinds >= {"pointwise", "copy", "reduction", "normalisation", "matrix product", "attention", "small graph"}
    names = [work.name for work in workloads("cpu")]
    assert len(set(names)) == len(names)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch, measured: Calibration) -> None:
    """The command measures with little effort."""
    monkeypatch.setattr(run, "calibrate", functools.partial(run.calibrate, effort=QUICK, chosen=workloads("cpu")[:1]))
    monkeypatch.setattr(Calibration, "unfit", lambda self: None)  # so little effort may well be off


def command(*args: str) -> Result:
    result = CliRunner().invoke(main, ["calibrate", *args], prog_name="pygraph")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.mark.usefixtures("quickly")
def test_the_command_measures_keeps_and_writes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written, drawn = tmp_path / "all.json", tmp_path / "plot.png"
    shown = command("--device", "cpu", "--json", str(written), "--plot", str(drawn))
    assert shown.exit_code == 0, shown.output
    found = Calibration.from_json(json.loads(written.read_text()))
    assert load(identity_of("cpu")) == found
    assert stored_model("cpu") == found.model
    assert drawn.read_bytes().startswith(b"\x89PNG")
    lines = shown.output.splitlines()
    for figure in found.figures:
        assert any(line.startswith(figure.name) and figure.unit in line for line in lines), figure.name
    assert sum("for nine in ten" in line for line in lines) == 2
    assert any(line.startswith("kept in ") for line in lines)
    assert "built in (host)" in shown.output


def test_a_model_that_predicts_badly_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibration(identity_of("cpu"))
    bad = dataclasses.replace(made, points=(*made.points[:1], point(100.0, 1.0), point(1.0, 100.0)))
    for found, kept in ((made, True), (bad, False)):
        monkeypatch.setattr(run, "calibrate", lambda *_, found=found, **__: found)
        shown = command("--device", "cpu")
        assert shown.exit_code == (0 if kept else 1)
        assert ("kept in" in shown.output) == kept
        assert "within a factor" in shown.output
        assert load(made.identity) == made, "the model from before stays"
    assert "device time per operator is off by more than a factor of 3 for half of them" in shown.stderr


@pytest.mark.usefixtures("quickly")
def test_nothing_is_kept_where_it_is_not_wanted() -> None:
    shown = command("--device", "cpu", "--no-save")
    assert shown.exit_code == 0
    assert "kept in" not in shown.output
    assert load(identity_of("cpu")) is None


def test_what_was_written_is_drawn_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written, drawn = tmp_path / "all.json", tmp_path / "plot.png"
    written.write_text(json.dumps(calibration().as_json()))
    shown = command("--from", str(written), "--plot", str(drawn))
    assert shown.exit_code == 0, shown.output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "some device, calibrated 2026-01-02, in 4.5 s" in shown.output
    assert "built in (h200)" in shown.output
    assert load(calibration().identity) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_a_file_that_is_no_calibration_is_a_failure(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    shown = command("--from", str(path))
    assert shown.exit_code == 1
    assert f"{path}: cannot be used" in shown.stderr


@pytest.mark.parametrize("more", [["--device", "cpu"], ["--no-save"]])
def test_from_measures_nothing(more: list[str], tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps(calibration().as_json()))
    shown = command("--from", str(path), *more)
    assert shown.exit_code == 2
    assert "--from measures nothing" in shown.stderr


def test_json_on_stdout_is_all_that_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps(calibration().as_json()))
    shown = command("--from", str(path), "--json", "-")
    assert Calibration.from_json(json.loads(shown.stdout)) == calibration()


def test_measurements_that_fit_no_model_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no size takes longer")

    monkeypatch.setattr(run, "calibrate", fail)
    shown = command("--device", "cpu")
    assert shown.exit_code == 1
    assert "no model fits what was measured: no size takes longer" in shown.stderr


def test_a_missing_device_is_a_failure() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    shown = command("--device", "cuda")
    assert shown.exit_code == 1
    assert "torch sees no CUDA device" in shown.stderr
