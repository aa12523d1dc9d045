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
// CHECK: text                  the text comes on this line or later
// CHECK-NEXT: text             the text comes on the very next line
// CHECK-NOT: text              the text does not come before the next CHECK (or the end)
// CHECK-ERROR: text            parsing, a pass or the verifier fails, and says this
// -----                        a new case, with directives of its own; RUN and DEVICE hold on when not repeated

Runs of blanks are equal to one blank; ``{{…}}`` is a regular expression. RUN is required, and something to check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pygraph.errors import PygraphError
from pygraph.ir import H200, HOST, parse
from pygraph.passes import PassContext, PassManager

__all__ = ["CheckFailure", "check_file", "check_text"]

_DIRECTIVE = re.compile(r"//\s*(RUN|DEVICE|CHECK[A-Z-]*):(.*)")
_CHECKS = ("CHECK", "CHECK-NEXT", "CHECK-NOT", "CHECK-ERROR")


class CheckFailure(AssertionError):
    """A directive that does not hold, or a file that is no test."""


@dataclass(frozen=True)
class _Directive:
    """One check: its kind, the text, and the line of the file that it is on."""

    kind: str
    text: str
    line: int

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = re.split(r"\{\{(.*?)\}\}", self.text)
        return re.compile("".join(part if i % 2 else re.escape(_blanks(part)) for i, part in enumerate(parts)))

    def fail(self, reason: str, output: str) -> CheckFailure:
        return CheckFailure(f"line {self.line}: {self.kind}: {self.text}\n  {reason}\n--- output:\n{output}")


@dataclass
class _Case:
    """One input text with its pipeline and checks. ``line`` is its first line in the file."""

    text: str
    line: int
    pipeline: str | None = None
    device: str = "cpu"
    checks: list[_Directive] = field(default_factory=list)


def _split_cases(text: str) -> list[_Case]:
    """The cases of a file. Raises CheckFailure for directives that do not exist or have nothing to check."""
    cases = [_Case("", 1)]
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() == "// -----":
            cases.append(_Case("", number + 1, cases[-1].pipeline, cases[-1].device))
            continue
        cases[-1].text += line + "\n"
        match = _DIRECTIVE.search(line)
        if match:
            _add_directive(cases[-1], match[1], match[2], number)
    for case in cases:
        if case.pipeline is None or not case.checks:
            raise CheckFailure(f"line {case.line}: a case needs '// RUN:' and something to check")
        if case.checks[0].kind == "CHECK-NEXT":
            raise CheckFailure(f"line {case.checks[0].line}: CHECK-NEXT needs a CHECK before it")
    return cases


def check_file(path: str | Path) -> None:
    """Run every case of the file at ``path``. Raises CheckFailure, as ``check_text`` does, and OSError."""
    check_text(Path(path).read_text(encoding="utf-8"))


def check_text(text: str) -> None:
    """Run every case of a file's text. Raises CheckFailure for the first check that does not hold."""
    for case in _split_cases(text):
        _run_case(case)


def _add_directive(case: _Case, kind: str, text: str, line: int) -> None:
    if kind == "RUN":
        case.pipeline = text.strip()
    elif kind == "DEVICE":
        case.device = text.strip()
    elif kind not in _CHECKS:
        raise CheckFailure(f"line {line}: unknown directive {kind}")
    elif not text.strip():
        raise CheckFailure(f"line {line}: {kind} of nothing")
    else:
        case.checks.append(_Directive(kind, text.strip(), line))


def _run_case(case: _Case) -> None:
    expected = [check for check in case.checks if check.kind == "CHECK-ERROR"]
    try:
        output = _output_of(case)
    except PygraphError as error:
        if not expected:
            raise CheckFailure(f"line {case.line}: {type(error).__name__}: {error}") from error
        output = str(error)
        for check in expected:
            if not check.pattern.search(_blanks(output)):
                raise check.fail("the error says something else", output) from error
    else:
        if expected:
            raise expected[0].fail("there was no error", output)
    _check_lines([check for check in case.checks if check.kind != "CHECK-ERROR"], output)


def _output_of(case: _Case) -> str:
    graph = parse(case.text, f"line {case.line}")
    model = HOST if case.device == "cpu" else H200
    if case.pipeline:
        PassManager(case.pipeline, check="full").run(graph, PassContext(case.device, model))
    return str(graph)


def _check_lines(checks: list[_Directive], output: str) -> None:
    """Each CHECK is searched after the match of the one before; a CHECK-NOT holds in the lines in between."""
    lines = [_blanks(line) for line in output.split("\n")]
    at = -1
    forbidden: list[_Directive] = []
    for check in checks:
        if check.kind == "CHECK-NOT":
            forbidden.append(check)
            continue
        found = _find(check, lines, at, output)
        _refuse(forbidden, lines[at + 1 : found], output)
        forbidden = []
        at = found
    _refuse(forbidden, lines[at + 1 :], output)


def _find(check: _Directive, lines: list[str], at: int, output: str) -> int:
    if check.kind == "CHECK-NEXT":
        if at + 1 < len(lines) and check.pattern.search(lines[at + 1]):
            return at + 1
        raise check.fail("the next line is another one", output)
    for index in range(at + 1, len(lines)):
        if check.pattern.search(lines[index]):
            return index
    raise check.fail(f"not found after line {at + 1} of the output", output)


def _refuse(forbidden: list[_Directive], lines: list[str], output: str) -> None:
    for check in forbidden:
        if any(check.pattern.search(line) for line in lines):
            raise check.fail("found where it must not be", output)


def _blanks(text: str) -> str:
    return re.sub(r"\s+", " ", text)
