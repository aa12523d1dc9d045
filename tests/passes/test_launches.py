"""Passes over launch programs: the built-in ones, and the manager on passes of anybody's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import OptionError, PassError
from pygraph.ir import Graph
from pygraph.passes import LaunchPass, PassContext, PassManager, PassResult, Registry, bisect, read_header
from pygraph.passes.launches import DEFAULT_LAUNCH_PIPELINE
from pygraph.program.default import DEFAULT_PASSES, as_captured
from pygraph.program.order import Order
from pygraph.program.program import Program
from pygraph.program.text import parse_program
from pygraph.settings import Settings
from pygraph.version import digest
from tests.commands import run
from tests.passes.build import build
from tests.program.programs import CAPTURED, recordings


def captured(name: str) -> Program:
    """A program of the host driver's before any pass."""
    program = CAPTURED[name]()
    return as_captured(program.recording, program.slots, held=program.held, lent=program.lent, name=program.name)


@dataclass(frozen=True)
class Unordered(LaunchPass):
    """Nothing waits for anything."""

    name: ClassVar[str] = "unordered"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        return PassResult(True, (), replace(program, order=Order.of([set() for _ in program.recording.launches])))


@dataclass(frozen=True)
class Shift(LaunchPass):
    """Moves intermediates towards the end of the workspace, and beyond."""

    name: ClassVar[str] = "shift"

    count: int = 1

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        distance = self.count * program.recording.alignment
        moved = {index: offset + distance for index, offset in program.layout.offsets.items()}
        return PassResult(True, (), replace(program, layout=replace(program.layout, offsets=moved)))


@dataclass(frozen=True)
class Silent(LaunchPass):
    """Changes the program and does not say so."""

    name: ClassVar[str] = "silent"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        return PassResult(False, (), replace(program, alignment=2 * program.alignment))


@pytest.mark.parametrize("order", ["program", "dependences"])
@pytest.mark.parametrize("name", CAPTURED)
def test_the_pipeline_makes_what_captures_get_by_default(name: str, order: str) -> None:
    program = captured(name)
    ran = PassManager(DEFAULT_LAUNCH_PIPELINE, check="full").run(program, PassContext(order=order))
    assert ran.program == DEFAULT_PASSES(program, order)
    assert [f"{one.name}: {one.notes[0]}" for one in ran.passes] == list(DEFAULT_PASSES(program, order).notes)


@settings(max_examples=60)
@given(
    recordings(),
    st.sampled_from(["program", "dependences"]),
    st.permutations(["rename", "order", "layout", "segments"]),
)
def test_whatever_the_order_of_passes_each_leaves_a_program_that_verifies(
    made: tuple[object, list[object]], order: str, passes: list[str]
) -> None:
    recording, slots = made
    program = as_captured(recording, tuple(slots))  # type: ignore[arg-type]
    manager = PassManager(",".join(passes), check="full")
    once = manager.run(program, PassContext(order=order)).program
    assert once is not None
    if passes.index("rename") < passes.index("order") < passes.index("layout"):
        # else an order may become possible, or another layout, by what came behind it
        assert manager.run(once, PassContext(order=order)).program == once, "passes run again change nothing"


def test_a_pass_that_makes_a_wrong_program_is_refused_with_a_reproducer(tmp_path: Path) -> None:
    program = captured("mlp")
    with pytest.raises(PassError, match="does not wait for l0 ") as caught:
        PassManager([Unordered()], dump_dir=tmp_path).run(program)
    assert (caught.value.pass_name, caught.value.stage, caught.value.built_in) == ("unordered", "program", False)
    text = Path(caught.value.reproducer or "").read_text()
    pipeline, context = read_header(text)
    assert (pipeline, context) == ("unordered", PassContext("cpu", order="dependences"))
    assert str(parse_program(text)) == str(program)


def test_a_failed_pass_runs_again_from_its_reproducer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(points=())
    monkeypatch.setattr("pygraph.passes.pipeline.default_registry", registry)
    monkeypatch.setattr("pygraph.passes.pipeline.parse_pipeline.__defaults__", ("<pipeline>", registry))
    registry.register(Shift)
    with pytest.raises(PassError) as caught:
        PassManager("order,shift{count=3}", dump_dir=tmp_path).run(captured("mlp"))
    again = run("opt", caught.value.reproducer)
    assert again.exit_code == 1
    assert caught.value.reason in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00-program.pgir",
        "01-order.pgir",
        "reproducer-02-shift.pgir",
    ]


def test_bisecting_finds_the_pass() -> None:
    program = captured("branches")
    found = bisect(DEFAULT_LAUNCH_PIPELINE, program, lambda each: each.order is None)
    assert found is not None
    assert (found[0], found[1].name, found[2]) == (2, "order", PassManager("rename").run(program).program)
    assert bisect(DEFAULT_LAUNCH_PIPELINE, program, lambda each: True) is None
    limited = PassManager(DEFAULT_LAUNCH_PIPELINE, bisect_limit=1).run(program)
    assert (len(limited.passes), limited.skipped) == (1, ("order", "layout", "segments"))


def test_modified_is_checked() -> None:
    with pytest.raises(PassError, match=r"the launch program was not modified, and the printed .* is different"):
        PassManager([Silent()], check="full").run(captured("mlp"))


def nothing(graph: Graph, ctx: PassContext) -> bool:
    return False


def test_passes_and_what_they_run_on_belong_together() -> None:
    with pytest.raises(PassError, match="runs on a launch program, and this is a graph"):
        PassManager("order").run(build("a: launch x"))
    for pipeline in ("legality", [nothing]):
        with pytest.raises(PassError, match="runs on a graph, and this is a launch program"):
            PassManager(pipeline).run(captured("mlp"))
        with pytest.raises(OptionError, match="runs on a graph, and this is a launch program"):
            PassManager(pipeline).check_order(None)
    with pytest.raises(OptionError, match="runs on a launch program, and this is a graph"):
        PassManager("legality,segments").check_order()
    PassManager(DEFAULT_LAUNCH_PIPELINE).check_order(None)


def test_the_key_of_launch_passes_has_all_that_they_decide_by() -> None:
    """Decisions on orders are kept under it."""
    chosen: list[dict[str, object]] = [
        {},
        {"order_memory": 0.5},
        {"launch_passes": "order"},
        {"launch_passes": "order{memory=0.5}"},
        {"launch_passes": [Shift()]},
        {"launch_passes": [Shift(2)]},
    ]
    keys = [Settings.make(options, {}).launches().key for options in chosen]
    assert len(set(keys)) == len(keys)
    assert digest(Path(__file__)) in keys[4]
    assert keys == [Settings.make(options, {}).launches().key for options in chosen]


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program.pgir"
    path.write_text(f"// a comment\n{captured('branches')}", encoding="utf-8")
    return path


def test_opt_runs_passes_over_a_program(file: Path, tmp_path: Path) -> None:
    program = captured("branches")
    assert run("opt", file).stdout == str(program)
    shown = run("opt", file, "-p", DEFAULT_LAUNCH_PIPELINE, "--dump-dir", tmp_path / "d", "--print-after", "layout")
    assert shown.exit_code == 0
    assert parse_program(shown.stdout).order == DEFAULT_PASSES(program, "dependences").order
    assert "// after 3: layout\nprogram @" in shown.stderr
    names = [f"{n:02}-{name}.pgir" for n, name in enumerate(("program", "rename", "order", "layout", "segments"))]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == names
    assert (tmp_path / "d" / names[-1]).read_text() == shown.stdout
    asked = run("opt", "-", "-p", "order", stdin=f"// device: cpu\n// order: program\n{program}")
    assert parse_program(asked.stdout).order is None


def test_commands_refuse_a_program_that_is_wrong_or_cannot_be_run(file: Path) -> None:
    wrong = re.sub(r" @ 0\b", " @ 1", file.read_text())
    refused = run("opt", "-", stdin=wrong)
    assert (refused.exit_code, "invalid-program" in refused.stderr) == (1, True)
    assert run("opt", "-", "--no-verify", stdin=wrong).exit_code == 0
    shown = run("opt", "-", stdin=file.read_text().replace("born = 3", "born = 9")).stderr
    assert "words: l3 (aten.sort.stable) has a word 1 that belongs to %buf2, which is allocated later" in shown
    (line,) = re.findall(r"<stdin>:(\d+):3: invalid-program", shown)
    assert file.read_text().split("\n")[int(line) - 1].startswith("  l3 = ")
    assert "runs on a graph, and this is a launch program" in run("opt", file, "-p", "legality").stderr
    ran = run("run", file)
    assert (ran.exit_code, "a launch program is replayed where it was captured" in ran.stderr) == (1, True)


def test_passes_lists_them() -> None:
    assert "order  (launch programs)\n    Make each launch wait" in run("passes").stdout
