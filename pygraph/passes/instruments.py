"""What can be watched while a pipeline runs: dumps to files, prints to a stream, instruments of your own.

The manager calls them around each pass; none of them may change the graph or fail the run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pygraph.errors import OptionError
from pygraph.ir import Graph
from pygraph.passes.base import Pass
from pygraph.passes.options import nearest, print_pass

__all__ = ["ALL", "Dump", "Instrument", "Print", "Step"]

ALL = "all"
"""Stands for every pass where names of passes are asked for."""

_log = logging.getLogger("pygraph")


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of a pass: its place in the pipeline, counted from 1, and the pass."""

    number: int
    item: Pass

    @property
    def name(self) -> str:
        """The name of the pass."""
        return self.item.name


class Instrument:
    """Base of instruments: each method does nothing until it is overridden. Graphs are to be read only."""

    def start(self, graph: Graph) -> None:
        """Called once, before the first pass."""

    def before(self, step: Step, graph: Graph) -> None:
        """Called before each pass."""

    def after(self, step: Step, graph: Graph) -> None:
        """Called after each pass, once the graph that it left has been checked."""


class Dump(Instrument):
    """Writes ``00-lifted.pgir`` before the first pass and ``01-legality.pgir``, … after each.

    A folder that cannot be written is warned of once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._broken = False

    def start(self, graph: Graph) -> None:
        self._write(f"00-{graph.stage.value}.pgir", str(graph))

    def after(self, step: Step, graph: Graph) -> None:
        self._write(f"{step.number:02}-{step.name}.pgir", str(graph))

    def _write(self, name: str, text: str) -> None:
        if self._broken:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            self._broken = True
            _log.warning("cannot write dumps to %s: %s", self.folder, error)


class Print(Instrument):
    """Prints the graph before or after the named passes, under a comment that says where it was taken."""

    def __init__(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        self._before = frozenset(before)
        self._after = frozenset(after)

    def check(self, passes: Sequence[Pass]) -> None:
        """Raise OptionError when a name is neither ``all`` nor that of one of ``passes``."""
        known = {item.name: None for item in passes}
        for name in sorted(self._before | self._after):
            if name != ALL and name not in known:
                raise OptionError(f"cannot print around '{name}': it is not in the pipeline{nearest(name, known)}")

    def before(self, step: Step, graph: Graph) -> None:
        self._print("before", self._before, step, graph)

    def after(self, step: Step, graph: Graph) -> None:
        self._print("after", self._after, step, graph)

    def _print(self, when: str, names: frozenset[str], step: Step, graph: Graph) -> None:
        if names.isdisjoint((ALL, step.name)):
            return
        print(f"// {when} {step.number}: {print_pass(step.item)}\n{str(graph).rstrip()}", file=sys.stderr)
