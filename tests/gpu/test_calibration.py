"""The device model of this GPU is possible on any data-centre GPU."""

from __future__ import annotations

import torch

from pygraph.calibration.calibrate import calibrate

BOUNDS = {
    "kernel_us": (0.3, 20.0),
    "bandwidth_gbs": (200.0, 10_000.0),
    "peak_gflops": (10_000.0, 10_000_000.0),
}


def test_figures_are_possible() -> None:
    torch.cuda.init()
    measured = calibrate("cuda")
    values = {field: getattr(measured, field) for field in BOUNDS}
    assert not [field for field, (low, high) in BOUNDS.items() if not low <= values[field] <= high], values
    assert measured.peaks["f16"] >= measured.peaks["f32"], measured.peaks
