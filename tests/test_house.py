"""Rules of the repository that no other tool checks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
import tomllib
import yaml

from tests import commands
from tools import fuzz
from tools.mutants import guards

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CLOCKS = {"perf_counter", "monotonic", "process_time", "thread_time", "time", "elapsed_time", "timeit", "do_bench"}


def asserted_clocks(source: str) -> list[int]:
    """Lines of the assertions whose value comes from a clock: by a call, or by names that were given one's value."""
    if not re.search(rf"({'|'.join(sorted(CLOCKS))})(_ns)?\(", source):
        return []
    tree = ast.parse(source)
    timed: set[str] = set()

    def reads_a_clock(node: ast.AST | None) -> bool:
        for each in ast.walk(node) if node is not None else ():
            if isinstance(each, ast.Call):
                name = getattr(each.func, "attr", None) or getattr(each.func, "id", "")
                if name.removesuffix("_ns") in CLOCKS:
                    return True
            if isinstance(each, ast.Name) and each.id in timed:
                return True
        return False

    known = -1
    while known < len(timed):
        known = len(timed)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and reads_a_clock(node.value):
                names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
                timed |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
            if isinstance(node, ast.FunctionDef):
                returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                timed |= {node.name} if any(map(reads_a_clock, returned)) else set()
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert) and reads_a_clock(node.test)]


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() < 2",
        "start = perf_counter()\nrun()\nassert perf_counter() - start < 2",
        "def took():\n  start = time.time_ns()\n  run()\n  return time.time_ns() - start\nassert took() < 2",
        "for _ in range(3):\n  times += [start.elapsed_time(end)]\nbest = min(times)\nassert best < 2",
    ],
)
def test_assertions_on_clocks_are_found(source: str) -> None:
    assert asserted_clocks(source) == [source.count("\n") + 1]


def test_a_deadline_is_no_assertion_on_a_clock() -> None:
    waits = "end = time.monotonic() + 60\nwhile not found and time.monotonic() < end: look()\nassert found"
    assert asserted_clocks(waits) == []


def test_no_test_asserts_on_a_clock() -> None:
    """A machine at work fails such a test. Tests count work (``tests/work.py``); benchmarks read clocks."""
    found = {path: asserted_clocks(path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("*.py"))}
    assert not [f"{path}:{line}" for path, lines in found.items() for line in lines]


FOLDERS = ("pygraph", "tests", "benchmarks", "tools", "examples", "docs")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
OPENINGS = r"(What|Whether|The same)\b"


def test_docstrings_say_what_a_thing_is() -> None:
    """Docstrings of modules, classes and functions open with a subject or a verb."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(rf"[\"'][\s\\]*{OPENINGS}", source):  # to parse all files takes seconds
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, DOCUMENTED) and re.match(OPENINGS, ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)}:{node.body[0].lineno}")
    assert found == []


def test_make_lists_every_target() -> None:
    """Also those that pages name."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    targets = {target for target in phony.split() if not target.startswith("$")}
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # of no make
    shown = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True, env=own).stdout
    assert {line.split()[1] for line in shown.splitlines() if len(line.split()) > 2} == targets
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_targets_of_make(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)).split())
    for job in jobs.values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
            for command in re.findall(r"\bmake ((?:[^&|]|\$\{\{.*?\}\})*)", re.sub(r'\w+="[^"]*"', "", line)):
                for word in re.sub(r"\$\{\{ ?matrix\.(\w+) ?\}\}", lambda found: f"<{found[1]}>", command).split():
                    names = matrix[word[1:-1]] if word.startswith("<") else [word]
                    torch = word == "<torch>"
                    assert torch or "=" in word or set(names) <= targets, (path.name, command)


def test_guards_of_the_list_stand_in_the_code() -> None:
    for guard in guards():
        ast.parse(guard.mutated((ROOT / guard.file).read_text(encoding="utf-8")))
        assert all((ROOT / test).exists() for test in guard.tests)


def test_licences_of_all_dependencies_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    names = [re.match(r"[\w-]+", each) for each in (*project["dependencies"], *optional["testing"], *optional["cuda"])]
    page = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    assert [name[0] for name in names if name and not re.search(rf"[ |]{name[0]}[,; |]", page)] == []


def test_mutated_texts_are_read_or_refused(tmp_path: Path) -> None:
    """A second of what `make fuzz` does."""
    result = commands.run("--seconds", 1, "--out", tmp_path / "failure.pgir", command=fuzz.main)
    assert result.exit_code == 0, result.output
