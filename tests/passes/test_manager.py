"""The pass manager: contracts and stages, errors with their place, dumps, prints, bisecting and reproducers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from pygraph.errors import OptionError, ParseError, PassError, VerifyError
from pygraph.ir import CAPTURABLE, H200, REASON, REGION, SELECTED, Graph, Stage
from pygraph.ir.parser import parse as parse_graph
from pygraph.passes import Instrument, Pass, PassContext, PassManager, PassResult, Step, bisect
from pygraph.passes.indirection import Indirection
from pygraph.passes.partitioning import Partitioning
from pygraph.passes.reproducer import read_header
from pygraph.passes.selection import Selection
from tests.passes.build import TENSOR, build, regions

PIPELINE = "partitioning,indirection,selection"


@dataclass(frozen=True)
class Idle(Pass):
    """Changes nothing."""

    name: ClassVar[str] = "idle"

    size: int = 0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False, ("idled",))


@dataclass(frozen=True)
class Raising(Idle):
    name: ClassVar[str] = "raising"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        graph.add("half.done", [], [TENSOR])
        raise KeyError("gone")


@dataclass(frozen=True)
class Breaking(Idle):
    """Leaves a capturable node without region or reason."""

    name: ClassVar[str] = "breaking"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        graph.nodes[1].meta.drop(REGION)
        return PassResult(True)


@dataclass(frozen=True)
class Lying(Idle):
    """Annotates and does not say so, or the other way round."""

    name: ClassVar[str] = "lying"

    changes: bool = True

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.changes:
            graph.nodes[0].meta.set(REASON, "changed")
        return PassResult(not self.changes)


@dataclass(frozen=True)
class Wordless(Idle):
    name: ClassVar[str] = "wordless"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Rewriting(Idle):
    """Stands for a pass that rewrites operators, after which all must be judged again."""

    name: ClassVar[str] = "rewriting"
    ensures: ClassVar[Stage | None] = Stage.LIFTED


def sample(stage: Stage = Stage.PLACED) -> Graph:
    return build("a: launch x", "b: launch a w", "u: host b", "c: launch u b", returns="c", stage=stage)


def run(pipeline: str | list[Pass | str], graph: Graph, **options: object) -> None:
    PassManager(pipeline, **options).run(graph)  # type: ignore[arg-type]


# -- running -----------------------------------------------------------------------------------------------------------


def test_passes_run_in_order_and_are_recorded() -> None:
    graph = sample()
    result = PassManager([Idle(), "partitioning{max-regions=1},indirection", Idle(3)], check="full").run(graph)
    assert [record.text for record in result.passes] == [
        "idle",
        "partitioning{max-regions=1}",
        "indirection",
        "idle{size=3}",
    ]
    assert [record.modified for record in result.passes] == [False, True, True, False]
    stages = [Stage.PLACED, Stage.PARTITIONED, Stage.INDIRECTED, Stage.INDIRECTED]
    assert [record.stage for record in result.passes] == stages
    assert result.passes[0].notes == ("idled",)
    assert all(record.time_ms > 0 for record in result.passes)
    assert result.time_ms == pytest.approx(sum(record.time_ms for record in result.passes))
    assert result.modified
    assert result.skipped == ()
    assert graph.stage is Stage.INDIRECTED


def test_text_of_a_pipeline_is_canonical() -> None:
    assert PassManager(["partitioning{ max-regions = none }", Idle(2)]).text == "partitioning,idle{size=2}"


def test_a_run_leaves_nothing_behind_in_the_manager() -> None:
    manager = PassManager(PIPELINE)
    first, second = sample(), sample()
    manager.run(first)
    manager.run(second)
    assert str(first) == str(second)


def test_every_check_gives_the_same_graph() -> None:
    texts = set()
    for check in ("off", "result", "full"):
        graph = sample()
        run(PIPELINE, graph, check=check)
        texts.add(str(graph))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("pipeline", "error", "reason"),
    [
        ("partitioning{", ParseError, "the text ends"),
        ("partitoning", OptionError, "did you mean 'partitioning'"),
        ([3], OptionError, "passes and text, not of int"),
        ([Idle(size={1})], OptionError, "a set has no text"),  # type: ignore[arg-type]
    ],
)
def test_an_unreadable_pipeline_is_refused(pipeline: object, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        PassManager(pipeline)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"check": "fulll"}, "no check is called 'fulll'; did you mean 'full'"),
        ({"bisect_limit": -1}, "cannot be negative"),
        ({"print_after": ["partition"]}, "it is not in the pipeline; did you mean 'partitioning'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(OptionError, match=re.escape(reason)):
        PassManager(PIPELINE, **options)  # type: ignore[arg-type]


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_pass_run_again_sets_the_stage_back() -> None:
    graph = sample()
    run(PIPELINE, graph)
    result = PassManager("partitioning").run(graph)
    assert graph.stage is Stage.PARTITIONED
    assert result.passes[0].stage is Stage.PARTITIONED
    assert all(not region.parameters and SELECTED not in region.meta for region in graph.regions.values())
    assert all(region.meta.get(REASON) is None for region in graph.regions.values())


def test_selection_run_again_keeps_what_came_before_it() -> None:
    graph = sample()
    run(PIPELINE, graph)
    before = str(graph)
    run([Selection()], graph, check="full")
    assert str(graph) == before
    run([Indirection()], graph)
    assert graph.stage is Stage.INDIRECTED
    assert all(region.parameters and SELECTED not in region.meta for region in graph.regions.values())


def test_going_back_to_the_start_drops_every_judgement() -> None:
    graph = build("a: launch x", "u: host a", "v: view u", "w1: host v", "b: launch w1")
    run(PIPELINE, graph)
    run([Rewriting()], graph, check="full")
    assert graph.stage is Stage.LIFTED
    assert not graph.regions
    assert all(key not in node.meta for node in graph.nodes for key in (CAPTURABLE, REASON, REGION))


def test_going_back_before_partitioning_keeps_the_reasons_of_legality_alone() -> None:
    @dataclass(frozen=True)
    class Again(Idle):
        name: ClassVar[str] = "again"
        ensures: ClassVar[Stage | None] = Stage.PLACED

    graph = build("a: launch x", "u: host a", "v: view u", "w1: host v", "b: launch w1")
    untouched = str(graph)
    run([PIPELINE, Again()], graph, check="full")
    assert str(graph) == untouched


def test_a_pass_sees_what_it_requires_even_if_it_ensures_less() -> None:
    seen: list[int] = []

    @dataclass(frozen=True)
    class Dissolving(Idle):
        name: ClassVar[str] = "dissolving"
        requires: ClassVar[Stage] = Stage.PARTITIONED
        ensures: ClassVar[Stage | None] = Stage.PLACED

        def run(self, graph: Graph, ctx: PassContext) -> PassResult:
            seen.append(len(graph.regions))
            return PassResult(False)

    graph = sample()
    run([PIPELINE, Dissolving()], graph)
    assert seen == [2]
    assert (graph.stage, dict(graph.regions)) == (Stage.PLACED, {})


# -- failures ----------------------------------------------------------------------------------------------------------


def failure(pipeline: str | list[Pass | str], graph: Graph, **options: object) -> PassError:
    with pytest.raises(PassError) as caught:
        run(pipeline, graph, **options)
    return caught.value


def test_a_missing_stage_names_pass_stage_and_passes_run() -> None:
    error = failure("partitioning,selection", sample())
    assert error.reason == "it requires a graph at stage indirected, and this one is at partitioned"
    assert (error.pass_name, error.stage, error.passes_run) == ("selection", "partitioned", ("partitioning",))


def test_a_pass_that_raises_is_named(tmp_path: Path) -> None:
    error = failure(["partitioning", Raising()], sample(), dump_dir=tmp_path)
    assert (error.pass_name, error.stage, error.passes_run) == ("raising", "partitioned", ("partitioning",))
    assert error.reason == "KeyError: 'gone'"
    assert isinstance(error.__cause__, KeyError)
    assert f"reproducer: {error.reproducer}" in str(error)


def test_a_result_that_does_not_verify_names_the_node(tmp_path: Path) -> None:
    error = failure(["partitioning", Breaking()], sample(), dump_dir=tmp_path)
    assert (error.pass_name, error.node, error.stage) == ("breaking", "b", "partitioned")
    assert "rule membership" in error.reason
    assert isinstance(error.__cause__, VerifyError)


def test_checks_can_be_turned_off() -> None:
    run(["partitioning", Breaking()], sample(), check="off")
    run([Lying()], sample(), check="result")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (True, "it says that the graph was not modified, and the printed graph is different"),
        (False, "it says that the graph was modified, and the printed graph is the same"),
    ],
)
def test_modified_is_held_against_the_printed_graph(changes: bool, reason: str, tmp_path: Path) -> None:
    assert failure([Lying(changes=changes)], sample(), check="full", dump_dir=tmp_path).reason == reason


def test_a_pass_must_return_a_result(tmp_path: Path) -> None:
    assert failure([Wordless()], sample(), dump_dir=tmp_path).reason == "run() must return a PassResult, not NoneType"


# -- reproducers -------------------------------------------------------------------------------------------------------


def test_a_reproducer_holds_the_graph_before_the_pass_and_how_to_run_it(tmp_path: Path) -> None:
    graph = sample()
    ctx = PassContext("cuda", H200, {"s1": 4, "s0": 2})
    with pytest.raises(PassError) as caught:
        PassManager(["partitioning", Raising(size=2)], dump_dir=tmp_path / "new").run(graph, ctx)
    assert caught.value.reproducer == str(tmp_path / "new" / "reproducer-02-raising.pgir")
    text = Path(caught.value.reproducer).read_text()
    lines = text.splitlines()
    assert lines[:5] == [
        "// pipeline: raising{size=2}",
        "// device: cuda",
        "// model: h200",
        "// values: s0=2, s1=4",
        "// error: KeyError: 'gone'",
    ]
    header = read_header(text)
    assert (header.pipeline, header.ctx) == ("raising{size=2}", ctx)
    expected = sample()
    run("partitioning", expected)
    assert parse_graph(text) == expected


def test_a_reproducer_fails_again_in_the_same_way(tmp_path: Path) -> None:
    first = failure(["partitioning", Breaking()], sample(), dump_dir=tmp_path)
    text = Path(first.reproducer or "").read_text()
    again = failure([Breaking()], parse_graph(text), dump_dir=tmp_path)
    assert (again.reason, again.node, again.stage) == (first.reason, first.node, first.stage)


def test_without_a_dump_directory_the_reproducer_is_a_temporary_file() -> None:
    error = failure([Raising()], sample())
    path = Path(error.reproducer or "")
    assert path.name == "reproducer-01-raising.pgir"
    assert parse_graph(path.read_text()) == sample()
    path.unlink()
    path.parent.rmdir()


def test_a_header_may_be_absent_or_partial() -> None:
    assert (read_header("graph …").pipeline, read_header("graph …").ctx) == (None, None)
    header = read_header("// a comment\n// pipeline: idle\n\n// device: cuda\n")
    assert (header.pipeline, header.ctx) == ("idle", None)
    with pytest.raises(ValueError, match="many"):
        read_header("// device: cuda\n// values: s0=many\n")


# -- dumps, prints, instruments ----------------------------------------------------------------------------------------


def test_dumps_are_numbered_and_parse(tmp_path: Path) -> None:
    graph = sample()
    run([PIPELINE, Idle()], graph, dump_dir=tmp_path / "deep" / "er")
    folder = tmp_path / "deep" / "er"
    names = ["00-placed", "01-partitioning", "02-indirection", "03-selection", "04-idle"]
    assert sorted(path.stem for path in folder.iterdir()) == names
    assert parse_graph((folder / "00-placed.pgir").read_text()) == sample()
    assert parse_graph((folder / "04-idle.pgir").read_text()) == graph


def test_an_unwritable_dump_directory_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    graph = sample()
    with caplog.at_level(logging.WARNING, "pygraph"):
        run(PIPELINE, graph, dump_dir=tmp_path / "file" / "sub")
    assert graph.stage is Stage.SELECTED
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"cannot write dumps to {tmp_path / 'file' / 'sub'}"
    ]


def test_an_unwritable_reproducer_does_not_hide_the_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "pygraph"):
        error = failure([Raising()], sample(), dump_dir=tmp_path / "file")
    assert (error.pass_name, error.reproducer) == ("raising", None)
    assert "cannot write a reproducer for reproducer-01-raising" in caplog.text


def test_printing_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    graph = sample()
    run([PIPELINE], graph, print_before=["partitioning"], print_after=["all"])
    shown = capsys.readouterr().err
    heads = re.findall(r"^// .*$", shown, re.MULTILINE)
    assert heads == ["// before 1: partitioning", "// after 1: partitioning", "// after 2: indirection", "// after 3: selection"]
    assert parse_graph(shown[shown.index("// after 3") :]) == graph


def test_instruments_see_every_step() -> None:
    seen: list[str] = []

    class Watch(Instrument):
        def start(self, graph: Graph) -> None:
            seen.append(f"start {graph.stage.value}")

        def before(self, step: Step, graph: Graph) -> None:
            seen.append(f"before {step.number} {step.name} {graph.stage.value}")

        def after(self, step: Step, graph: Graph, result: PassResult) -> None:
            seen.append(f"after {step.number} {graph.stage.value} {result.modified}")

    run(["partitioning", Idle()], sample(), instruments=[Watch()])
    assert seen == [
        "start placed",
        "before 1 partitioning placed",
        "after 1 partitioned True",
        "before 2 idle partitioned",
        "after 2 partitioned False",
    ]


# -- bisecting ---------------------------------------------------------------------------------------------------------


def test_a_bisect_limit_stops_the_pipeline_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graph = sample()
    with caplog.at_level(logging.WARNING, "pygraph"):
        result = PassManager(PIPELINE, bisect_limit=1).run(graph)
    assert [record.name for record in result.passes] == ["partitioning"]
    assert result.skipped == ("indirection", "selection")
    assert graph.stage is Stage.PARTITIONED
    assert [record.message for record in caplog.records] == [
        "BISECT: running pass (1) partitioning on main",
        "BISECT: NOT running pass (2) indirection on main",
        "BISECT: NOT running pass (3) selection on main",
    ]


@pytest.mark.parametrize("limit", [0, 3, 99])
def test_the_limit_counts_executions(limit: int) -> None:
    result = PassManager(PIPELINE, bisect_limit=limit).run(sample())
    assert len(result.passes) == min(limit, 3)


def not_two_regions(graph: Graph) -> bool:
    return len(graph.regions) != 2


@pytest.mark.parametrize(
    ("pipeline", "good", "culprit"),
    [
        ([Idle(), PIPELINE], not_two_regions, (2, "partitioning")),
        ([PIPELINE], lambda graph: graph.stage is not Stage.SELECTED, (3, "selection")),
        (["partitioning", Raising(), "indirection"], lambda graph: True, (2, "raising")),
    ],
)
def test_bisect_finds_the_pass(
    pipeline: list[Pass | str], good: Callable[[Graph], bool], culprit: tuple[int, str]
) -> None:
    graph = sample()
    found = bisect(pipeline, graph, good)
    assert found is not None
    step, before = found
    assert (step.number, step.name) == culprit
    assert good(before)
    assert graph == sample()


def test_bisect_finds_nothing_where_all_is_well() -> None:
    assert bisect(PIPELINE, sample(), lambda graph: True) is None


def test_bisect_needs_a_good_start() -> None:
    with pytest.raises(ValueError, match="not good before the first pass"):
        bisect(PIPELINE, sample(), lambda graph: False)


def test_partitioning_after_a_broken_limit_recovers() -> None:
    graph = sample()
    run(PIPELINE, graph, bisect_limit=1)
    run([Partitioning(max_regions=1), "indirection,selection"], graph)
    assert regions(graph) == "a b"
