"""Reproducers: the graph before a pass that failed, and all that is needed to fail again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygraph.errors import PassError
from pygraph.ir import H200
from pygraph.ir import parse as parse_graph
from pygraph.passes import PassContext, PassManager
from pygraph.passes.manager import read_header
from tests.passes.sample_passes import Breaking, Raising, failure, run, sample


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
