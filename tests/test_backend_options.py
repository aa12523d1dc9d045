"""``torch.compile(backend="pygraph")`` from the outside: options, passes of the user's, failures, dumps."""

from __future__ import annotations

import json
import logging
import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import pygraph
from pygraph import backend
from pygraph.errors import PygraphError
from pygraph.ir import Graph
from pygraph.passes.base import LaunchPass, Pass, PassContext, PassResult
from pygraph.passes.selection import Selection
from pygraph.program.default import ordered
from pygraph.program.order import Order
from pygraph.program.program import Program
from pygraph.program.text import parse_program
from pygraph.report.text import render_text
from tests import forked
from tests.small import CALLS, Mlp, Scaled, compiled, replays

pytestmark = pytest.mark.usefixtures("fresh")


# -- options -------------------------------------------------------------------------------------------------------


def test_memory_for_an_order_is_what_captures_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compiled programs, and of callables that are captured as they run."""
    asked: list[float] = []

    def watched(program: Program, order: str, memory: float) -> tuple[Program, str]:
        asked.append(memory)
        return ordered(program, order, memory)

    monkeypatch.setattr("pygraph.program.default.ordered", watched)
    model, x = Mlp(), torch.randn(4, 16)
    ours = compiled(model, order="dependences", order_memory=0.5)
    for _ in range(3):
        ours(x)
    monkeypatch.setenv("PYGRAPH_ORDER", "dependences")
    monkeypatch.setenv("PYGRAPH_ORDER_MEMORY", "0.25")
    step = pygraph.graph(lambda: x.mul_(0.5).add_(1), held=x)
    for _ in range(8):
        step()
    assert asked == [0.5, 0.25]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dumpdir": "x"}, "unknown option 'dumpdir'; did you mean 'dump_dir'"),
        ({"zzz": "x"}, "unknown option 'zzz'; known: passes, launch_passes, dump_dir"),
        ({"max_autotune": True}, "unknown option 'max_autotune'; it is Inductor's: {'inductor': {'max_autotune': …}}"),
        ({"order": "fast"}, "order must be 'measured', 'program' or 'dependences', not 'fast'"),
        ({"inductor": {"max_autotun": True}}, "Inductor has no option 'max_autotun'; did you mean 'max_autotune'?"),
        ({"inductor": {"triton.cudagraphs": True}}, "'triton.cudagraphs' cannot be combined with PyGraph"),
        ({"passes": "legalty"}, "no pass is called 'legalty'; did you mean 'legality'?"),
        ({"passes": "partitioning,legality"}, "partitioning"),
        (
            {"passes": "legality,order"},
            "pass 'order' cannot run where the pipeline has it: it runs on a launch program",
        ),
        ({"launch_passes": "ordr"}, "no pass is called 'ordr'; did you mean 'order'?"),
        ({"launch_passes": "legality"}, "it runs on a graph, and this is a launch program"),
        ({"launch_passes": 3}, "launch_passes must be pipeline text or a sequence of passes, not 3"),
    ],
)
def test_torch_compile_checks_options(options: dict[str, Any], told: str) -> None:
    """Before anything is called: by name, by the backend itself, and for a module that compiles itself."""
    with pytest.raises(PygraphError, match=re.escape(told)):
        torch.compile(Mlp(), backend="pygraph", options=options)
    with pytest.raises(PygraphError, match=re.escape(told)):
        torch.compile(backend=backend.pygraph, options=options)(lambda x: x)
    with pytest.raises(PygraphError, match=re.escape(told)):
        Mlp().compile(backend="pygraph", options=options)
    assert torch.compile(Mlp(), backend=lambda gm, inputs, options: gm, options=options) is not None, "not ours"


def test_torch_compile_checks_modes() -> None:
    with pytest.raises(PygraphError, match="reduce-overheads"):
        torch.compile(Mlp(), backend="pygraph", mode="reduce-overheads")


@dataclass(frozen=True)
class Reversed(LaunchPass):
    """Replays launches from the last one to the first."""

    name: ClassVar[str] = "reversed"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        launches = range(len(program.recording.launches))
        order = Order.of([set() for _ in launches], [launch % 2 for launch in launches])
        return PassResult(True, (), replace(program, order=order))


@dataclass(frozen=True)
class Counted(LaunchPass):
    """Notes how many launches there are, and in which order."""

    name: ClassVar[str] = "counted"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        return PassResult(False, (f"launches: {len(program.recording.launches)}, {ctx.order}, {ctx.device}",))


def test_launch_passes_of_the_users_run_on_each_capture() -> None:
    model = Mlp().eval()
    ours = compiled(model, order="dependences", launch_passes=["order", Counted(), "layout,segments"])
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
    assert replays() >= 1
    (record,) = [region.record for region in pygraph.reports()[-1].regions]
    assert record is not None
    assert record.passes[1] == "counted: launches: 3, dependences, cpu"
    assert [note.partition(":")[0] for note in record.passes] == ["order", "counted", "layout", "segments"]
    assert f"launch passes: {'; '.join(record.passes)}" in render_text(pygraph.reports(), width=400, color=False)


def test_a_launch_pass_that_is_wrong_leaves_the_region_uncaptured_and_says_why(tmp_path: Path) -> None:
    model = Mlp().eval()
    ours = compiled(model, launch_passes=[Reversed()], dump_dir=str(tmp_path))
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
        assert replays() == 0
        (region,) = pygraph.reports()[-1].regions
        assert region.why.startswith("pass-failed: pass 'reversed' failed (stage program, passes run before: none)")
        assert list(tmp_path.glob("*/region0/reproducer-01-reversed.pgir"))
        strict = compiled(model, launch_passes=[Reversed()], strict=True)
        strict(x)
        with pytest.raises(PygraphError, match="pass-failed"):
            strict(x)


def test_inductor_options_reach_inductor() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).train()
    ours = compiled(model, inductor={"fallback_random": True})
    x = torch.ones(256)
    with torch.no_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            actual = ours(x)
            torch.manual_seed(seed)
            assert torch.equal(actual, model(x))
    assert replays() >= 1


def test_a_mode_of_inductor_is_taken() -> None:
    model = Mlp().eval()
    ours = torch.compile(model, backend="pygraph", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
    assert replays() >= 1


def test_disable_compiles_with_plain_inductor() -> None:
    model = Mlp().eval()
    with torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model, disable=True)(x), model(x))
    assert pygraph.reports() == []


def test_strict_raises_for_what_cannot_be_captured() -> None:
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, torch.no_grad(), pytest.raises(Exception, match="host-read"):
        compiled(Scaled(), strict=True)(torch.randn(8, 16))


def test_strict_accepts_what_is_captured() -> None:
    ours = compiled(Mlp().eval(), strict=True)
    with torch.no_grad():
        for _ in range(CALLS):
            ours(torch.randn(8, 16))
    assert replays() >= 1


def test_verify_always_compares_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraph.runtime import life

    compared: list[object] = []
    real = life.verify

    def verify(*args: Any, **facts: Any) -> Any:
        compared.append(args)
        return real(*args, **facts)

    monkeypatch.setattr(life, "verify", verify)
    model = Mlp().eval()
    ours = compiled(model, verify="always")
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
    assert len(compared) == replays() >= 1


# -- passes of the user's, and failures ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(Pass):
    """Raises."""

    name: ClassVar[str] = "failing"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        raise ZeroDivisionError("on purpose")


@dataclass(frozen=True)
class Misspell(Pass):
    """Leaves an operator that does not exist."""

    name: ClassVar[str] = "misspell"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        first = graph.nodes[0]
        graph.add("aten.rleu.default", first.args[:1], [first.args[0].type], before=first)
        return PassResult(True)


@dataclass(frozen=True)
class ReluToTanh(Pass):
    """Rewrites the program, to show that the IR is what gets compiled."""

    name: ClassVar[str] = "relu-to-tanh"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        found = [node for node in graph.nodes if node.op == "aten.relu.default"]
        for node in found:
            new = graph.add(
                "aten.tanh.default", node.args, (node.output.type,), cost=node.cost, loc=node.loc, before=node
            )
            graph.replace_uses(node.output, new.output)
            graph.erase(node)
        return PassResult(bool(found), (f"{len(found)} rewritten",))


def test_a_pass_that_rewrites_the_program_is_compiled() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    ours = compiled(f, passes=[ReluToTanh(), "legality,placement,partitioning"])
    for _ in range(CALLS):
        x = torch.randn(8, 16)
        torch.testing.assert_close(ours(x), torch.tanh(x) + 1)
    assert replays() >= 1


def test_a_users_pass_that_fails_raises_with_its_traceback() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="on purpose") as caught:
        compiled(Mlp().eval(), passes=[Failing(), "legality"])(torch.randn(8, 16))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, 'raise ZeroDivisionError("on purpose")')


def test_a_pass_that_leaves_a_graph_which_cannot_be_compiled_raises() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="pass 'misspell' failed"):
        compiled(Mlp().eval(), passes=[Misspell(), "legality,placement,partitioning"])(torch.randn(8, 16))


def test_a_pipeline_in_the_wrong_order_raises() -> None:
    with pytest.raises(Exception, match=r"'partitioning' cannot run where .* stage placed, .* placement gets it there"):
        compiled(Mlp().eval(), passes="legality,partitioning")(torch.randn(8, 16))


def test_a_pass_of_pygraph_that_fails_falls_back_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Selection, "run", Failing.run)
    model = Mlp().eval()
    with caplog.at_level(logging.WARNING, "pygraph"), torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model)(x), model(x))
    (said,) = [r.message for r in caplog.records if "plain Inductor" in r.message]
    assert "selection" in said
    assert "on purpose" in said
    (report,) = pygraph.reports()
    assert report.error is not None


def test_a_failure_in_the_backward_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraph.frontend import lift as module

    real = module.lift

    def only_forward(gm: Any, *, kind: str, **rest: Any) -> Any:
        if kind == "backward":
            raise PygraphError("no backward")
        return real(gm, kind=kind, **rest)

    monkeypatch.setattr(module, "lift", only_forward)
    model = Mlp()
    x = torch.randn(8, 16)
    compiled(model)(x).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for expected, actual in zip((p.grad for p in model.parameters()), grads, strict=True):
        torch.testing.assert_close(actual, expected)


# -- dumps and explanations ----------------------------------------------------------------------------------------


def test_dumps_hold_each_pass_the_program_and_the_report(tmp_path: Path) -> None:
    from pygraph.ir import parse_graph

    ours = compiled(Mlp().eval(), dump_dir=str(tmp_path))
    with torch.no_grad():
        for _ in range(CALLS):
            ours(torch.randn(8, 16))
    (folder,) = tmp_path.iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "00-lifted.pgir"
    assert [n.split("-", 1)[1] for n in names if n[0] == "0"][1:] == [
        "legality.pgir",
        "placement.pgir",
        "partitioning.pgir",
        "indirection.pgir",
        "selection.pgir",
    ]
    assert {"program.py", "report.txt", "report.json"} <= set(names)
    for path in folder.glob("*.pgir"):
        text = path.read_text()
        assert str(parse_graph(text)) == text
    programs = sorted(path.name for path in (folder / "region0").iterdir())
    assert programs == [
        f"{n:02}-{name}.pgir" for n, name in enumerate(("program", "rename", "order", "layout", "segments"))
    ]
    launches = parse_program((folder / "region0" / programs[-1]).read_text()).recording.launches
    assert [launch.kind.value for launch in launches] == ["operator", "kernel", "operator"]
    assert "# region 0: may be captured" in (folder / "program.py").read_text()


def test_an_unwritable_dump_directory_changes_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    model = Mlp().eval()
    with caplog.at_level(logging.WARNING, "pygraph"), torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model, dump_dir=str(blocked / "sub"))(x), model(x))
    assert "cannot write dumps" in caplog.text


PROCESS = """
import sys
from pathlib import Path
import torch
from pygraph.errors import OptionError

try:
    torch.compile(torch.nn.Linear(2, 2), backend="pygraph", options={"stricct": True})
except OptionError as error:
    print(error)
folder = Path(sys.argv[1])
ours = torch.compile(lambda x: torch.relu(x @ x) + 1, backend="pygraph", options={"dump_dir": str(folder)})
with torch.no_grad():
    for size in (3, 4):
        torch._dynamo.reset()
        for _ in range(4):
            ours(torch.ones(size, size))
first, _ = sorted(folder.iterdir())
(first / "report.txt").unlink()
(first / "report.txt").mkdir()
"""


def test_a_process_checks_options_at_its_first_torch_compile_and_writes_reports_again_at_its_exit(
    tmp_path: Path,
) -> None:
    """The first ``torch.compile`` is what imports the backend. A report that cannot be written is a warning."""
    done = forked.run(PROCESS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unknown option 'stricct'; did you mean 'strict'?\n"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("cannot write dumps to") == 1
    _, second = sorted(tmp_path.iterdir())
    (graph,) = json.loads((second / "report.json").read_text())["graphs"]
    assert [region["record"]["replays"] for region in graph["regions"]] == [2]


def test_ranks_dump_to_folders_of_their_own(tmp_path: Path) -> None:
    ours = compiled(Mlp().eval(), dump_dir=str(tmp_path))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad():
            ours(torch.randn(8, 16))
    finally:
        torch.distributed.destroy_process_group()
    (rank,) = tmp_path.iterdir()
    (folder,) = rank.iterdir()
    assert rank.name == "rank0"
    assert {"00-lifted.pgir", "program.py", "report.txt"} <= {path.name for path in folder.iterdir()}


def test_what_cannot_be_dumped_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise ValueError("no such glyph")

    monkeypatch.setattr("pygraph.report.text.render_text", broken)
    model, x = Mlp().eval(), torch.randn(4, 16)
    ours = compiled(model, dump_dir=str(tmp_path))
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(ours(x), model(x))
    assert "no such glyph" in caplog.text


def test_explain_names_regions_reasons_and_lines() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        explanation = pygraph.explain(Scaled(), torch.randn(8, 16))
    text = str(explanation)
    assert "host-read" in text
    assert "small.py" in text
    assert explanation.json()["graphs"]
    assert "<svg" in explanation.html()
