"""``pygraph profile``: what is made of a trace written by hand, and a script from end to end on a CPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pygraph.bench.causes import CAUSES, OTHER, Profile, Run, document, page, read, table, timeline
from pygraph.bench.process import CALL
from pygraph.colours import HUES, hue
from pygraph.errors import PygraphError
from tests.commands import run
from tests.report.test_html import Page

ROOT = Path(__file__).parents[2]
CALLER, ENGINE, WORKER = 1, 2, 3
NODE = "autograd::engine::evaluate_function: MulBackward0"


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = CALLER) -> dict[str, Any]:
    """A complete event of a chrome trace; times count from an epoch of its own."""
    return {"ph": "X", "cat": cat, "name": name, "ts": 5e6 + start, "dur": end - start, "pid": 9, "tid": tid}


def call(start: float, end: float) -> dict[str, Any]:
    return event(CALL, start, end, "user_annotation")


def profile(*events: dict[str, Any], gpu: bool = False) -> Profile:
    return read({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, gpu)


def host(*events: dict[str, Any]) -> dict[str, float]:
    """The time of one call of 100 µs by cause, in µs. Causes that took no time are left out."""
    found = profile(call(0, 100), *events).host_us()
    assert sum(found.values()) == pytest.approx(100)
    return {cause: us for cause, us in found.items() if us}


def test_each_moment_is_that_of_the_innermost_range_with_a_cause() -> None:
    assert host(
        event("TorchDynamo Cache Lookup", 5, 10),
        event("Torch-Compiled Region: 0/0", 10, 50),
        event("user's own", 11, 49, "user_annotation"),
        event("CompiledFunction", 12, 48),
        event("graph0_forward.region0 layers.3", 20, 40, "user_annotation"),
        event("cudaGraphLaunch", 30, 35, "cuda_runtime"),
        event("aten::item", 60, 80),
        event("cudaStreamSynchronize", 65, 75, "cuda_runtime"),
        event("user's other", 85, 95, "user_annotation"),
    ) == {"guards": 5, "autograd": 20, "launches": 30, "waiting": 10, "Python and other": 35}


def test_the_optimizer_has_its_operators_but_not_what_it_waits_for() -> None:
    assert host(
        event("Optimizer.step#Adam.step", 0, 50, "user_annotation"),
        event("aten::_foreach_add_", 10, 40),
        event("cudaLaunchKernel", 12, 14, "cuda_runtime"),
        event("cudaDeviceSynchronize", 41, 45, "cuda_runtime"),
    ) == {"optimizer": 46, "waiting": 4, "Python and other": 50}


def test_what_lies_between_nodes_is_the_engines() -> None:
    nodes = [event(NODE, 10, 20), event(NODE, 25, 40)]
    assert host(*nodes)["autograd"] == 30
    assert host(*nodes, event("hook", 21, 23))["autograd"] == 25


def test_a_backward_on_another_thread_fills_the_time_in_which_the_caller_waits() -> None:
    """Not that of a thread without autograd, and not where the caller has a range."""
    assert host(
        event("aten::ones_like", 0, 10),
        event(NODE, 5, 30, tid=ENGINE),
        event("aten::mul", 20, 25, tid=ENGINE),
        event(NODE, 90, 120, tid=ENGINE),
        event("aten::collate", 30, 80, tid=WORKER),
        event("aten::randn", 50, 60),
        event("Optimizer.step#SGD.step", 95, 100),
    ) == {"launches": 25, "autograd": 20, "optimizer": 5, "Python and other": 50}


def test_the_gpu_is_busy_while_any_stream_is() -> None:
    found = profile(
        call(0, 50),
        call(50, 100),
        event(CALL, 0, 400, "gpu_user_annotation", 7),
        event("gemm", -20, 10, "kernel", 7),
        event("gemm", 20, 40, "kernel", 7),
        event("relu", 30, 50, "kernel", 8),
        event("Memcpy HtoD", 35, 36, "gpu_memcpy", 9),
        event("Memset", 60, 70, "gpu_memset", 9),
        event("late", 110, 120, "kernel", 7),
        gpu=True,
    )
    assert found.gpu_us() == {"busy": 25, "idle": 25}
    assert found.wall_us == 50
    assert [len(each) for each in (found.calls, found.device or ())] == [2, 4]
    assert profile(call(0, 50)).gpu_us() is None
    assert profile(call(0, 50), gpu=True).gpu_us() == {"busy": 0, "idle": 50}


def test_replays_are_counted_once_and_only_those_of_calls() -> None:
    name = "graph12_backward.region3"
    marks = [
        event(name, at, at + 5, cat, 1) for at in (-50, 10, 20) for cat in ("user_annotation", "gpu_user_annotation")
    ]
    assert profile(call(0, 50), *marks).replays == 2


def test_a_trace_without_calls_is_refused() -> None:
    with pytest.raises(PygraphError, match="none of the calls"):
        profile(event("aten::mm", 0, 1))


NAMES = st.sampled_from(
    [*(f"{NODE}", "aten::mm", "Optimizer.step#SGD.step", "cudaStreamSynchronize", "own"), "CompiledFunction"]
)
RANGES = st.tuples(NAMES, st.integers(-20, 120), st.integers(0, 60), st.sampled_from([CALLER, ENGINE, WORKER]))


def test_figures_are_medians_over_calls() -> None:
    """One slow call of three decides nothing, and neither does its GPU work."""
    calls = [call(0, 100), call(100, 1100), call(1100, 1220)]
    ranges = [event("aten::mm", 10, 30), event("aten::mm", 200, 900), event("aten::mm", 1100, 1110)]
    found = profile(
        *calls, *ranges, event("gemm", 90, 130, "kernel", 7), event("gemm", 400, 1000, "kernel", 7), gpu=True
    )
    assert found.wall_us == 120
    assert found.host_us() == {**dict.fromkeys(CAUSES, 0.0), "launches": 20, OTHER: 110}
    assert found.gpu_us() == {"busy": 10, "idle": 120}
    told = document("train.py", [], {"uncaptured": Run(found, 1.0), "replayed": Run(found, 1.0)})
    assert told["runs"]["replayed"]["host_us"]["launches"] == 20
    console = Console(width=100, record=True)
    console.print(table(told))
    assert re.search(r"launches +20\.0 +16\.7 %", console.export_text())


def test_a_trace_has_both_runs_from_zero_on_with_causes_regions_and_the_ranges_themselves() -> None:
    replay = event("graph0_forward.region2 layers.3", 20, 40, "user_annotation")
    events = [call(0, 50), call(50, 100), replay, event("gemm", 30, 60, "kernel", 7), event(NODE, 60, 70, tid=ENGINE)]
    found = timeline({name: Run(profile(*events, gpu=True), 1.0) for name in ("uncaptured", "replayed")})["traceEvents"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    names = {(e["pid"], e["name"]): e["args"]["name"] for e in found if e["ph"] == "M" and "name" in e["args"]}
    assert [names[pid, "process_name"] for pid in (1, 2)] == ["uncaptured", "replayed"]
    threads = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 2}
    assert list(threads.values()) == ["calls", "causes", "GPU", f"thread {CALLER}", "stream 7", f"thread {ENGINE}"]
    shown = [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X" and e["pid"] == 2]
    assert ("calls", CALL, 50, 50) in shown
    assert ("causes", "launches", 20, 20) in shown
    assert ("GPU", "kernels", 30, 30) in shown
    assert (f"thread {CALLER}", replay["name"], 20, 20) in shown
    assert ("stream 7", "gemm", 30, 30) in shown
    assert [e["args"] for e in found if e["name"] == "launches"] == [{"region": 2}] * 2


@given(st.lists(RANGES, max_size=30))
def test_nothing_is_lost_or_counted_twice(ranges: list[tuple[str, int, int, int]]) -> None:
    """Whatever ranges there are, also such that overlap without being nested."""
    found = profile(call(0, 60), call(60, 100), *(event(n, at, at + us, tid=tid) for n, at, us, tid in ranges))
    assert [span.start for span in found.host] == [0.0, *(span.end for span in found.host[:-1])]
    assert found.host[-1].end == 100
    for one in found.calls:
        spans = [span for span in found.host if span.start < one.end and span.end > one.start]
        inside = sum(min(span.end, one.end) - max(span.start, one.start) for span in spans)
        assert inside == pytest.approx(one.end - one.start)


def test_the_page_draws_the_host_and_the_gpu_of_both_runs_to_one_scale() -> None:
    def run(call_us: float) -> Run:
        calls = [call(at * call_us, (at + 1) * call_us) for at in range(9)]
        ranges = [event("aten::mm", at * call_us, (at + 0.5) * call_us) for at in range(9)]
        ranges += [event("graph0_forward.region13", (at + 0.6) * call_us, (at + 1) * call_us) for at in range(9)]
        return Run(profile(*calls, *ranges, event("gemm", 0, 9 * call_us, "kernel", 7), gpu=True), call_us)

    runs = {"uncaptured": run(100.0), "replayed": run(25.0)}
    shown = Page(page(document("<b>.py", [], runs), runs))
    assert "<b>.py profile, 9 calls" in shown.words()
    assert "GPU busy 100.0 100 % 25.0 100 %" in shown.words()
    rects = [attrs for tag, attrs in shown.tags if tag == "rect"]
    drawn = [[str(rect["class"]) for rect in rects if rect["y"] == y] for y in ("4", "38")]
    assert set(drawn[0]) == {"c4", "input", "r1"}, "launches, other, and replays in their region's colour"
    assert set(drawn[1]) == {"c4"}
    assert "replays of region 13" in shown.words()
    style = page(document("<b>.py", [], runs), runs)
    assert f".r1 {{ --hue: {hue(13)};" in style
    causes = [int(degrees) for degrees in re.findall(r"\.c\d+ { --hue: (\d+);", style)]
    assert len(causes) == len(CAUSES) - 1
    assert not any(abs(hue(region) - cause) < 15 for region in range(HUES) for cause in causes)
    slow, fast = (int(str(rect["width"])) for rect in rects if rect["y"] == "38")
    assert slow == pytest.approx(4 * fast, rel=0.02), "one lane of the GPU in each run, busy all the time"
    width = float(shown.having("viewbox")[0].split()[2])
    assert slow < max(int(str(rect["x"])) + int(str(rect["width"])) for rect in rects) <= width


SCRIPT = """
import sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
compiled = torch.compile(model, mode="max-autotune")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(int(sys.argv[1])):
    optimizer.zero_grad()
    compiled(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
print("this is no answer")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.sweep
def test_a_script_from_end_to_end(script: Path) -> None:
    out, trace = script.with_suffix(".html"), script.with_suffix(".json")
    result = run("profile", script, "--calls", 5, "--json", "-", "--out", out, "--trace", trace, "--", "1000000")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (told["schema"], told["args"], told["calls"]) == (2, ["1000000"], 5)
    assert {name: row["replays"] for name, row in told["runs"].items()} == {"uncaptured": 0, "replayed": 2}
    for row in told["runs"].values():
        assert {cause for cause, us in row["host_us"].items() if us} == {*CAUSES} - {"waiting"}
        assert row["gpu_us"] is None
        assert row["unprofiled_us"] > 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["pid"] == 2}
    assert {CALL, "launches", "graph0_forward.region0"} <= names
    words = Page(out.read_text(encoding="utf-8")).words()
    assert "torch finds no GPU" in words
    assert "GPU busy" not in words


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("lr=0.1", "lr=-1"), ":7: ValueError: Invalid learning rate"),
        pytest.param(
            ("compiled = torch.compile(model", "compiled = dict(model=model"),
            " 0 calls of what it compiled; --calls 20 takes about 60",
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["raises", "compiles nothing"],
)
def test_what_the_script_does_wrong_is_said(script: Path, change: tuple[str, str], why: str) -> None:
    script.write_text(SCRIPT.replace("compiled(", "model(").replace(*change))
    result = run("profile", script, "--", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    *_, said = result.stderr.splitlines()  # behind the steps
    assert said.startswith(str(script))
    assert why in said


def test_what_makes_no_sense_is_refused() -> None:
    assert "does not exist" in run("profile", "no-such-script.py").stderr
    assert "only one of" in run("profile", __file__, "--out", "-", "--trace", "-").stderr
    result = run("profile", __file__, "--out", f"{__file__}/page.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be written" in result.stderr
