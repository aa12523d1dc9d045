"""Exceptions of PyGraph, under one root, and the source places that they name.

Operators that cannot be captured are data (see ``pygraph.passes.legality``), and raise only with the option ``strict``.
An exception means that a text, a graph, a pass, an option, a capture or a replay broke its contract.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a text: line and column, both from 1, and the number of characters to underline."""

    line: int
    column: int
    length: int = 1

    def underline(self, text: str) -> str:
        """The line of ``text`` with this span, and carets under the span."""
        lines = text.split("\n")
        row = printable(lines[min(self.line, len(lines)) - 1].rstrip("\r"))
        width = max(1, min(self.length, max(1, len(row) - self.column + 1)))
        return f"{row}\n{' ' * (self.column - 1)}{'^' * width}"


@dataclass(frozen=True, slots=True)
class Location:
    """The user's source line of a node.

    Args:
        file: path of the file
        line: line number, from 1
        function: name of the enclosing function
        code: text of the line
        frames: the user's call stack, outermost first, each ``file:line function``; empty without the option ``frames``
    """

    file: str
    line: int
    function: str = ""
    code: str = ""
    frames: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def first_line(text: str) -> str:
    """The first line of ``text``, shortened to 120 characters, for output on one line."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 120 else f"{line[:119]}…"


def printable(text: str) -> str:
    """``text`` of the same length, with a visible character for each control character that a terminal would obey."""
    return "".join(char if char.isprintable() or char == "\n" else _PICTURES.get(char, "\ufffd") for char in text)


_PICTURES = {"\t": " ", "\x7f": "\u2421", **{chr(code): chr(0x2400 + code) for code in range(32) if chr(code) != "\t"}}
"""Unicode's pictures of control characters."""


class PygraphError(Exception):
    """Root of all exceptions of PyGraph. Messages are safe to print: control characters are replaced."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ParseError(PygraphError):
    """A ``.pgir`` or pipeline text that does not parse. ``span`` is the place, ``reason`` the message without it."""

    def __init__(self, reason: str, span: Span, text: str, source: str = "<text>") -> None:
        self.reason = reason
        self.span = span
        self.source = source
        super().__init__(f"{source}:{span.line}:{span.column}: {reason}\n{span.underline(text)}")


class VerifyError(PygraphError):
    """A graph that breaks a ``rule`` of its ``stage``. ``node`` is the name of the node at fault, or None."""

    def __init__(self, reason: str, *, rule: str, stage: str, node: str | None = None) -> None:
        self.reason = reason
        self.rule = rule
        self.stage = stage
        self.node = node
        where = f" at node {node}" if node else ""
        super().__init__(f"verification failed{where} (stage {stage}, rule {rule}): {reason}")


class PassError(PygraphError):
    """A pass that raised or broke its contract.

    Attributes:
        pass_name: name of the pass, or of several passes
        stage: stage of the graph; ``program`` for a launch program
        node: name of the node at fault; None if unknown
        passes_run: names of the passes that ran before
        reproducer: path of a file that runs the pass again; None if none was written
        built_in: true for PyGraph's own passes
    """

    def __init__(
        self,
        reason: str,
        *,
        pass_name: str,
        stage: str,
        node: str | None = None,
        passes_run: tuple[str, ...] = (),
        reproducer: str | None = None,
        built_in: bool = False,
    ) -> None:
        self.reason = reason
        self.pass_name = pass_name
        self.stage = stage
        self.node = node
        self.passes_run = passes_run
        self.reproducer = reproducer
        self.built_in = built_in
        where = f" at node {node}" if node else ""
        ran = ", ".join(passes_run) or "none"
        hint = f"; reproducer: {reproducer}" if reproducer else ""
        super().__init__(f"pass '{pass_name}' failed{where} (stage {stage}, passes run before: {ran}): {reason}{hint}")


class MeaningError(PygraphError):
    """A pass that changed the results of a graph. ``node`` is the name of the first node that differs, if known."""

    def __init__(self, reason: str, *, node: str | None = None) -> None:
        self.reason = reason
        self.node = node
        super().__init__(f"it changed what the graph computes: {reason}")


class OptionError(PygraphError):
    """An unknown option or pass name, with the nearest known name in the message; or an invalid value."""


class CaptureError(PygraphError):
    """A region that cannot be captured. ``reason`` is a code, ``detail`` the cause in words. ``launch`` is the number
    of the launch at fault in the capture, or None."""

    def __init__(self, reason: str, detail: str = "", *, launch: int | None = None) -> None:
        self.reason = reason
        self.detail = detail
        self.launch = launch
        super().__init__(f"{reason}: {detail}" if detail else reason)


class ProgramError(CaptureError):
    """A launch program that breaks a ``rule`` of its verifier. ``reason`` is ``unordered-launches`` if a wait between
    launches is missing, else ``invalid-program``. ``launch`` is the number of the launch at fault, or None."""

    def __init__(self, rule: str, detail: str, *, launch: int | None = None) -> None:
        self.rule = rule
        reason = "unordered-launches" if rule == "waits" else "invalid-program"
        super().__init__(reason, f"{rule}: {detail}", launch=launch)


class ReplayError(PygraphError):
    """A replay that failed although its arguments matched, or that differs from an uncaptured run."""
