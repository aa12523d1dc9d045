"""``python -m benchmarks``: errors of the command line, names, results put together, and a suite from end to end."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from benchmarks.__main__ import chosen, combine, headline, main, sections
from benchmarks.suite import WORKLOADS
from tests.commands import run

OWN = ("--suite", "tests.benchmarks.own_suite")
KEPT = Path(__file__).parents[2] / "benchmarks" / "results"


def benchmarks(*args: object) -> Result:
    """Run ``python -m benchmarks ARGS``."""
    return run(*args, command=main)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["gtp2-1"], "did you mean 'gpt2-1'"),
        (["0"], "there are "),
        (["--sides", "pygraf"], "did you mean 'pygraph'"),
        (["--against", "inductr"], "has no backend 'inductr'; did you mean 'inductor'"),
        (["--against", "tests.benchmarks.own_suite:nothing"], "is no function: module"),
        (["--against", "no_such_module:compile"], "is no function: No module"),
        (["--against", "pygraph"], "is a side of the suite"),
        (["--suite", "no.such.suite"], "is no suite"),
        (["--from", "results.json"], "needs --out"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], why: str) -> None:
    result = benchmarks(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr


def test_names_domains_and_kinds_choose() -> None:
    names = [each.name for each in chosen(["addresses", "addresses-fresh-300"], WORKLOADS)]
    assert names == ["addresses-stable-300", "addresses-fresh-300"]
    assert {each.kind for each in chosen(["decode"], WORKLOADS)} == {"decode"}
    assert chosen([], WORKLOADS) == list(WORKLOADS.values())


def test_a_suite_is_listed_with_what_is_missing() -> None:
    listed = benchmarks("--list", *OWN).stdout
    assert "wrong  (tests, inference)\n    another function once compiled\n" in listed
    assert "absent  (tests, training)  needs no_such_package" in listed


def test_kept_results_are_put_together_and_drawn_again(tmp_path: Path) -> None:
    kept = KEPT / "h200-2026-11-22" / "results.json"
    result = benchmarks("--from", kept, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "results.md").read_text()
    assert "| reduce-overhead | **1.238** | 49 |" in text
    assert "- **vit-b16-64**: 0.950 over default" in text
    if importlib.util.find_spec("matplotlib") is not None:
        assert "![Gains over Inductor's modes](results-gains.png)" in text
        assert (tmp_path / "results-memory.png").read_bytes().startswith(b"\x89PNG\r\n")
    (tmp_path / "other.json").write_text("{}")
    assert "no results of this version" in benchmarks("--from", tmp_path / "other.json", "--out", tmp_path).stderr


def test_training_steps_as_a_whole_are_compared_with_each_side_that_is_right() -> None:
    times = {"default": 400.0, "reduce-overhead": 200.0, "pygraph": 150.0, "whole-step": 50.0, "step": 100.0}
    sides: dict[str, Any] = {side: {"status": "ok", "peak_bytes": us} for side, us in times.items()}
    sides["make-graphed-callables"] = {"status": "wrong", "error": "by 0.2", "peak_bytes": 1.0}
    rounds = [{side: {"wall_us": us * drift} for side, us in times.items()} for drift in (1.0, 1.5)]
    row = {"kind": "training", "domain": "x", "sides": sides, "ratios": {}, "rounds": rounds}
    other = {**row, "sides": {side: each for side, each in sides.items() if side != "step"}}
    made: dict[str, Any] = {"workloads": {"mlp": row, "no-step": other}, "settings": {}, "left_out": {}, "skipped": {}}
    _, _, line, means = sections(made)["Training steps as a whole"]
    assert line == "| mlp | 4.00 | 2.00 | – | 2.00 | 1.50 | – | 0.50 | – | 0.250 | 0% |"
    assert means.startswith(
        "| geometric mean | **4.000** | **2.000** | – | **2.000** | **1.500** | – | **0.500** | – |"
    )
    del sides["pygraph"]
    told = "default 500 µs; reduce-overhead 250 µs; whole-step 62 µs; step 125 µs"
    assert headline("mlp", row) == f"mlp: {told}; make-graphed-callables WRONG RESULTS: by 0.2"


def test_results_of_another_machine_are_not_put_together() -> None:
    made: dict[str, Any] = {"machine": {"cores": 2, "gpu": "x"}, "settings": {"tiny": False}, "skipped": {}}
    made |= {"workloads": {"a": {}}, "left_out": {"b": "late"}}
    more = {**made, "workloads": {"b": {}}, "left_out": {}}
    together = combine([made, more])
    assert (set(together["workloads"]), together["left_out"]) == ({"a", "b"}, {})
    with pytest.raises(ValueError, match="differ in gpu"):
        combine([made, {**more, "machine": {"cores": 2, "gpu": "y"}}])


def test_a_core_is_left_to_compile_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    result = benchmarks("wrong", *OWN, "--device", "cpu", "--reserve", 2)
    assert result.exit_code == 2
    assert "--reserve 2 leaves no core to compile on" in result.stderr


@pytest.mark.sweep
def test_a_suite_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    common = (*OWN, "--device", "cpu", "--sides", "pygraph", "--blocks", 6, "--calls", 5, "--jobs", 2)
    kept = tmp_path / "caches"
    result = benchmarks("wrong", "dropout", "absent", *common, "--out", tmp_path, "--caches", kept)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert found["skipped"] == {"absent": "not installed: no_such_package"}
    assert found["left_out"] == {}
    row = found["workloads"]["dropout"]
    assert [each["status"] for each in row["sides"].values()] == ["ok", "ok"], row["sides"]
    assert row["ratios"]["eager"]["wall_us"]["rounds"] == 6
    assert row["sides"]["pygraph"]["coverage"]["share"] == 1.0
    assert any((kept / "dropout" / "pygraph" / "compiled").rglob("*.py"))
    wrong = found["workloads"]["wrong"]
    assert {side: row["status"] for side, row in wrong["sides"].items()} == {"eager": "ok", "pygraph": "wrong"}
    assert wrong["ratios"] == {}
    assert "**wrong, pygraph**: results differ from eager's by 0.5" in result.stdout


@pytest.mark.sweep
def test_other_backends_are_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name that torch.compile knows, and by a function; what one of them compiles wrong is said."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    others = ["aot_eager", "tests.benchmarks.own_suite:uncompiled"]
    against = [each for name in others for each in ("--against", name)]
    common = ("--device", "cpu", "--sides", "pygraph", "--blocks", 6, "--calls", 5)
    result = benchmarks("dropout", "wrong", *OWN, *common, *against, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["settings"]["against"] == others
    right, wrong = found["workloads"]["dropout"], found["workloads"]["wrong"]
    assert {side: each["status"] for side, each in right["sides"].items()} == dict.fromkeys(
        ["eager", "pygraph", *others], "ok"
    )
    assert set(right["ratios"]) == {"eager", *others}
    assert [wrong["sides"][name]["status"] for name in others] == ["wrong", "ok"]
    text = (tmp_path / "results.md").read_text()
    assert all(f"| {name} | **" in text for name in others)
