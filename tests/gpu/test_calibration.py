"""The device model of this GPU: measured in seconds, and possible on any data-centre GPU."""

from __future__ import annotations

import time

import pytest
import torch

from pygraph.calibration.calibrate import calibrate
from pygraph.ir import DeviceModel
from pygraph.runtime.cuda import CudaDriver

MOST_SECONDS = 30.0
BOUNDS = {
    "launch_us": (0.5, 20.0),
    "replay_us": (0.2, 50.0),
    "node_us": (0.0, 1.0),
    "patch_us": (0.01, 20.0),
    "kernel_us": (0.3, 20.0),
    "bandwidth_gbs": (200.0, 10_000.0),
    "peak_gflops": (10_000.0, 10_000_000.0),
}


@pytest.fixture(scope="module")
def measured() -> DeviceModel:
    """One calibration for all tests here; the native half is built before, since that may take a minute."""
    CudaDriver()
    torch.cuda.init()
    start = time.perf_counter()
    found = calibrate("cuda")
    took = time.perf_counter() - start
    print(f"{found} in {took:.1f} s")
    assert took < MOST_SECONDS, f"a calibration took {took:.1f} s"
    return found


@pytest.mark.parametrize("field", BOUNDS)
def test_figures_are_possible(field: str, measured: DeviceModel) -> None:
    low, high = BOUNDS[field]
    value = getattr(measured, field)
    assert low <= value <= high, f"{field} is {value}"


def test_half_precision_is_no_slower_than_float32(measured: DeviceModel) -> None:
    assert measured.peaks["f16"] >= measured.peaks["f32"], measured.peaks
