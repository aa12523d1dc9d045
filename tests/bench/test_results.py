"""The document: which ratios it has, which it refuses, what it says of the rest, and that it is valid at any moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pygraph.bench.compile_phase import CompileLog
from pygraph.bench.coordinator import Options, headline, run
from pygraph.bench.plan import Program
from pygraph.bench.results import SCHEMA, Results, combine, read
from pygraph.bench.timing import Group, SideOutcome, Timed
from tests.bench.fakes import events, launcher, program

SIDES = ("eager", "default", "reduce-overhead", "pygraph")
WALL = {"eager": 400.0, "default": 300.0, "reduce-overhead": 80.0, "pygraph": 100.0}
MB = 2**20


def results(folder: Path, programs: list[Program], **settings: Any) -> Results:
    log = CompileLog(folder / "compiled.json", {})
    return Results(
        programs, log, {"torch": "x"}, {"compile_time": False, **settings}, {"absent": "not installed: timm"}
    )


def timed(
    differences: dict[str, float | None] | None = None, groups: list[Group] | None = None, **failed: Any
) -> Timed:
    """What timing tells: three rounds of each side, with ``differences`` from eager and sides that failed."""
    apart: dict[str, float | None] = {**dict.fromkeys(SIDES, 0.0), **(differences or {})}
    sides = {
        side: SideOutcome({"reserved_bytes": 20 * MB, "peak_bytes": 10 * MB}, difference=apart[side]) for side in SIDES
    }
    for name, failure in failed.items():
        sides[name.replace("_", "-")] = SideOutcome(failure=failure, error=f"it {failure}", difference=None)
    rounds = [
        {side: {"wall_us": WALL[side] * drift, "host_us": WALL[side] / 2} for side in SIDES if not sides[side].failure}
        for drift in (1.0, 1.1, 0.9)
    ]
    return Timed(sides, groups or [Group(SIDES, 4, rounds)])


def test_a_ratio_above_one_says_that_pygraph_takes_less(tmp_path: Path) -> None:
    row = results(tmp_path, [each := program(sides=SIDES)]).add(each, timed())
    assert row["ratios"]["default"]["wall_us"] == {
        "ratio": 3.0, "interval": [3.0, 3.0], "confidence": 0.75, "rounds": 3
    }  # fmt: skip
    assert row["ratios"]["reduce-overhead"]["wall_us"]["ratio"] == 0.8
    assert row["ratios"]["default"]["host_us"]["ratio"] == 3.0
    assert row["ratios"]["default"]["reserved_bytes"] == 1.0
    assert "pygraph" not in row["ratios"]
    assert row["sides"]["default"]["wall_us"] == {"median": 300.0, "quartiles": [285.0, 315.0], "count": 3}


@pytest.mark.parametrize(
    ("wrong", "left"),
    [("pygraph", set()), ("reduce-overhead", {"eager", "default"}), ("default", {"eager", "reduce-overhead"})],
)
def test_no_ratio_of_a_side_with_wrong_results(tmp_path: Path, wrong: str, left: set[str]) -> None:
    each = program(sides=SIDES)
    found = results(tmp_path, [each])
    row = found.add(each, timed({wrong: 0.5}))
    assert row["sides"][wrong]["status"] == "wrong"
    assert row["sides"][wrong]["error"] == "results differ from eager's by 0.5 of their largest magnitude"
    assert "wall_us" not in row["sides"][wrong]
    assert set(row["ratios"]) == left
    assert f"WRONG RESULTS of {wrong}" in headline("first", row)
    assert "nan" not in json.dumps(found.as_json()).lower()


@pytest.mark.parametrize("apart", [math.inf, math.nan, 0.010001])
def test_what_is_not_within_the_tolerance_is_wrong(tmp_path: Path, apart: float) -> None:
    each = program(sides=SIDES)
    row = results(tmp_path, [each]).add(each, timed({"pygraph": apart}))
    assert row["sides"]["pygraph"]["status"] == "wrong"
    assert row["ratios"] == {}
    json.dumps(row, allow_nan=False)


def test_results_that_were_not_compared_give_no_ratio(tmp_path: Path) -> None:
    each = program(sides=SIDES)
    row = results(tmp_path, [each]).add(each, timed(dict.fromkeys(SIDES, None), eager="died"))
    assert row["ratios"] == {}
    assert row["sides"]["pygraph"]["status"] == "unchecked"
    assert row["sides"]["pygraph"]["error"] == "there are no results of eager to compare with, or no numbers in them"
    assert row["sides"]["pygraph"]["wall_us"]["median"] == 100.0


def test_a_side_that_fails_has_its_error_and_no_ratio(tmp_path: Path) -> None:
    each = program(sides=SIDES)
    row = results(tmp_path, [each]).add(each, timed(default="memory", reduce_overhead="inapplicable"))
    assert (row["sides"]["default"]["status"], row["sides"]["default"]["error"]) == ("failed", "it memory")
    assert row["sides"]["reduce-overhead"]["status"] == "does not apply"
    assert set(row["ratios"]) == {"eager"}


def test_random_programs_are_judged_by_what_was_computed_apart(tmp_path: Path) -> None:
    each = program(sides=SIDES, apart=True)
    log = CompileLog(tmp_path / "compiled.json", {})
    for side, apart in (("eager", 0.0), ("default", 1e-6), ("pygraph", "infinite")):
        log.put("first", side, "check", {"difference": apart})
    log.put("first", "reduce-overhead", "check", {"failure": "late", "error": "there was no time left for it"})
    row = results(tmp_path, [each]).add(each, timed(dict.fromkeys(SIDES, None)))
    status = {side: found["status"] for side, found in row["sides"].items()}
    assert status == {"eager": "ok", "default": "ok", "reduce-overhead": "unchecked", "pygraph": "wrong"}
    assert "no time left" in row["sides"]["reduce-overhead"]["error"]
    assert row["ratios"] == {}


def test_what_failed_when_it_was_compiled_is_not_timed(tmp_path: Path) -> None:
    each = program(sides=SIDES)
    log = CompileLog(tmp_path / "compiled.json", {})
    log.put("first", "default", "compile", {"failure": "failed", "error": "ValueError: no"})
    log.put("first", "reduce-overhead", "compile", {"failure": "memory", "error": "out of memory"})
    log.put("first", "pygraph", "compile", {"failure": "late", "error": "there was no time left for it"})
    found = results(tmp_path, [each])
    assert found.to_time(each) == ["eager", "reduce-overhead", "pygraph"]
    told = timed()
    del told.sides["default"]
    row = found.add(each, told)
    assert (row["sides"]["default"]["status"], row["sides"]["default"]["error"]) == ("failed", "ValueError: no")
    assert "default" not in row["ratios"]


def test_pairs_have_ratios_within_their_own_rounds(tmp_path: Path) -> None:
    """The second pair was timed on a GPU half as fast: that changes no ratio."""
    groups = [
        Group(("default", "pygraph"), 4, [{"default": {"wall_us": 300.0}, "pygraph": {"wall_us": 100.0}}] * 3),
        Group(("eager", "pygraph"), 4, [{"eager": {"wall_us": 800.0}, "pygraph": {"wall_us": 200.0}}] * 3),
    ]
    each = program(sides=SIDES)
    row = results(tmp_path, [each]).add(each, timed(groups=groups))
    assert {side: ratio["wall_us"]["ratio"] for side, ratio in row["ratios"].items() if "wall_us" in ratio} == {
        "default": 3.0,
        "eager": 4.0,
    }


def test_sides_that_were_never_alive_together_have_a_ratio_without_an_interval(tmp_path: Path) -> None:
    groups = [Group((side,), 4, [{side: {"wall_us": WALL[side]}}]) for side in SIDES]
    each = program(sides=SIDES)
    ratio = results(tmp_path, [each]).add(each, timed(groups=groups))["ratios"]["default"]["wall_us"]
    assert ratio == {"ratio": 3.0, "interval": None, "confidence": None, "rounds": 0}


def test_it_says_whose_choices_of_kernels_a_side_has(tmp_path: Path) -> None:
    each, told = program(sides=SIDES), timed()
    told.sides["eager"].facts["chosen"] = {}
    told.sides["default"].facts["chosen"] = {"a": "8", "b": "4"}
    told.sides["reduce-overhead"].facts["chosen"] = {"a": "8", "b": "4"}
    told.sides["pygraph"].facts["chosen"] = {"a": "8", "b": "2", "c": "1"}
    row = results(tmp_path, [each]).add(each, told)
    assert {side: found.get("choices") for side, found in row["sides"].items()} == {
        "eager": None,
        "default": {"shared": 2, "own": 0},
        "reduce-overhead": {"shared": 2, "own": 0},
        "pygraph": {"shared": 1, "own": 2},
    }
    note = "pygraph: 2 of 3 configurations of kernels are not default's: 1 of the same kernels"
    assert row["notes"] == [note]


def test_a_second_command_knows_what_the_first_one_compiled(tmp_path: Path) -> None:
    """Then no side has to compile by itself."""
    for phase in ("compile", "time"):
        options = Options(seconds=120, jobs=4, blocks=1, seed=0, phase=phase)
        plans = {side: {"takes": 0.3} for side in ("eager", "default", "pygraph")}
        starter = launcher(tmp_path, plans)
        run([program()], starter, options, lambda _: None, skipped={}, tell=lambda _: None, step=lambda _: None)
    compiling = [what for _, _, phase, what, _ in events(tmp_path) if phase == "time" and what.startswith("compile")]
    assert compiling == ["compile begins"] * 3 + ["compile ends"] * 3


def test_compile_time_counts_only_where_it_was_measured(tmp_path: Path) -> None:
    each = program(sides=SIDES)
    log = CompileLog(tmp_path / "compiled.json", {})
    for side, seconds in (("default", 2.0), ("pygraph", 2.5)):
        log.put("first", side, "compile", {"compile_s": seconds})
    for measured in (False, True):
        row = results(tmp_path, [each], compile_time=measured).add(each, timed())
        assert row["ratios"]["default"].get("compile_s") == (0.8 if measured else None)
        assert row["sides"]["pygraph"].get("compile_s") == (2.5 if measured else None)


def test_the_file_is_valid_at_any_moment_and_names_what_is_missing(tmp_path: Path) -> None:
    """Read after every write of a whole benchmark, in which one workload is wrong and another one dies."""
    plans = {
        "wrong pygraph": {"result": "wrong"},
        "dies default": {"die": "block"},
        "fails default": {"die": "compile"},
    }
    programs = [program(name) for name in ("right", "wrong", "dies", "fails")]
    path, seen = tmp_path / "results.json", []

    def write(found: Results) -> None:
        found.write(path)
        seen.append(json.loads(path.read_text(), parse_constant=pytest.fail))

    options = Options(seconds=120, jobs=4, blocks=2, seed=0)
    run(programs, launcher(tmp_path, plans), options, write, skipped={}, tell=lambda _: None, step=lambda _: None)
    assert [len(each["left_out"]) for each in seen] == [4, 3, 2, 1, 0]
    workloads = read(path)["workloads"]
    assert set(workloads["right"]["ratios"]) == {"eager", "default"}
    assert workloads["wrong"]["ratios"] == {}
    assert set(workloads["dies"]["ratios"]) == set(workloads["fails"]["ratios"]) == {"eager"}
    assert "no such kernel" in workloads["fails"]["sides"]["default"]["error"]
    assert list(tmp_path.glob(".results*")) == []


def test_both_phases_may_be_two_commands(tmp_path: Path) -> None:
    programs, seen = [program("right", apart=True)], []
    for phase in ("compile", "time"):
        options = Options(seconds=120, jobs=4, blocks=2, seed=0, phase=phase)
        starter = launcher(tmp_path, {"pygraph": {"result": "right"}})
        found = run(programs, starter, options, lambda _: None, skipped={}, tell=lambda _: None, step=lambda _: None)
        seen.append(found.as_json())
    assert seen[0]["workloads"] == {}
    assert set(seen[1]["workloads"]["right"]["ratios"]) == {"eager", "default"}


def test_when_the_time_is_up_everything_left_out_is_named(tmp_path: Path) -> None:
    options = Options(seconds=0.001, jobs=1, blocks=2, seed=0)
    found = run(
        [program("a"), program("b")],
        launcher(tmp_path),
        options,
        lambda _: None,
        skipped={"c": "not installed: timm"},
        tell=lambda _: None,
        step=lambda _: None,
    ).as_json()
    assert found["left_out"] == dict.fromkeys("ab", "the time was up before its turn")
    assert found["skipped"] == {"c": "not installed: timm"}


def test_other_documents_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for text in ("[]", "{}", json.dumps({"schema": SCHEMA + 1}), "{"):
        path.write_text(text)
        with pytest.raises(ValueError):
            read(path)


@pytest.mark.parametrize("part", ["cores", "gpu", "pygraph"])
def test_results_of_another_machine_or_version_are_not_put_together(part: str) -> None:
    made: dict[str, Any] = {"pygraph": "1", "machine": {"cores": 2, "gpu": "x"}, "settings": {"tiny": False}}
    made |= {"workloads": {"a": {}}, "left_out": {"b": "late"}, "skipped": {}}
    more = {**made, "workloads": {"b": {}}, "left_out": {}}
    together = combine([made, more])
    assert (set(together["workloads"]), together["left_out"]) == ({"a", "b"}, {})
    other = {**more, "pygraph": "2"} if part == "pygraph" else {**more, "machine": {**more["machine"], part: 64}}
    with pytest.raises(ValueError, match="do not belong together"):
        combine([made, other])
