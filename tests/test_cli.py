"""The command line: what each command prints, its exit status, and that bad input never ends in a traceback."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraph import __version__
from pygraph.cli import main
from pygraph.ir import Stage, parse_graph
from pygraph.passes import default_registry
from tests.commands import run

ROOT = Path(__file__).parents[1]
PIPELINE = "legality,placement,partitioning{max-regions=4}"
GRAPH = """\
graph @main (%x : f32[8, 8]@cpu) {
  %a = aten.mm.default(%x, %x) : f32[8, 8]@cpu {launches = 1}
  %n = aten._local_scalar_dense.default(%a) : float !sync
  %b = aten.mul.Tensor(%a, %n) : f32[8, 8]@cpu {launches = 1}
  return (%b)
}
"""


Write = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    """Writes a text to a file, a graph's or one of another ``name``, and gives its name."""

    def write(text: str, name: str = "graph.pgir") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_version_and_help() -> None:
    assert run("--version").output == f"pygraph {__version__}\n"
    assert "Exit status:\n    0  done" in run("--help").output


def test_an_unknown_command_names_the_nearest_one() -> None:
    close, other = run("explian", "script.py"), run("xyz")
    assert (close.exit_code, other.exit_code) == (2, 2)
    assert "no command is called 'explian'; did you mean 'explain'?" in close.stderr
    assert "no command is called 'xyz'; known: bench, calibrate, explain, opt" in other.stderr
    assert "No such option" in run("--verbos").stderr


def test_opt_reads_stdin_and_writes_to_a_file(tmp_path: Path) -> None:
    """Without a pipeline it prints the graph."""
    target = tmp_path / "out.pgir"
    assert run("opt", "-", "-o", str(target), stdin=GRAPH).output == ""
    assert parse_graph(target.read_text(encoding="utf-8")) == parse_graph(GRAPH)
    failed = run("opt", "-", "-o", str(tmp_path / "no" / "out.pgir"), stdin=GRAPH)
    assert failed.exit_code == 1
    assert "out.pgir': No such file or directory" in failed.stderr


def test_opt_prints_times_bisects_and_dumps(file: Write, tmp_path: Path) -> None:
    printing = ("--print-before=placement", "--print-after", "all", "--timing")
    result = run(
        "opt", file(GRAPH), "-p", PIPELINE, *printing, "--bisect-limit", "2", "--dump-dir", str(tmp_path / "d")
    )
    marks = [line for line in result.stderr.splitlines() if line.startswith("//")]
    assert marks == ["// after 1: legality", "// before 2: placement", "// after 2: placement"]
    rows = re.findall(r"^ *\d+\.\d{3} ms  (\w+)", result.stderr, re.MULTILINE)
    assert rows == ["legality", "placement", "all"]
    assert (result.exit_code, parse_graph(result.stdout).stage) == (0, Stage.PLACED)
    names = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert names == ["00-lifted.pgir", "01-legality.pgir", "02-placement.pgir"]


MODULE = """
import pygraph.ir

@pygraph.register
def mark_first(graph, ctx):
    graph.nodes[0].meta.set(pygraph.ir.REASON, "marked")
    return True
"""


def test_opt_loads_a_module_with_passes(file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "passes_of_mine.py").write_text(MODULE, encoding="utf-8")
    unknown = run("opt", file(GRAPH), "-p", "mark-first").stderr
    assert "no pass is called 'mark-first'" in unknown
    assert "opt --load MODULE" in unknown
    shown = run("opt", file(GRAPH), "--load", "passes_of_mine", "-p", "mark-first,legality").stdout
    assert parse_graph(shown).stage is Stage.JUDGED
    failed = run("opt", file(GRAPH), "--load", "no_such_module")
    assert (failed.exit_code, "--load no_such_module: ModuleNotFoundError" in failed.stderr) == (1, True)


def test_opt_takes_the_device_from_the_graph_the_header_or_the_option(file: Write) -> None:
    def reason_of_the_product(*args: str, text: str = GRAPH) -> object:
        graph = parse_graph(run("opt", file(text), "-p", "legality", *args).stdout)
        return dict(graph.node("a").meta.items()).get("reason")

    on_cuda = "// device: cuda\n" + GRAPH
    assert reason_of_the_product() is None
    assert reason_of_the_product("--device", "cuda") == "cpu-operator"
    assert reason_of_the_product(text=on_cuda) == "cpu-operator"
    assert reason_of_the_product("--device", "cpu", text=on_cuda) is None


def test_opt_runs_a_reproducer_as_it_stands(file: Write) -> None:
    result = run("opt", file(f"// pipeline: legality,placement\n// error: something\n{GRAPH}"))
    assert parse_graph(result.stdout).stage.value == "placed"
    result = run("opt", file(f"// pipeline: legality,placement\n{GRAPH}"), "-p", "legality")
    assert parse_graph(result.stdout).stage.value == "judged", "-p wins"


JUDGED = GRAPH.replace("(%x :", "{stage = judged} (%x :")


@pytest.mark.parametrize(
    ("text", "pipeline", "told"),
    [
        (GRAPH, ["-p", "partitioning"], r"graph\.pgir: pass 'partitioning' failed \(stage lifted, .*: none\): "),
        (GRAPH, ["-p", "legalty"], r"<pipeline>:1:1: .*'legalty'; did you mean 'legality'\? .*--load.*\nlegalty\n\^"),
        (f"// pipeline: legalty\n{GRAPH}", [], r"graph\.pgir.*:1:1: no pass is called 'legalty'.*\n.*\n\^+\n"),
        (f"// device: cpu\n// model: h200\n{GRAPH}", [], r"graph\.pgir: malformed value in the leading comments: "),
        ("", [], r"graph\.pgir:1:1: .+\n\n?\^?\n?"),
        ("graph @main (%x : f32[8)", [], r"graph\.pgir:1:24: unexpected '\)'.*\n.*\n +\^\n"),
        (JUDGED, [], r"graph\.pgir:\d+:3: verification failed at node \w+ \(stage judged, .+\n.*\n  \^\^\n"),
    ],
)
def test_what_is_wrong_is_told_by_place_and_reason(file: Write, text: str, pipeline: list[str], told: str) -> None:
    result = run("opt", file(text), *pipeline)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(told, result.stderr), result.stderr


def test_a_broken_graph_passes_only_without_verification(file: Write) -> None:
    assert run("opt", file(JUDGED), "--no-verify").exit_code == 0


def test_what_is_no_text_and_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.pgir"
    path.write_bytes(b"graph \xff")
    for result in (run("opt", str(path)), run("opt", "-", stdin=b"graph \xff")):
        assert result.exit_code == 1
        assert "is no UTF-8 text: " in result.stderr
    assert run("opt", str(tmp_path / "none.pgir")).exit_code == 2
    assert run("opt").exit_code == 2


@given(st.text(max_size=60), st.integers(0, len(GRAPH)), st.integers(0, 40))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_ends_in_a_traceback(inserted: str, at: int, dropped: int) -> None:
    result = run("opt", "-", stdin=(GRAPH[:at] + inserted + GRAPH[at + dropped :]).encode("utf-8", "replace"))
    assert result.exit_code in (0, 1)
    if result.exit_code == 1:
        assert re.match(r"<stdin>(:\d+:\d+)?: .", result.stderr), result.stderr


def test_passes_are_listed_with_options_and_stages() -> None:
    shown = run("passes").output
    assert [line.split()[0] for line in shown.splitlines() if line and line[0] != " "] == list(default_registry.names())
    assert "partitioning  (placed → partitioned)" in shown
    assert "    max-regions: int or none = none\n" in shown
    assert "    from pygraph.passes.partitioning:Partitioning" in shown


def test_a_pass_that_does_not_load_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_registry._paths, "lost", ["no_such_module:Lost"])
    shown = " ".join(run("passes").output.split())
    assert "lost (cannot be used)" in shown
    assert "No module named 'no_such_module'" in shown


@pytest.mark.parametrize("args", [["passes"], ["opt", "-", "-p", PIPELINE], ["--version"]])
def test_commands_on_text_never_import_torch(args: list[str]) -> None:
    program = (
        "import sys; from pygraph.cli import main; "
        f"main({args!r}, standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], input=GRAPH, text=True, capture_output=True, env=environ)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_log_level_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_LOGS", "loud")
    result = run("passes")
    assert result.exit_code == 1
    assert "PYGRAPH_LOGS must be one of" in result.stderr


SMALL = """\
import sys
import torch
print("arguments", sys.argv[1:], __name__)
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))).requires_grad_(False)
"""


@pytest.fixture
def script(file: Write) -> Write:
    """Writes a script and gives its name."""
    return functools.partial(file, name="net.py")


@pytest.mark.usefixtures("fresh")
def test_explain_compiles_what_the_script_leaves_and_writes_every_format(tmp_path: Path) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    example = str(ROOT / "examples" / "mlp_item.py")
    svg, dot = tmp_path / "report.svg", tmp_path / "report.dot"
    files = ("--html", page, "--json", data, "--svg", svg, "--dot", dot)
    result = run("explain", example, *files, "--strict")
    assert result.exit_code == 3, "a number is read on the host"
    shown = " ".join(result.stdout.split())
    assert "83.3 %: 5 of 6 launches selected, 5 replayed, 1 outside" in shown
    assert "aten._local_scalar_dense host-read" in shown
    assert "mlp_item.py:23" in shown
    assert 'class="replay">replayed<' in page.read_text(encoding="utf-8")
    boxes = ElementTree.parse(svg).findall(".//{*}g[@id]")
    assert {box.get("class") for box in boxes} >= {"outside", "region r0", "region r1"}
    assert dot.read_text(encoding="utf-8").count("fillcolor") == len(boxes)
    (graph,) = json.loads(data.read_text(encoding="utf-8"))["graphs"]
    assert [region["state"] for region in graph["regions"]] == ["replay", "replay"]
    assert [row["reason"] for row in graph["uncaptured"]] == ["host-read"]


@pytest.mark.usefixtures("fresh")
def test_explain_reports_what_the_script_compiles_itself(script: Write) -> None:
    path = script(SMALL + 'f = torch.compile(model, backend="pygraph")\nfor _ in range(3): f(torch.ones(2, 4))\n')
    result = run("explain", path, "--strict", "--", "--html", "x")
    assert result.exit_code == 0, "nothing was left uncaptured"
    assert re.fullmatch(rf"running {path}\ncompiling graph\d+_inference: Sequential at .*\n", result.stderr)
    assert result.stdout.startswith("arguments ['--html', 'x'] __main__\ngraph")
    assert "4 of 4 launches selected, 4 replayed" in " ".join(result.stdout.split())


BROKEN = """\
import torch

def half(x):
    return (x @ x).relu() @ x

def whole(x):
    y = half(x)
    print("between")
    return half(y)

def skipped(x):
    for _ in range(2):
        x = half(x)
        print("in a loop")
    return x.sin()

def nothing(x):
    print("no operator here")
    return 3

whole, skipped, nothing = (torch.compile(f, backend="pygraph") for f in (whole, skipped, nothing))
for _ in range(3):
    whole(torch.ones(4, 4)), skipped(torch.ones(4, 4)), nothing(torch.ones(4, 4))
"""


@pytest.mark.usefixtures("fresh")
def test_graph_breaks_are_no_coverage(script: Write) -> None:
    """Also in functions of which nothing is compiled: all breaks are listed, with line and reason."""
    result = run("explain", script(BROKEN), "--strict", "--min-coverage", "80", "--json", "-")
    assert result.exit_code == 3
    told = [line for line in result.stderr.splitlines() if line.startswith("--")]
    lines = [re.fullmatch(r"--strict: graph break at .*net\.py:(\d+): [^:]+: (.*)", line) for line in told[:-1]]
    found = {int(line[1]): line[2] for line in lines if line}
    assert found == {8: 'print("between")', 14: 'print("in a loop")', 18: 'print("no operator here")'}
    assert "skipped runs uncompiled" in next(line for line in told if ":14:" in line)
    summary = json.loads(result.stdout)["summary"]
    assert summary["selected_launches"] == summary["launches"] > 0, "of the graphs, nothing is outside"
    share = summary["launches"] / (summary["launches"] + 3)
    assert summary["coverage"] == share
    assert told[-1] == f"--min-coverage 80: coverage is {share:.1%}".replace("%", " %")


@pytest.mark.usefixtures("fresh")
def test_the_least_coverage_is_that_of_launches(script: Write) -> None:
    path = script(SMALL + 'f = torch.compile(model, backend="pygraph")\nfor _ in range(3): f(torch.ones(2, 4))\n')
    assert run("explain", path, "--min-coverage", "100").exit_code == 0
    example = str(ROOT / "examples" / "mlp_item.py")
    assert run("explain", example, "--min-coverage", "83").exit_code == 0, "five of six"
    result = run("explain", example, "--min-coverage", "84")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (3, "--min-coverage 84: coverage is 83.3 %")
    assert run("explain", example, "--min-coverage", "101").exit_code == 2


@pytest.mark.usefixtures("fresh")
def test_explain_keeps_stdout_for_the_document(script: Write) -> None:
    result = run("explain", script(SMALL + "inputs = {'input': torch.ones(2, 4)}\n"), "--json", "-", "--", "--lr", "3")
    assert [graph["error"] for graph in json.loads(result.stdout)["graphs"]] == [None]
    assert "arguments ['--lr', '3'] __main__" in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import sys; sys.exit(0)\n", r"net\.py: PyGraph compiled nothing\. Compile with .*'model' and its 'inputs'"),
        ("def f(:\n", r'File ".*net\.py", line 1\n.*\n +\^\nSyntaxError: '),
        ("import sys; sys.exit(4)\n", r"net\.py: the script exited with status 4"),
        ("\n1 / 0\n", r'\nTraceback .*\n  File ".*net\.py", line 2, in <module>\n(?s:.*)ZeroDivisionError: .*\n$'),
        ("model, inputs = (lambda x: 2), (1,)\n", r"net\.py: the model was called, but Dynamo found nothing"),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_a_script_that_fails_is_told_as_python_would(script: Write, text: str, told: str) -> None:
    result = CliRunner().invoke(main, ["explain", script(text)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert re.search(told, result.stderr), result.stderr
    assert "pygraph/cli" not in result.stderr


def test_a_script_leaves_the_process_as_it_was(script: Write) -> None:
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    run("explain", script("import sys\nsys.argv = []\nsys.path.append('x')\n"), "a")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_what_makes_no_sense_is_told_before_the_script_runs(script: Write, tmp_path: Path) -> None:
    path = script("print('ran')\n")
    result = run("explain", path, "--html", str(tmp_path / "no" / "report.html"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "report.html: cannot be written: No such file or directory" in result.stderr
    folder = run("explain", path, "--json", str(tmp_path))
    assert (folder.exit_code, folder.stderr) == (1, f"{tmp_path}: cannot be written: Is a directory\n")
    assert run("explain", path, "--json", "-", "--html", "-").exit_code == 2
    assert "only one of" in run("explain", path, "--svg", "-", "--dot", "-").stderr
    assert run("explain", str(tmp_path / "none.py")).exit_code == 2
    unknown = run("explain", path, "--htm", "x")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "Options of the script go after '--'" in unknown.stderr


@pytest.mark.usefixtures("fresh")
def test_explain_shows_forward_and_backward_of_a_training_loop() -> None:
    result = run("explain", str(ROOT / "examples" / "mlp_training.py"), "--strict")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    assert re.search(r"graph\d+_forward Sequential, forward, cpu", shown)
    assert re.search(r"graph\d+_backward Sequential, backward, cpu", shown)
    assert re.search(r"2 graphs 100 % of \d+ launches selected, in 2 regions", shown)


@pytest.mark.models
@pytest.mark.usefixtures("fresh")
@pytest.mark.sweep
def test_explain_replays_a_small_bert() -> None:
    pytest.importorskip("transformers")
    result = run("explain", str(ROOT / "examples" / "bert.py"), "1", "--json", "-")
    (graph,) = json.loads(result.stdout)["graphs"]
    assert graph["error"] is None
    assert graph["coverage"]["replayed_launches"] == graph["coverage"]["launches"] > 5


def test_the_package_lists_its_public_names_only() -> None:
    import pygraph

    assert dir(pygraph) == sorted(pygraph.__all__)
    assert all(getattr(pygraph, name) is not None for name in dir(pygraph))


# -- terminals ---------------------------------------------------------------------------------------------------------

ESCAPES = "\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202e"
AT_FAULT = {
    "before the place": f'graph @g () {{ ^n = a.b("{ESCAPES}" zz) return () }}',
    "at the place": f"graph @g () {{ return () }} {ESCAPES}",
    "a string": f'graph @g () {{ ^n = a.b() "{ESCAPES}" return () }}',
    "a name": 'graph @g () { ^"\\u001b[2J" = a.b(%"\\u001b[2J") return () }',
    "a rule": 'graph @g () { %"\\u001b[2J" = aten.relu.default() : f32[] {capturable = 3} return () }',
    "the pipeline": f"// pipeline: {ESCAPES}bogus\ngraph @g () {{ return () }}",
}


@pytest.mark.parametrize("text", AT_FAULT.values(), ids=AT_FAULT)
def test_no_file_tells_the_terminal_anything(text: str, file: Write) -> None:
    """Carets still stand below the place."""
    shown = run("opt", file(text)).stderr
    assert shown
    assert all(char.isprintable() for char in shown.replace("\n", ""))


def test_carets_stand_below_the_place_behind_control_characters(file: Write) -> None:
    *_, row, carets = run("opt", file(AT_FAULT["before the place"])).stderr.splitlines()
    assert row[carets.index("^") :].startswith("zz")
