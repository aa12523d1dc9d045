"""``pygraph bench``: errors of the command line, and whole benchmarks on a CPU, in real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pygraph.cli import main
from tests.bench.documents import document

ROOT = Path(__file__).parents[2]


def bench(*args: object) -> Result:
    """Run ``pygraph bench ARGS``; an exception that would show as a traceback fails the test."""
    result = CliRunner().invoke(main, ["bench", *map(str, args)], prog_name="pygraph")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["gtp2-1"], "did you mean 'gpt2-1'"),
        (["--sides", "pygraf"], "did you mean 'pygraph'"),
        (["--device", "cpu", "--sides", "reduce-overhead"], "needs a GPU"),
        (["--jobs", "0"], "--jobs"),
        (["--seconds", "0"], "--seconds"),
        (["--no-such-option"], "Options of the script go after '--'"),
        (["no-such-script.py"], "no script no-such-script.py"),
        (["--suite", "no.such.suite"], "is no suite"),
        (["--phase", "time"], "needs --caches"),
        (["--compile-time", "--caches", "somewhere"], "cannot be used with --caches"),
        (["--from", "results.json"], "needs --out"),
        (["--out", "results.pdf"], "ends in .json, .md or .png"),
        (["--out", "no/such/folder/results.json"], "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(args: list[str], why: str) -> None:
    result = bench(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr


def test_the_suite_is_listed_with_what_is_missing() -> None:
    listed = bench("--list", "--suite", "tests.bench.own_suite").stdout
    assert "small  (tests, inference)\n    a layer\n" in listed
    assert "absent  (tests, inference)  needs no_such_package" in listed


def test_results_are_drawn_again(tmp_path: Path) -> None:
    source = tmp_path / "results.json"
    source.write_text(json.dumps(document()))
    out = tmp_path / "again"
    assert bench("--from", source, "--out", tmp_path / "page.md", "--out", out).exit_code == 0
    assert (tmp_path / "page.md").read_text().startswith("# NVIDIA H200")
    assert json.loads((out / "results.json").read_text()) == document()
    assert (out / "results.md").exists()
    other = {**document(), "workloads": {"late-1": document()["workloads"]["gains-1"]}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert bench("--from", source, "--from", tmp_path / "other.json", "--out", out).exit_code == 0
    together = json.loads((out / "results.json").read_text())
    assert set(together["workloads"]) == {*document()["workloads"], "late-1"}
    assert together["left_out"] == {}
    (tmp_path / "other.json").write_text(json.dumps({**other, "machine": {"gpu": "another"}}))
    assert "differ in gpu" in bench("--from", source, "--from", tmp_path / "other.json", "--out", out).stderr
    assert bench("--from", tmp_path / "none.json", "--out", out).exit_code == 1
    source.write_text("{}")
    assert "no results of this version" in bench("--from", source, "--out", out).stderr


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the benchmark find the package and these tests, and use one thread each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


COMMON = ("--device", "cpu", "--jobs", "2", "--suite", "tests.bench.own_suite")


@pytest.mark.usefixtures("alone")
def test_a_suite_from_end_to_end(tmp_path: Path) -> None:
    names = ("wrong", "dropout", "absent")
    sides = ("--sides", "pygraph")
    result = bench(*names, *COMMON, *sides, "--blocks", 6, "--calls", 5, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert found["skipped"] == {"absent": "not installed: no_such_package"}
    assert found["left_out"] == {}
    _has_figures(found["workloads"]["dropout"])
    assert found["workloads"]["dropout"]["results_compared"].startswith("apart")
    wrong = found["workloads"]["wrong"]
    assert {side: row["status"] for side, row in wrong["sides"].items()} == {
        "eager": "ok",
        "pygraph": "wrong",
    }
    assert wrong["ratios"] == {}
    page = (tmp_path / "results.md").read_text()
    assert "**wrong, pygraph**: results differ from eager's by 0.5" in page
    assert page == result.stdout or "](" in page


def _has_figures(row: dict[str, Any]) -> None:
    assert [found["status"] for found in row["sides"].values()] == ["ok", "ok"], row["sides"]
    assert all(found["difference"] <= 1e-2 for found in row["sides"].values())
    assert set(row["ratios"]) == {"eager"}
    assert row["ratios"]["eager"]["wall_us"]["rounds"] == 6
    assert row["ratios"]["eager"]["wall_us"]["confidence"] > 0.95
    for found in row["sides"].values():
        assert 0 < found["host_us"]["median"] <= found["wall_us"]["median"]
    assert row["sides"]["pygraph"]["coverage"]["share"] == 1.0
    assert row["sides"]["pygraph"]["coverage"]["replays"] > 30
    assert row["sides"]["pygraph"]["coverage"]["uncaptured_calls"] > 0  # those before it was captured
    assert all(region["state"] == "replay" for region in row["sides"]["pygraph"]["regions"])


SCRIPT = """
import sys
import torch
from torch import nn

calls = int(sys.argv[2])
assert sys.argv[1] == "--calls" and __name__ == "__main__"
print("this is no answer")
model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), mode="max-autotune")


@torch.compile(dynamic=False)
def loss_of(found):
    return found.square().mean()


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(calls):
    optimizer.zero_grad()
    loss_of(model(torch.ones(4, 8))).backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("alone")
def test_a_script_from_end_to_end(tmp_path: Path) -> None:
    """It compiles two callables, a module and a function, draws random numbers, and prints."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / "results.json"
    common = ("--device", "cpu", "--jobs", "2", "--out", out, "--blocks", 7, "--calls", 4)
    result = bench(*common, script, "--", "--calls", "1000000")
    assert result.exit_code == 0, result.stderr
    row = json.loads(out.read_text())["workloads"]["train"]
    assert {side: found["status"] for side, found in row["sides"].items()} == dict.fromkeys(
        ("eager", "default", "pygraph"), "ok"
    ), row["sides"]
    assert row["ratios"]["default"]["wall_us"]["rounds"] == 7
    assert row["groups"][0]["calls"] == 4


def test_module_and_command_are_the_same() -> None:
    """``python -m pygraph bench`` works where nothing is installed."""
    assert "bench" in main.commands
    assert "SCRIPT.py" in bench("--help").stdout
