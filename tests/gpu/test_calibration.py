"""The device model of this GPU: measured in seconds, possible on any data-centre GPU, and near what it predicts."""

from __future__ import annotations

import math
import time

import pytest
import torch

from pygraph.calibration.records import DEVICE, HOST_CALL, PANELS, Calibration, error_of
from pygraph.calibration.run import calibrate
from pygraph.calibration.store import save, stored_model
from pygraph.calibration.validation import workloads
from pygraph.inductor.compile import MODELS, model_for
from pygraph.runtime.cuda import CudaDriver

MOST_SECONDS = 30.0
LARGEST_FACTOR = 3.0
BOUNDS = {
    "launch_us": (0.5, 20.0),
    "replay_us": (0.2, 50.0),
    "node_us": (0.0, 1.0),
    "patch_us": (0.01, 20.0),
    "copy_us": (0.5, 50.0),
    "kernel_us": (0.3, 20.0),
    "bandwidth_gbs": (200.0, 10_000.0),
    "peak_gflops": (10_000.0, 10_000_000.0),
}


@pytest.fixture(scope="module")
def measured() -> Calibration:
    """One calibration for all tests here; the native half is built before, since that may take a minute."""
    CudaDriver()
    torch.cuda.init()
    start = time.perf_counter()
    found = calibrate("cuda")
    took = time.perf_counter() - start
    for figure in found.figures:
        print(f"{figure.name}: {figure.value:.4g} {figure.unit} ({figure.low:.4g} to {figure.high:.4g})")
    for point in found.points:
        print(f"{point.panel} {point.kind} {point.name}: {point.predicted_us:.2f} for {point.measured_us:.2f} µs")
    assert took < MOST_SECONDS, f"a calibration took {took:.1f} s"
    return found


@pytest.mark.parametrize("field", BOUNDS)
def test_figures_are_possible(field: str, measured: Calibration) -> None:
    low, high = BOUNDS[field]
    value = getattr(measured.model, field)
    assert low <= value <= high, f"{field} is {value}"


def test_half_precision_is_no_slower_than_float32(measured: Calibration) -> None:
    rates = {peak.dtype: peak.gflops for peak in measured.model.peaks}
    assert {"f16", "f32"} <= set(rates), rates
    assert rates["f16"] >= rates["f32"], rates


def test_a_cache_is_faster_than_memory(measured: Calibration) -> None:
    model = measured.model
    if not model.cache_gbs:
        pytest.skip("no cache was told from memory on this GPU")
    assert model.cache_gbs > model.bandwidth_gbs, model
    assert 1 << 16 < model.cache_bytes < 1 << 30, model


@pytest.mark.parametrize("panel", PANELS)
def test_the_stated_error_is_small(panel: str, measured: Calibration) -> None:
    error = error_of(measured.panel(panel))
    assert error is not None
    assert math.isfinite(error.tenth)
    worst = sorted(measured.panel(panel), key=lambda point: -point.off)[:5]
    assert error.median < LARGEST_FACTOR, f"{error.text}; the furthest are {worst}"


def test_every_workload_was_predicted(measured: Calibration) -> None:
    names = {work.name for work in workloads("cuda")}
    missing = names - {point.name for point in measured.panel(DEVICE)}
    assert not missing, f"no cost is known of {sorted(missing)}"
    assert len(measured.panel(HOST_CALL)) > 0


def test_compilations_use_it_once_it_is_saved(measured: Calibration) -> None:
    stored_model.cache_clear()
    try:
        assert model_for("cuda", torch.cuda.current_device()) is MODELS["cuda"]
        assert save(measured) is not None
        assert model_for("cuda", torch.cuda.current_device()) == measured.model
    finally:
        stored_model.cache_clear()
