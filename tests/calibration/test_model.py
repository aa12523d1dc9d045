"""The device model's arithmetic, and its JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pygraph.ir import H200, HOST, UNKNOWN, Cost, DeviceModel, Peak, parse
from pygraph.passes.analysis import VECTOR, arithmetic, node_time_us
from tests.calibration.samples import MODEL

GRAPH = """\
graph @main (%x : f32[8, 8]@cpu, %h : bf16[8, 8]@cpu) {
  %a = aten.mm.default(%x, %x) : f32[8, 8]@cpu {flops = 4000000000, read = 0, written = 0, launches = 1}
  %b = aten.mm.default(%h, %h) : bf16[8, 8]@cpu {flops = 4000000000, read = 0, written = 0, launches = 1}
  %c = aten._scaled_dot_product_flash_attention.default(%h) : bf16[8, 8]@cpu {launches = 1}
  %d = aten.convolution.default(%x) : f32[8, 8]@cpu {launches = 1}
  %e = aten.gelu.default(%x) : f32[8, 8]@cpu {flops = 4000000000, read = 0, written = 0, launches = 1}
  return (%a, %b, %c, %d, %e)
}
"""


def test_a_kernel_takes_its_floor_and_the_longer_of_arithmetic_and_traffic() -> None:
    plain = dataclasses.replace(MODEL, peaks=(), cache_gbs=0.0)
    assert plain.time_us(Cost(0, 0, 0, 1, 0), {}) == 1.5
    assert plain.time_us(Cost(0, 10**6, 10**6, 2, 0), {}) == pytest.approx(3.0 + 1.0)
    assert plain.time_us(Cost(3 * 10**9, 10**6, 10**6, 1, 0), {}) == pytest.approx(1.5 + 10.0)
    assert plain.time_us(UNKNOWN, {}) is None


def test_what_fits_a_cache_is_faster() -> None:
    assert MODEL.traffic_us(10e6) == pytest.approx(2.0)
    assert MODEL.traffic_us(40e6) == pytest.approx(20.0)


def test_arithmetic_goes_by_what_a_node_computes() -> None:
    graph = parse(GRAPH)
    kinds = [arithmetic(graph.node(name)) for name in "abcde"]
    assert kinds == ["f32", "bf16", "bf16", "f32", VECTOR]
    model = dataclasses.replace(MODEL, peaks=(Peak("f32", 20_000.0), Peak(VECTOR, 4000.0)))
    times = [node_time_us(graph.node(name), model, {}) for name in "abe"]
    assert times == [pytest.approx(1.5 + t) for t in (200.0, 4e9 / 3e8, 1000.0)]


def test_float32_goes_at_the_rate_of_tf32_where_that_is_known() -> None:
    assert MODEL.with_tf32() is MODEL
    known = dataclasses.replace(MODEL, peaks=(*MODEL.peaks, Peak("tf32", 100_000.0, 5.0)))
    assert known.with_tf32().peak("f32") == Peak("f32", 100_000.0, 5.0)
    assert known.with_tf32().peak("bf16") == MODEL.peak("bf16")


def test_host_times() -> None:
    assert MODEL.uncaptured_us(10) == pytest.approx(30.0)
    assert MODEL.replayed_us(100, 5.0) == pytest.approx(2.0 + 1.0 + 5.0)


def test_labels_say_where_figures_come_from() -> None:
    assert (H200.label, HOST.label) == ("h200, built-in", "host, built-in")
    assert MODEL.label == "some device, calibrated 2026-01-02"


@pytest.mark.parametrize("model", [H200, HOST, MODEL], ids=lambda model: model.name)
def test_json_round_trip(model: DeviceModel) -> None:
    assert DeviceModel.from_json(model.as_json()) == model


@pytest.mark.parametrize(
    "change",
    [
        {"bandwidth_gbs": 0.0},
        {"launch_us": -1.0},
        {"replay_us": float("nan")},
        {"patch_us": float("inf")},
        {"patch_us": "much"},
        {"more": 1.0},
        {"peaks": [{"dtype": "f32", "gflops": 0.0, "ramp": 0.0, "floor_us": 0.0}]},
        {"peaks": [{"dtype": "f32", "gflops": 1.0, "ramp": 0.0, "floor_us": -1.0}]},
        {"peaks": [{"dtype": "f32", "gflops": 1.0, "ramp": 0.0}]},
        {"peaks": [{"dtype": "f32"}]},
        {"peaks": None},
    ],
    ids=str,
)
def test_json_that_is_no_model(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a device model"):
        DeviceModel.from_json({**MODEL.as_json(), **change})


@pytest.mark.parametrize("data", [None, [], "x", {}])
def test_json_that_is_nothing_like_it(data: Any) -> None:
    with pytest.raises(ValueError, match="not a device model"):
        DeviceModel.from_json(data)
