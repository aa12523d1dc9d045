"""A calibration as a machine might give it, without measuring, and settings under which measuring takes a second."""

from __future__ import annotations

import dataclasses

from pygraph.calibration.records import DEVICE, HOST_CALL, Calibration, Figure, Identity, Point, Sweep
from pygraph.calibration.timing import Effort
from pygraph.ir import DeviceModel, Peak

__all__ = ["QUICK", "calibration", "point"]

QUICK = Effort(rounds=3, blocks=2, block_s=0.0002, largest=1 << 20, slowest_us=100.0)

MODEL = DeviceModel(
    name="some device",
    bandwidth_gbs=2000.0,
    peak_gflops=300_000.0,
    launch_us=3.0,
    replay_us=2.0,
    node_us=0.01,
    patch_us=0.3,
    kernel_us=1.5,
    copy_us=4.0,
    cache_bytes=32e6,
    cache_gbs=5000.0,
    peaks=(Peak("bf16", 300_000.0, 1e9, 0.75), Peak("f32", 20_000.0)),
    source="calibrated 2026-01-02",
)


def point(predicted: float, measured: float, panel: str = DEVICE, kind: str = "pointwise") -> Point:
    """A point whose spread is a tenth to both sides."""
    return Point(panel, kind, f"{kind} {predicted:g}", predicted, measured, measured * 0.9, measured * 1.1)


def calibration(identity: Identity | None = None, **changes: float) -> Calibration:
    """A calibration of ``identity``; ``changes`` replace figures of its model."""
    model = dataclasses.replace(MODEL, **changes)  # type: ignore[arg-type]
    return Calibration(
        identity=identity or Identity("cuda", "some device", "550.1", "2.11", "0.1"),
        date="2026-01-02T03:04:05",
        seconds=4.5,
        model=model,
        figures=(
            Figure("uncaptured launch", "µs", model.launch_us, 2.9, 3.2, "launch_us"),
            Figure("matrix products, f32", "GFLOP/s", 20_000.0, 19_000.0, 21_000.0),
        ),
        sweeps=(Sweep("pointwise", "bytes", (512.0, 1024.0), (1.5, 1.6)),),
        points=(
            point(10.0, 11.0),
            point(200.0, 150.0),
            point(7.0, 6.0, kind="matrix product"),
            point(3.0, 3.5, HOST_CALL, "uncaptured"),
            point(5.0, 4.0, HOST_CALL, "replay"),
        ),
    )
