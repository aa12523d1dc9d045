"""The device model: its arithmetic, measuring it, keeping it, and compilations that cost with it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph import cache
from pygraph.calibration import calibrate as measure
from pygraph.calibration.store import Identity, identity_of, load, save, stored_model
from pygraph.errors import PassError
from pygraph.inductor.compile import model_for
from pygraph.ir import H200, HOST, UNKNOWN, Cost, DeviceModel, Graph, parse_graph
from pygraph.passes import PassContext, PassManager, read_header
from pygraph.passes.analysis import node_time_us
from tests.commands import run

IDENTITY = Identity("cuda", "some device", "550.1", "2.11", "0.1")
MODEL = DeviceModel(
    name="some device",
    bandwidth_gbs=2000.0,
    peak_gflops=300_000.0,
    kernel_us=1.5,
    peaks={"bf16": 300_000.0, "f32": 20_000.0},
    source="calibrated 2026-01-02",
)


@pytest.fixture(autouse=True)
def _no_model_left() -> Iterator[None]:
    """No test's calibration is left to another one; threads that wait for each other are not what is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stored_model.cache_clear()
    yield
    torch.set_num_threads(threads)
    stored_model.cache_clear()


# -- the model ---------------------------------------------------------------------------------------------------------

GRAPH = """\
graph @main (%x : f32[8, 8]@cpu, %h : bf16[8, 8]@cpu) {
  %a = aten.mm.default(%x, %x) : f32[8, 8]@cpu {flops = 4000000000, read = 0, written = 0, launches = 1}
  %b = aten._scaled_dot_product_flash_attention.default(%h) : bf16[8, 8]@cpu {flops = 4000000000, read = 0, written = 0, launches = 1}
  %c = aten.gelu.default(%x) : f32[8, 8]@cpu {flops = 4000000000, read = 0, written = 0, launches = 1}
  return (%a, %b, %c)
}
"""  # noqa: E501


def test_a_kernel_takes_its_floor_and_the_longer_of_arithmetic_and_traffic() -> None:
    assert MODEL.time_us(Cost(0, 0, 0, 1), {}) == 1.5
    assert MODEL.time_us(Cost(0, 10**6, 10**6, 2), {}) == pytest.approx(3.0 + 1.0)
    assert MODEL.time_us(Cost(3 * 10**9, 10**6, 10**6, 1), {}) == pytest.approx(1.5 + 10.0)
    assert MODEL.time_us(UNKNOWN, {}) is None


def test_arithmetic_goes_at_the_rate_of_what_a_node_computes() -> None:
    graph = parse_graph(GRAPH)
    times = [node_time_us(graph.node(name), MODEL, {}) for name in "abc"]
    assert times == [pytest.approx(1.5 + 4e6 / gflops) for gflops in (20_000.0, 300_000.0, 300_000.0)]
    tf32 = dataclasses.replace(MODEL, peaks={**MODEL.peaks, "tf32": 100_000.0}).with_tf32()
    assert (tf32.gflops("f32"), tf32.gflops("bf16"), MODEL.with_tf32()) == (100_000.0, 300_000.0, MODEL)


@pytest.mark.parametrize("model", [H200, HOST, MODEL], ids=lambda model: model.name)
def test_json_round_trip(model: DeviceModel) -> None:
    assert DeviceModel.from_json(json.loads(json.dumps(dataclasses.asdict(model)))) == model


@pytest.mark.parametrize(
    "change",
    [
        *({"bandwidth_gbs": 0.0}, {"kernel_us": -1.0}, {"kernel_us": float("nan")}, {"kernel_us": "much"}),
        *({"bandwidth_gbs": 1e12}, {"peak_gflops": 1e-9}, {"kernel_us": 1e9}, {"kernel_us": float("inf")}),
        *({"more": 1.0}, {"peaks": {"f32": 0.0}}, {"peaks": [["f32"]]}, {"peaks": None}, {"peaks": {"f32": 1e300}}),
    ],
    ids=str,
)
def test_json_that_is_no_model(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a device model"):
        DeviceModel.from_json({**dataclasses.asdict(MODEL), **change})
    path = save(IDENTITY, MODEL)
    assert path is not None
    cache.store_json(path, {"identity": IDENTITY._asdict(), "model": {**dataclasses.asdict(MODEL), **change}})
    assert load(IDENTITY) is None, "although the file is whole"


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_the_command_measures_shows_and_keeps() -> None:
    """The bounds on measured values hold for any CPU."""
    shown = run("calibrate", "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    model = load(identity_of("cpu"))
    assert model is not None
    assert 0.1 < model.bandwidth_gbs < 5000
    assert {"f32", "bf16", "f16"} == set(model.peaks)
    assert model.peak_gflops == model.gflops("f32") > 0.01
    for line in (model.label, "smallest kernel, µs", "built in (host)", "kept in "):
        assert line in shown.output


def test_a_model_is_not_kept_where_that_is_not_wanted_or_it_fits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "calibrate", lambda *_, **__: MODEL)
    assert "kept in" not in run("calibrate", "--device", "cpu", "--no-save").output

    def fail(*_: object, **__: object) -> None:
        raise ValueError("large programs take no longer")

    monkeypatch.setattr(measure, "calibrate", fail)
    shown = run("calibrate", "--device", "cpu")
    assert shown.exit_code == 1
    assert "no model fits what was measured: large programs take no longer" in shown.stderr
    assert load(identity_of("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_a_failure() -> None:
    shown = run("calibrate", "--device", "cuda")
    assert shown.exit_code == 1
    assert "CUDA" in shown.stderr
    assert stored_model("cuda") is None


# -- keeping -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded() -> None:
    assert load(IDENTITY) is None
    path = save(IDENTITY, MODEL)
    assert path is not None
    assert load(IDENTITY) == MODEL


@pytest.mark.parametrize("part", Identity._fields)
def test_each_part_of_the_key_changes_the_file(part: str) -> None:
    save(IDENTITY, MODEL)
    assert load(IDENTITY._replace(**{part: "another"})) is None


def test_the_cpu_is_told_by_threads() -> None:
    identity = identity_of("cpu")
    torch.set_num_threads(2)
    assert identity_of("cpu") != identity


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff"], ids=repr)
def test_a_damaged_file_is_named_once_and_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save(IDENTITY, MODEL)
    assert path is not None
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "pygraph"):
        assert (load(IDENTITY), load(IDENTITY)) == (None, None)
    assert len([record for record in caplog.records if str(path) in record.getMessage()]) == 1


def test_where_nothing_can_be_written_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING, "pygraph"):
        assert save(IDENTITY, MODEL) is None
    assert "not kept" in caplog.text
    assert load(IDENTITY) is None


# -- using -------------------------------------------------------------------------------------------------------------


def products(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.relu(x @ x)
    return x


def compiled() -> pygraph.api.GraphReport:
    """The report of ``products`` on a small tensor."""
    torch._dynamo.reset()
    pygraph.reset()
    step = torch.compile(products, backend="pygraph")
    with torch.no_grad():
        for _ in range(3):
            step(torch.ones(8, 8))
    (report,) = pygraph.reports()
    return report


def test_float32_may_be_costed_as_tf32() -> None:
    assert model_for("cpu") is HOST
    save(identity_of("cpu"), dataclasses.replace(MODEL, peaks={"f32": 10.0, "tf32": 70.0}))
    before = torch.get_float32_matmul_precision()
    try:
        for precision, gflops in (("highest", 10.0), ("high", 70.0)):
            torch.set_float32_matmul_precision(precision)
            assert model_for("cpu").gflops("f32") == gflops
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("fresh")
def test_reports_have_a_changed_model_where_the_program_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("a device", "another device", "a device"):
        save(identity_of("cpu"), dataclasses.replace(MODEL, name=name))
        report = compiled()
        assert f"time modelled on {name}, calibrated 2026-01-02" in str(pygraph.Explanation([report]))
        assert report.regions[0].state == "replay"


def failing(graph: Graph, ctx: PassContext) -> bool:
    raise KeyError


def test_a_reproducer_carries_a_calibrated_model(tmp_path: Path) -> None:
    with pytest.raises(PassError) as caught:
        PassManager([failing], dump_dir=tmp_path).run(parse_graph(GRAPH), PassContext("cpu", MODEL))
    _, ctx = read_header(Path(caught.value.reproducer or "").read_text())
    assert ctx is not None
    assert ctx.model == MODEL
