"""The pass manager: passes in order, contracts checked, errors with their place, dumps, reproducers, bisecting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from pygraph.errors import OptionError, ParseError, PassError, VerifyError
from pygraph.ir import CAPTURABLE, H200, REASON, REGION, Graph, Stage, parse_graph
from pygraph.passes import (
    Pass,
    PassContext,
    PassManager,
    PassResult,
    Registry,
    as_pass,
    bisect,
    parse_pipeline,
    read_header,
)
from pygraph.passes.base import PassFunction
from tests.passes.build import TENSOR, build

PIPELINE = "partitioning,indirection,selection"


@dataclass(frozen=True)
class Idle(Pass):
    """Changes nothing."""

    name: ClassVar[str] = "idle"

    size: int = 0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False, ("idled",))


def ensuring(stage: Stage, *, requires: Stage = Stage.LIFTED) -> Pass:
    """A pass that changes nothing and ensures ``stage``."""
    return staged(unchanged, requires, stage)


def staged(function: PassFunction, requires: Stage, ensures: Stage) -> Pass:
    """The pass that runs ``function``, between two stages."""
    made = as_pass(function)
    return type(made.__name__, (made,), {"requires": requires, "ensures": ensures})()


def unchanged(graph: Graph, ctx: PassContext) -> bool:
    return False


def raising(graph: Graph, ctx: PassContext) -> bool:
    graph.add("half.done", [], [TENSOR])
    raise KeyError("gone")


def breaking(graph: Graph, ctx: PassContext) -> bool:
    """Leaves a capturable node without region or reason."""
    graph.nodes[1].meta.drop(REGION)
    return True


def silent(graph: Graph, ctx: PassContext) -> bool:
    """Annotates and does not say so."""
    graph.nodes[0].meta.set(REASON, "changed")
    return False


def boasting(graph: Graph, ctx: PassContext) -> bool:
    """Says that it changed what it did not."""
    return True


def wordless(graph: Graph, ctx: PassContext) -> None: ...


def keep_out(graph: Graph, ctx: PassContext) -> bool:
    """Keep the first node out of every region."""
    graph.nodes[0].meta.set(CAPTURABLE, False)
    graph.nodes[0].meta.set(REASON, ctx.device)
    return True


def sample() -> Graph:
    return build("a: launch x", "b: launch a w", "u: host b", "c: launch u b", returns="c")


def run(pipeline: object, graph: Graph, **options: object) -> None:
    PassManager(pipeline, **options).run(graph)  # type: ignore[arg-type]


def failure(pipeline: object, graph: Graph, **options: object) -> PassError:
    with pytest.raises(PassError) as caught:
        run(pipeline, graph, **options)
    return caught.value


# -- pipelines ---------------------------------------------------------------------------------------------------------


def test_passes_run_in_order_and_are_recorded() -> None:
    graph = sample()
    manager = PassManager([Idle(), "partitioning{ max-regions = 1 },indirection", Idle(3)], check="full")
    assert manager.text == "idle,partitioning{max-regions=1},indirection,idle{size=3}"
    result = manager.run(graph)
    assert [record.text for record in result.passes] == manager.text.split(",")
    assert [record.modified for record in result.passes] == [False, True, True, False]
    stages = [Stage.PLACED, Stage.PARTITIONED, Stage.INDIRECTED, Stage.INDIRECTED]
    assert [record.stage for record in result.passes] == stages
    assert result.passes[0].notes == ("idled",)
    assert all(record.time_ms > 0 for record in result.passes)
    assert result.time_ms == pytest.approx(sum(record.time_ms for record in result.passes))
    assert result.skipped == ()
    assert graph.stage is Stage.INDIRECTED


@pytest.mark.parametrize(
    ("pipeline", "options", "error", "reason"),
    [
        ("partitioning{", {}, ParseError, "the text ends"),
        ("partitoning", {}, OptionError, "did you mean 'partitioning'"),
        ([3], {}, OptionError, "functions and text, not of int"),
        ([Idle(size={1})], {}, OptionError, "option 'size' of pass 'idle': a set has no text"),  # type: ignore[arg-type]
        ([lambda graph, ctx: True], {}, OptionError, "needs a name"),
        (PIPELINE, {"check": "fulll"}, OptionError, "no check is called 'fulll'; did you mean 'full'"),
        (PIPELINE, {"bisect_limit": -1}, OptionError, "cannot be negative"),
        (PIPELINE, {"print_after": ["partition"]}, OptionError, "not in the pipeline; did you mean 'partitioning'"),
    ],
)
def test_wrong_pipelines_and_options_are_refused(
    pipeline: object, options: dict[str, object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        PassManager(pipeline, **options)  # type: ignore[arg-type]


def test_a_function_is_a_pass() -> None:
    graph = sample()
    result = PassManager([keep_out, "partitioning"], check="full").run(graph)
    assert [record.text for record in result.passes] == ["keep-out", "partitioning"]
    assert graph.nodes[0].meta.get(REASON) == "cpu"
    registry = Registry(points=())
    assert registry.register(keep_out) is keep_out
    assert parse_pipeline("keep-out", registry=registry) == (as_pass(keep_out)(),)


# -- contracts ---------------------------------------------------------------------------------------------------------


def test_a_missing_stage_names_pass_stage_and_passes_run() -> None:
    error = failure("partitioning,selection", sample())
    needed = "it requires a graph at stage indirected, and this one is at partitioned; indirection gets it there"
    assert error.reason == needed
    assert (error.pass_name, error.stage, error.passes_run) == ("selection", "partitioned", ("partitioning",))
    assert error.reproducer is None


def test_a_result_that_does_not_verify_names_the_node_and_fails_again(tmp_path: Path) -> None:
    error = failure(["partitioning", breaking], sample(), dump_dir=tmp_path)
    assert (error.pass_name, error.node, error.stage) == ("breaking", "b", "partitioned")
    assert error.passes_run == ("partitioning",)
    assert "rule membership" in error.reason
    assert isinstance(error.__cause__, VerifyError)
    again = failure([breaking], parse_graph(Path(error.reproducer or "").read_text()), dump_dir=tmp_path)
    assert (again.reason, again.node, again.stage) == (error.reason, error.node, error.stage)
    run(["partitioning", breaking], sample(), check="off")


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (silent, "it says that the graph was not modified, and the printed graph is different"),
        (boasting, "it says that the graph was modified, and the printed graph is the same"),
        (wordless, "run() must return a PassResult, not NoneType"),
    ],
)
def test_a_pass_must_say_what_it_did(item: Callable[..., object], reason: str, tmp_path: Path) -> None:
    assert failure([item], sample(), check="full", dump_dir=tmp_path).reason == reason


# -- stages ------------------------------------------------------------------------------------------------------------


def test_parameters_go_with_their_stage_even_if_the_pass_keeps_the_regions() -> None:
    graph, expected = sample(), sample()
    run([PIPELINE, ensuring(Stage.PARTITIONED, requires=Stage.PARTITIONED)], graph, check="full")
    run("partitioning", expected)
    assert graph == expected


def test_going_back_drops_regions_and_at_the_start_every_judgement() -> None:
    graph = build("a: launch x", "u: host a", "v: view u", "w1: host v", "b: launch w1")
    untouched = str(graph)
    run([PIPELINE, ensuring(Stage.PLACED)], graph, check="full")
    assert str(graph) == untouched
    run([PIPELINE, ensuring(Stage.LIFTED)], graph, check="full")
    assert graph.stage is Stage.LIFTED
    assert not graph.regions
    assert all(key not in node.meta for node in graph.nodes for key in (CAPTURABLE, REASON, REGION))


def test_a_pass_sees_what_it_requires_even_if_it_ensures_less() -> None:
    seen: list[int] = []

    def dissolving(graph: Graph, ctx: PassContext) -> bool:
        seen.append(len(graph.regions))
        return False

    graph = sample()
    run([PIPELINE, staged(dissolving, Stage.PARTITIONED, Stage.PLACED)], graph)
    assert seen == [2]
    assert (graph.stage, dict(graph.regions)) == (Stage.PLACED, {})


# -- what cannot be written, reproducers -------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    graph = sample()
    run(PIPELINE, graph, dump_dir=tmp_path / "file" / "sub")
    assert graph.stage is Stage.SELECTED
    assert f"cannot write {tmp_path / 'file' / 'sub'}/00-placed.pgir" in caplog.text
    error = failure([raising], sample(), dump_dir=tmp_path / "file")
    assert (error.pass_name, error.reproducer) == ("raising", None)
    assert f"cannot write {tmp_path / 'file'}/reproducer-01-raising.pgir" in caplog.text


def test_a_reproducer_holds_the_graph_before_the_pass_and_how_to_run_it(tmp_path: Path) -> None:
    ctx = PassContext("cuda", H200)
    with pytest.raises(PassError) as caught:
        PassManager(["partitioning", raising], dump_dir=tmp_path / "new").run(sample(), ctx)
    error = caught.value
    assert (error.reason, type(error.__cause__)) == ("KeyError: 'gone'", KeyError)
    assert error.reproducer == str(tmp_path / "new" / "reproducer-02-raising.pgir")
    assert f"reproducer: {error.reproducer}" in str(error)
    text = Path(error.reproducer).read_text()
    assert "// error: KeyError: 'gone'\n" in text
    assert read_header(text) == ("raising", ctx)
    expected = sample()
    run("partitioning", expected)
    assert parse_graph(text) == expected


SHRINKING = """
from pygraph.errors import PassError
from pygraph.ir import parse_graph
from pygraph.passes import PassManager

def raising(graph, ctx):
    raise KeyError

for name in ("larger", "smaller"):
    try:
        PassManager([raising]).run(parse_graph(f"graph @{name} () {{ return () }}"))
    except PassError as error:
        print(error.reproducer)
"""


def test_without_a_dump_directory_the_last_reproducer_of_a_pass_is_a_temporary_file(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    printed = subprocess.run([sys.executable, "-c", SHRINKING], env=environ, check=True, capture_output=True, text=True)
    one, other = map(Path, printed.stdout.splitlines())
    assert one == other
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [one]
    assert one.name == "reproducer-01-raising.pgir"
    assert parse_graph(one.read_text()).name == "smaller"


def test_a_header_may_be_absent_or_partial() -> None:
    assert read_header("graph …") == (None, None)
    assert read_header("// a comment\n// pipeline: idle\n\n// device: cuda\n") == ("idle", None)
    assert read_header("// device: cuda\n") == (None, PassContext("cuda", H200))
    with pytest.raises(ValueError, match="value"):
        read_header("// device: cuda\n// model: h200\n")
    with pytest.raises(ValueError, match="nested too deep"):
        read_header(f"// device: cuda\n// model: {'[' * 100_000}\n")


# -- bisecting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3, 99])
def test_a_bisect_limit_stops_the_pipeline_and_says_so(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    names = PIPELINE.split(",")
    result = PassManager(PIPELINE, bisect_limit=limit).run(sample())
    assert [record.name for record in result.passes] == names[:limit]
    assert result.skipped == tuple(names[limit:])
    assert ("bisect limit" in caplog.text) == (limit < 3)


@pytest.mark.parametrize(
    ("pipeline", "good", "culprit"),
    [
        ([Idle(), PIPELINE], lambda graph: len(graph.regions) != 2, (2, "partitioning")),
        ([PIPELINE], lambda graph: graph.stage is not Stage.SELECTED, (3, "selection")),
        (["partitioning", raising, "indirection"], lambda graph: True, (2, "raising")),
    ],
)
def test_bisect_finds_the_pass(
    pipeline: list[Pass | str], good: Callable[[Graph], bool], culprit: tuple[int, str]
) -> None:
    graph = sample()
    found = bisect(pipeline, graph, good)
    assert found is not None
    number, item, before = found
    assert (number, item.name) == culprit
    assert good(before)
    assert graph == sample()


def test_bisect_finds_nothing_where_all_is_well_and_needs_a_good_start() -> None:
    assert bisect(PIPELINE, sample(), lambda graph: True) is None
    with pytest.raises(ValueError, match="not good before the first pass"):
        bisect(PIPELINE, sample(), lambda graph: False)
