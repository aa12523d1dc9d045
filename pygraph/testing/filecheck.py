"""Runs a ``.pgir`` file through a pipeline and checks the printed result against the directives in its comments.

    // RUN: legality
    // CHECK: aten.relu.default(%x) {{.*}}capturable = true
    graph @g (%x : f32[4]@cpu) {
      %a = aten.relu.default(%x) : f32[4]@cpu
      return (%a)
    }

The directives:

// RUN: legality,placement      the pipeline (may be empty: print what was parsed); ``%s`` is not needed
// DEVICE: cuda                 the device whose work is captured (cpu when left out)
// CHECK: text                  a line after the previous match contains the text
// CHECK-NEXT: text             the line right after the previous match contains the text
// CHECK-NOT: text              no line before the next match (or the end) contains the text
// CHECK-ERROR: text            parsing, a pass or the verifier fails with a message that contains the text
// -----                        a new case with its own directives; RUN and DEVICE apply until they are repeated

Several blanks match one blank; ``{{…}}`` is a regular expression. RUN and at least one check are required.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pygraph.errors import PygraphError
from pygraph.ir import MODELS, parse_graph
from pygraph.passes import PassContext, PassManager

__all__ = ["CheckFailure", "check_file", "check_text"]

_DIRECTIVE = re.compile(r"//\s*(RUN|DEVICE|CHECK[A-Z-]*):(.*)")
_CHECKS = ("CHECK", "CHECK-NEXT", "CHECK-NOT", "CHECK-ERROR")


class CheckFailure(AssertionError):
    """A directive that does not hold, or a file that is not a valid test."""


@dataclass(frozen=True)
class _Check:
    """One check: its kind, its text, and its line in the file."""

    kind: str
    text: str
    line: int

    def holds(self, text: str) -> bool:
        parts = re.split(r"\{\{(.*?)\}\}", self.text)
        pattern = "".join(part if i % 2 else re.escape(_blanks(part)) for i, part in enumerate(parts))
        return re.search(pattern, _blanks(text)) is not None

    def fail(self, reason: str, output: str) -> CheckFailure:
        return CheckFailure(f"line {self.line}: {self.kind}: {self.text}\n  {reason}\n--- output:\n{output}")


def check_file(path: str | Path) -> None:
    """Run all cases of the file at ``path``. Raises CheckFailure as ``check_text`` does, and OSError."""
    check_text(Path(path).read_text(encoding="utf-8"))


def check_text(text: str) -> None:
    """Run all cases of a file's text. Raises CheckFailure for the first check that fails, or for an invalid case."""
    line = 1
    settings: dict[str, str] = {}
    for case in re.split(r"^[ \t]*// -----[ \t]*\n", text, flags=re.MULTILINE):
        _run_case(case, line, settings)
        line += case.count("\n") + 1


def _run_case(text: str, first: int, settings: dict[str, str]) -> None:
    """Run the case that starts on line ``first``. ``settings`` has RUN and DEVICE of earlier cases, and is updated."""
    checks: list[_Check] = []
    for number, line in enumerate(text.split("\n"), first):
        found = _DIRECTIVE.search(line)
        if found is None:
            continue
        kind, said = found[1], found[2].strip()
        if kind in ("RUN", "DEVICE"):
            settings[kind] = said
        elif kind not in _CHECKS or not said or (kind == "CHECK-NEXT" and not checks):
            raise CheckFailure(
                f"line {number}: no directive, {kind} of nothing, or CHECK-NEXT without a CHECK before it"
            )
        else:
            checks.append(_Check(kind, said, number))
    if "RUN" not in settings or not checks:
        raise CheckFailure(f"line {first}: a case needs '// RUN:' and something to check")
    expected = [check for check in checks if check.kind == "CHECK-ERROR"]
    try:
        graph, device = parse_graph(text, f"line {first}"), settings.get("DEVICE", "cpu")
        PassManager(settings["RUN"], check="full").run(graph, PassContext(device, MODELS[device]))
        output = str(graph)
    except PygraphError as error:
        output = str(error)
        if not expected:
            raise CheckFailure(f"line {first}: {type(error).__name__}: {error}") from error
        for check in expected:
            if not check.holds(output):
                raise check.fail("the error says something else", output) from error
    else:
        if expected:
            raise expected[0].fail("there was no error", output)
    _check_lines([check for check in checks if check.kind != "CHECK-ERROR"], output)


def _check_lines(checks: list[_Check], output: str) -> None:
    """Search for each CHECK after the match of the previous one; a CHECK-NOT holds for the lines in between."""
    lines = output.split("\n")
    at = -1
    forbidden: list[_Check] = []
    for check in checks:
        if check.kind == "CHECK-NOT":
            forbidden.append(check)
            continue
        reach = lines[at + 1 : at + 2] if check.kind == "CHECK-NEXT" else lines[at + 1 :]
        found = next((i for i, line in enumerate(reach, at + 1) if check.holds(line)), None)
        if found is None:
            where = "on the next line" if check.kind == "CHECK-NEXT" else f"after line {at + 1} of the output"
            raise check.fail(f"not found {where}", output)
        _refuse(forbidden, lines[at + 1 : found], output)
        forbidden, at = [], found
    _refuse(forbidden, lines[at + 1 :], output)


def _refuse(forbidden: list[_Check], lines: list[str], output: str) -> None:
    for check in forbidden:
        if any(map(check.holds, lines)):
            raise check.fail("found where it must not be", output)


def _blanks(text: str) -> str:
    return re.sub(r"\s+", " ", text)
