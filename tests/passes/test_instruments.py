"""Dumps, prints and instruments of one's own."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from pygraph.ir import Graph, Stage
from pygraph.ir import parse as parse_graph
from pygraph.passes import Instrument, Step
from tests.passes.sample_passes import PIPELINE, Idle, Raising, failure, run, sample


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
    assert heads == [
        "// before 1: partitioning",
        "// after 1: partitioning",
        "// after 2: indirection",
        "// after 3: selection",
    ]
    assert parse_graph(shown[shown.index("// after 3") :]) == graph


def test_instruments_see_every_step() -> None:
    seen: list[str] = []

    class Watch(Instrument):
        def start(self, graph: Graph) -> None:
            seen.append(f"start {graph.stage.value}")

        def before(self, step: Step, graph: Graph) -> None:
            seen.append(f"before {step.number} {step.name} {graph.stage.value}")

        def after(self, step: Step, graph: Graph) -> None:
            seen.append(f"after {step.number} {step.name} {graph.stage.value}")

    run(["partitioning", Idle()], sample(), instruments=[Watch()])
    assert seen == [
        "start placed",
        "before 1 partitioning placed",
        "after 1 partitioning partitioned",
        "before 2 idle partitioned",
        "after 2 idle partitioned",
    ]
