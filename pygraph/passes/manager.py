"""The pass manager: runs a pipeline over a graph, holds each pass to its contract, and says where it broke.

Reading pipeline text lives in ``options`` and ``registry``; dumps and prints in ``instruments``; failures are written
by ``reproducer``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from pygraph.errors import OptionError, PassError, VerifyError
from pygraph.ir import Graph, Stage
from pygraph.ir.verify import verify
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.instruments import Dump, Instrument, Print, Step
from pygraph.passes.options import nearest, print_pass, print_pipeline
from pygraph.passes.registry import default_registry, parse
from pygraph.passes.reproducer import write_reproducer
from pygraph.passes.stages import set_back

__all__ = ["DEFAULT_PIPELINE", "Check", "PassManager", "PassRecord", "Pipeline", "PipelineResult", "bisect", "resolve"]

Check: TypeAlias = Literal["off", "result", "full"]
"""How passes are checked: not at all; the verifier on each result; and ``modified`` against the printed graph too."""

Pipeline: TypeAlias = "str | Sequence[Pass | str]"
"""A pipeline as users give it: text, or passes and texts in a sequence."""

DEFAULT_PIPELINE = "legality,placement,partitioning,indirection,selection"

_log = logging.getLogger("pygraph")


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass that ran: its canonical text, the stage it left, wall time in ms, and what it said of itself."""

    name: str
    text: str
    stage: Stage
    time_ms: float
    modified: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a run did: the passes that ran, in order, and the text of those that a bisect limit kept from running."""

    passes: tuple[PassRecord, ...]
    skipped: tuple[str, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether any pass changed the graph."""
        return any(record.modified for record in self.passes)

    @property
    def time_ms(self) -> float:
        """Wall time of all passes, in ms, checks not counted."""
        return sum(record.time_ms for record in self.passes)


def resolve(pipeline: Pipeline) -> tuple[Pass, ...]:
    """The passes of a pipeline in any of its forms. Raises ParseError or OptionError."""
    if isinstance(pipeline, str):
        return parse(pipeline)
    passes: list[Pass] = []
    for item in pipeline:
        if not isinstance(item, Pass | str):
            raise OptionError(f"a pipeline consists of passes and text, not of {type(item).__name__}")
        passes += parse(item) if isinstance(item, str) else [item]
    return tuple(passes)


class PassManager:
    """Runs ``pipeline`` over graphs, one ``run`` independent of the other.

    check          see ``Check``
    dump_dir       folder for ``00-<stage>.pgir``, ``01-<pass>.pgir``, … and for reproducers
    print_before   names of passes (or ``all``) before which the graph is printed to stderr
    print_after    the same, after them
    bisect_limit   how many passes of a run may run: the pipeline stops after that many
    instruments    called around each pass

    Raises ParseError or OptionError for a pipeline that cannot be read or printed.
    """

    def __init__(
        self,
        pipeline: Pipeline = DEFAULT_PIPELINE,
        *,
        check: Check = "result",
        dump_dir: str | Path | None = None,
        print_before: Sequence[str] = (),
        print_after: Sequence[str] = (),
        bisect_limit: int | None = None,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        if check not in get_args(Check):
            raise OptionError(f"no check is called '{check}'{nearest(check, get_args(Check))}")
        if bisect_limit is not None and bisect_limit < 0:
            raise OptionError(f"a bisect limit cannot be negative: {bisect_limit}")
        self.passes = resolve(pipeline)
        self.text = print_pipeline(self.passes)
        self.check = check
        self.bisect_limit = bisect_limit
        self.dump_dir = None if dump_dir is None else Path(dump_dir)
        printing = Print(print_before, print_after)
        printing.check(self.passes)
        dumps = () if self.dump_dir is None else (Dump(self.dump_dir),)
        self._instruments: tuple[Instrument, ...] = (*dumps, printing, *instruments)

    def run(self, graph: Graph, ctx: PassContext | None = None) -> PipelineResult:
        """Run the pipeline on ``graph`` in place.

        Raises PassError when a pass raises or breaks its contract; the graph is then of no further use.
        """
        ctx = ctx or PassContext()
        records: list[PassRecord] = []
        for instrument in self._instruments:
            instrument.start(graph)
        for number, item in enumerate(self.passes, 1):
            if not self._admitted(number, item, graph):
                continue
            records.append(self._step(Step(number, item), graph, ctx, tuple(record.name for record in records)))
        skipped = self.passes[len(records) :]
        return PipelineResult(tuple(records), tuple(print_pass(item) for item in skipped))

    def _admitted(self, number: int, item: Pass, graph: Graph) -> bool:
        if self.bisect_limit is None:
            return True
        runs = number <= self.bisect_limit
        verb = "running" if runs else "NOT running"
        _log.warning("BISECT: %s pass (%d) %s on %s", verb, number, print_pass(item), graph.name)
        return runs

    def _step(self, step: Step, graph: Graph, ctx: PassContext, ran: tuple[str, ...]) -> PassRecord:
        for instrument in self._instruments:
            instrument.before(step, graph)
        run = _Execution(step, graph, ctx, ran, self.check, self.dump_dir)
        result, time_ms = run.execute()
        for instrument in self._instruments:
            instrument.after(step, graph)
        record = PassRecord(step.name, print_pass(step.item), graph.stage, time_ms, result.modified, result.notes)
        _log.debug("%s: %s took %.2f ms; %s", graph.name, record.text, time_ms, "; ".join(record.notes) or "no notes")
        return record


@dataclass(frozen=True)
class _Execution:
    """One pass on one graph: the contract checked on both sides, failures turned into PassError."""

    step: Step
    graph: Graph
    ctx: PassContext
    ran: tuple[str, ...]
    check: Check
    dump_dir: Path | None

    def execute(self) -> tuple[PassResult, float]:
        self._check_requires()
        before = self.graph.clone()
        try:
            result, time_ms = self._run_pass()
            if self.check != "off":
                verify(self.graph)
            if self.check == "full":
                self._check_modified(result, before)
        except Exception as error:  # a pass is anybody's code; raised again with the place where it failed
            raise self._failure(error, before) from error
        return result, time_ms

    def _run_pass(self) -> tuple[PassResult, float]:
        """The pass's own result; stages are set back before it and moved on after it."""
        item, graph = self.step.item, self.graph
        _enter(graph, item)
        start = time.perf_counter()
        result = item.run(graph, self.ctx)
        time_ms = (time.perf_counter() - start) * 1e3
        if not isinstance(result, PassResult):
            raise ContractError(f"run() must return a PassResult, not {type(result).__name__}")
        _leave(graph, item)
        return result, time_ms

    def _check_requires(self) -> None:
        if not self.graph.stage.reached(self.step.item.requires):
            wanted = self.step.item.requires.value
            missing = f"it requires a graph at stage {wanted}, and this one is at {self.graph.stage.value}"
            raise self._error(missing + _leading_to(self.step.item.requires))

    def _check_modified(self, result: PassResult, before: Graph) -> None:
        """Hold ``modified`` against the printed graphs, the change of stage apart, which is the manager's doing."""
        untouched = before.clone()
        _enter(untouched, self.step.item)
        _leave(untouched, self.step.item)
        if result.modified != (str(untouched) != str(self.graph)):
            said, did = ("modified", "the same") if result.modified else ("not modified", "different")
            raise ContractError(f"it says that the graph was {said}, and the printed graph is {did}")

    def _failure(self, error: Exception, before: Graph) -> PassError:
        reason = str(error) if isinstance(error, VerifyError | ContractError) else f"{type(error).__name__}: {error}"
        name = f"reproducer-{self.step.number:02}-{self.step.name}"
        path = write_reproducer(before, print_pass(self.step.item), self.ctx, name, reason, self.dump_dir)
        return self._error(reason, getattr(error, "node", None), path)

    def _error(self, reason: str, node: object = None, reproducer: str | None = None) -> PassError:
        return PassError(
            reason,
            pass_name=self.step.name,
            stage=self.graph.stage.value,
            node=None if node is None else str(getattr(node, "name", node)),
            passes_run=self.ran,
            reproducer=reproducer,
        )


class ContractError(Exception):
    """A pass whose result is not what it says. Reaches users as the cause of a PassError."""


def _leading_to(stage: Stage) -> str:
    """Which of the known passes brings a graph to ``stage``, as the end of a sentence."""
    found = [info.name for info in default_registry.describe() if info.ensures is stage]
    return f"; {' or '.join(found)} gets it there" if found else ""


def _enter(graph: Graph, item: Pass) -> None:
    """Drop what later stages said, but for what the pass itself requires."""
    if item.ensures is not None:
        set_back(graph, item.requires if item.requires.reached(item.ensures) else item.ensures)


def _leave(graph: Graph, item: Pass) -> None:
    if item.ensures is not None:
        set_back(graph, item.ensures)
        graph.stage = item.ensures


def bisect(
    pipeline: Pipeline, graph: Graph, good: Callable[[Graph], bool], ctx: PassContext | None = None
) -> tuple[Step, Graph] | None:
    """The first pass after which ``good`` no longer holds (or which raises), and the graph before it.

    None when every pass leaves a good graph; ``graph`` itself is not changed. Raises ValueError when ``graph`` is not
    good to begin with.
    """
    if not good(graph):
        raise ValueError("the graph is not good before the first pass")
    current = graph.clone()
    for number, item in enumerate(resolve(pipeline), 1):
        before = current.clone()
        try:
            PassManager([item]).run(current, ctx)
        except PassError:
            return Step(number, item), before
        if not good(current):
            return Step(number, item), before
    return None
