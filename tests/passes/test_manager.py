"""The pass manager: passes in order, contracts checked, errors with their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pygraph.errors import OptionError, ParseError, VerifyError
from pygraph.ir import CAPTURABLE, REASON, Graph, Stage
from pygraph.passes import PassContext, PassManager, Registry, as_pass, parse
from tests.passes.sample_passes import PIPELINE, Breaking, Idle, Lying, Raising, Wordless, failure, run, sample


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
        ([3], OptionError, "functions and text, not of int"),
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


def test_a_missing_stage_names_pass_stage_and_passes_run() -> None:
    error = failure("partitioning,selection", sample())
    assert (
        error.reason
        == "it requires a graph at stage indirected, and this one is at partitioned; indirection gets it there"
    )
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


def keep_out(graph: Graph, ctx: PassContext) -> bool:
    """Keep the first node out of every region."""
    graph.nodes[0].meta.set(CAPTURABLE, False)
    graph.nodes[0].meta.set(REASON, ctx.device)
    return True


def test_a_function_is_a_pass() -> None:
    graph = sample()
    result = PassManager([keep_out, "partitioning"], check="full").run(graph)
    assert [record.text for record in result.passes] == ["keep-out", "partitioning"]
    assert graph.nodes[0].meta.get(REASON) == "cpu"
    registry = Registry(points=())
    assert registry.register(keep_out) is keep_out
    assert parse("keep-out", registry=registry) == (as_pass(keep_out)(),)
    assert registry.describe()[-1].summary == "Keep the first node out of every region."


def test_a_function_may_state_its_stages() -> None:
    judge_again = as_pass(keep_out, requires=Stage.PLACED, ensures=Stage.JUDGED)
    graph = sample()
    PassManager(["partitioning", judge_again()], check="full").run(graph)
    assert (graph.stage, graph.regions) == (Stage.JUDGED, {})


def test_a_function_must_return_a_result_and_have_a_name(tmp_path: Path) -> None:
    def silent(graph: Graph, ctx: PassContext) -> None: ...

    error = failure([silent], sample(), dump_dir=tmp_path)  # type: ignore[list-item]
    assert "must return a PassResult" in error.reason
    with pytest.raises(OptionError, match="needs a name"):
        PassManager([lambda graph, ctx: True])
