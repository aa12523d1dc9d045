"""The pass manager: runs a pipeline over a graph or a launch program, checks the contract of each pass, and reports
which pass broke it.

    set back to the required stage ─ run ─ verify at the ensured stage ─ record, dump, print
                                          └─ raised or broke its contract: PassError, and a reproducer

A reproducer is one ``.pgir`` file: the graph or program before the pass and, in leading comments, the pipeline and
context that run the pass again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pygraph.errors import OptionError, PassError, PygraphError
from pygraph.ir import (
    CAPTURABLE,
    DETAIL,
    EAGER,
    HOST,
    MODELS,
    REASON,
    REGION,
    SELECTED,
    DeviceModel,
    Graph,
    Stage,
    verify,
)
from pygraph.passes.base import BasePass, Pass, PassContext, PassFunction, PassResult, as_pass
from pygraph.passes.pipeline import is_built_in, nearest, parse_pipeline, print_pass, print_pipeline
from pygraph.program.program import Program
from pygraph.program.verify import verify as verify_program

__all__ = [
    "DEFAULT_PIPELINE",
    "Check",
    "PassManager",
    "PassRecord",
    "Pipeline",
    "PipelineResult",
    "bisect",
    "read_header",
]

Check: TypeAlias = Literal["off", "result", "full"]
"""Checks of passes: none; the verifier on each result; or also the claims of passes: ``modified`` is compared with the
printed graph, and ``keeps_meaning`` is tested by running the graphs before and after."""

Pipeline: TypeAlias = "str | Sequence[BasePass | PassFunction | str]"
"""A pipeline in the forms that users write: text, or a sequence of passes, functions and texts."""

DEFAULT_PIPELINE = "legality,placement,partitioning,indirection,selection"

Subject = TypeVar("Subject", Graph, Program)

_log = logging.getLogger("pygraph")


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass that ran.

    Args:
        name: name in pipeline text
        text: name with all options that are not at their default
        stage: stage of the graph after the pass; None for a launch program
        time_ms: wall time of the pass without checks, ms
        modified: true if the pass changed the printed graph or program
        notes: sentences for the report
    """

    name: str
    text: str
    stage: Stage | None
    time_ms: float
    modified: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """Result of ``PassManager.run``.

    Args:
        passes: passes that ran, in order
        skipped: text of each pass that the bisect limit skipped
        user_changes: names of passes that changed the graph and are not built in
        user_regions: true if such a pass drew or selected the regions
        program: resulting launch program; None for a graph, which passes change in place
    """

    passes: tuple[PassRecord, ...]
    skipped: tuple[str, ...] = ()
    user_changes: tuple[str, ...] = ()
    user_regions: bool = False
    program: Program | None = None

    @property
    def time_ms(self) -> float:
        """Wall time of all passes without checks, ms."""
        return sum(record.time_ms for record in self.passes)


class PassManager:
    """Runs a pipeline over graphs or launch programs. Runs are independent of each other.

    Raises ParseError for malformed pipeline text, and OptionError for an unknown pass or another invalid argument.

    Args:
        pipeline: pipeline text, or a sequence of passes, functions and texts; default: the five passes over graphs
        check: ``off``; ``result``: verify each result; ``full``: also check what passes claim, ``modified`` and
            ``keeps_meaning``
        dump_dir: folder for ``00-<stage>.pgir``, ``01-<pass>.pgir``, … and reproducers; None: no dumps, and
            reproducers in a temporary folder
        print_before: names of passes (or ``all``) before which the graph is printed to stderr
        print_after: names of passes (or ``all``) after which the graph is printed to stderr
        bisect_limit: number of passes to run, from the first; None: all
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
    ) -> None:
        if check not in get_args(Check):
            raise OptionError(f"no check is called '{check}'{nearest(check, get_args(Check))}")
        if bisect_limit is not None and bisect_limit < 0:
            raise OptionError(f"a bisect limit cannot be negative: {bisect_limit}")
        self.passes = _resolve(pipeline)
        self.text = print_pipeline(self.passes)
        self.check = check
        self.dump_dir = None if dump_dir is None else Path(dump_dir)
        self.bisect_limit = bisect_limit
        self._printed = {"before": print_before, "after": print_after}
        known = [item.name for item in self.passes]
        for name in (*print_before, *print_after):
            if name not in ("all", *known):
                hint = nearest(name, dict.fromkeys(known))
                raise OptionError(f"cannot print around '{name}': it is not in the pipeline{hint}")

    def check_order(self, stage: Stage | None = Stage.LIFTED) -> None:
        """Raise OptionError if the pipeline cannot run on a graph at ``stage``, or, if that is None, on a launch
        program."""
        for item in self.passes:
            unreached = _unreached(item, stage)
            if unreached:
                raise OptionError(f"pass '{item.name}' cannot run where the pipeline has it: {unreached}")
            stage = item.ensures or stage

    def run(self, subject: Graph | Program, ctx: PassContext | None = None) -> PipelineResult:
        """Run the pipeline on ``subject``. A graph is changed in place; a new launch program is in the result.

        Raises PassError if a pass raises or breaks its contract; the graph must then not be used any more.
        """
        records: list[PassRecord] = []
        changes: list[str] = []
        drawn = False
        self._dump(f"00-{_stage_name(subject)}", subject)
        for number, item in enumerate(self.passes[: self.bisect_limit], 1):
            self._print("before", number, item, subject)
            before = None if is_built_in(item) else _regions(subject)
            subject, record = self._step(number, item, subject, ctx or PassContext(), records)
            records.append(record)
            if before is None:
                drawn &= item.ensures is not Stage.PARTITIONED
            else:
                changes += [item.name] * record.modified
                drawn |= before != _regions(subject)
            self._dump(f"{number:02}-{item.name}", subject)
            self._print("after", number, item, subject)
        skipped = tuple(print_pass(item) for item in self.passes[len(records) :])
        if skipped:
            _log.warning("the bisect limit keeps %s from running on %s", ", ".join(skipped), subject.name)
        program = subject if isinstance(subject, Program) else None
        return PipelineResult(tuple(records), skipped, tuple(changes), drawn, program)

    def _step(
        self, number: int, item: BasePass, subject: Any, ctx: PassContext, records: Sequence[PassRecord]
    ) -> tuple[Any, PassRecord]:
        text, stage = print_pass(item), _stage_name(subject)
        ran = tuple(record.name for record in records)
        unreached = _unreached(item, getattr(subject, "stage", None))
        if unreached:
            raise PassError(unreached, pass_name=item.name, stage=stage, passes_run=ran)
        before = _copy(subject)
        try:
            if isinstance(item, Pass) and item.ensures is not None:
                _set_back(subject, max(item.requires, item.ensures, key=list(Stage).index))
            printed = str(subject) if self.check == "full" else ""
            start = time.perf_counter()
            result = item.run(subject, ctx)
            time_ms = (time.perf_counter() - start) * 1e3
            if not isinstance(result, PassResult):
                raise PygraphError(f"run() must return a PassResult, not {type(result).__name__}")
            subject = result.program or subject
            if self.check == "full" and result.modified != (printed != str(subject)):
                said, did = ("modified", "the same") if result.modified else ("not modified", "different")
                kind = _kind(subject)
                raise PygraphError(f"it says that the {kind} was {said}, and the printed {kind} is {did}")
            if isinstance(item, Pass) and item.ensures is not None:
                _set_back(subject, item.ensures)
                subject.stage = item.ensures
            if self.check != "off":
                verify_subject(subject)
            notes = _held_to_meaning(item, before, subject) if self.check == "full" else ()
        except Exception as error:  # a pass is anybody's code; raised again with the place where it failed
            reason = str(error) if isinstance(error, PygraphError) else f"{type(error).__name__}: {error}"
            node = getattr(error, "node", None)
            failure = PassError(
                reason,
                pass_name=item.name,
                stage=_stage_name(subject),
                node=None if node is None else str(getattr(node, "name", node)),
                passes_run=ran,
                reproducer=_write(
                    self.dump_dir, f"reproducer-{number:02}-{item.name}", before, _header(text, ctx, reason)
                ),
                built_in=is_built_in(item),
            )
            # Dynamo shows the traceback of what is raised, without its cause.
            raise failure.with_traceback(error.__traceback__ and error.__traceback__.tb_next) from error
        stage_after, notes = getattr(subject, "stage", None), (*result.notes, *notes)
        record = PassRecord(item.name, text, stage_after, time_ms, result.modified, notes)
        _log.debug("%s: %s took %.2f ms; %s", subject.name, text, time_ms, "; ".join(notes) or "no notes")
        return subject, record

    def _dump(self, name: str, subject: Graph | Program) -> None:
        if self.dump_dir is not None:
            _write(self.dump_dir, name, subject)

    def _print(self, when: str, number: int, item: BasePass, subject: Graph | Program) -> None:
        if "all" in self._printed[when] or item.name in self._printed[when]:
            print(f"// {when} {number}: {print_pass(item)}\n{str(subject).rstrip()}", file=sys.stderr)


def _kind(subject: Graph | Program) -> str:
    return "graph" if isinstance(subject, Graph) else "launch program"


def _stage_name(subject: Graph | Program) -> str:
    return subject.stage.value if isinstance(subject, Graph) else "program"


def _copy(subject: Any) -> Any:
    """A copy of a graph; a launch program itself, since programs are immutable."""
    return subject.clone() if isinstance(subject, Graph) else subject


def verify_subject(subject: Graph | Program) -> None:
    """Raise a PygraphError if the graph or program breaks a rule."""
    if isinstance(subject, Graph):
        verify(subject)
    else:
        verify_program(subject)


def _unreached(item: BasePass, stage: Stage | None) -> str:
    """Reason why a pass cannot run on a graph at ``stage``, or on a launch program if that is None; else empty."""
    if not isinstance(item, Pass) or stage is None:
        wanted, found = ("graph" if each else "launch program" for each in (isinstance(item, Pass), stage))
        return "" if wanted == found else f"it runs on a {wanted}, and this is a {found}"
    if stage.reached(item.requires):
        return ""
    default = parse_pipeline(DEFAULT_PIPELINE)
    leading = [one.name for one in default if one.ensures is item.requires]
    needed = f"it requires a graph at stage {item.requires.value}, and this one is at {stage.value}"
    return needed + (f"; {leading[0]} gets it there" if leading else "")


def _resolve(pipeline: Pipeline) -> tuple[BasePass, ...]:
    """The passes of a pipeline in any of its forms. Raises ParseError or OptionError."""
    if isinstance(pipeline, str):
        return parse_pipeline(pipeline)
    passes: list[BasePass] = []
    for item in pipeline:
        if isinstance(item, str):
            passes += parse_pipeline(item)
        elif isinstance(item, BasePass):
            passes.append(item)
        elif callable(item) and not isinstance(item, type):
            passes.append(as_pass(item)())
        else:
            raise OptionError(f"a pipeline consists of passes, functions and text, not of {type(item).__name__}")
    return tuple(passes)


def bisect(
    pipeline: Pipeline, subject: Subject, good: Callable[[Subject], bool]
) -> tuple[int, BasePass, Subject] | None:
    """Find the first pass after which ``good`` is false, or which raises. Returns its position in the pipeline, counted
    from 1, the pass itself, and the graph or launch program before it.

    Returns None if ``good`` is true after every pass. ``subject`` is not changed. Raises ValueError if ``good`` is
    false for ``subject``.
    """
    if not good(subject):
        raise ValueError(f"the {_kind(subject)} is not good before the first pass")
    current: Any = _copy(subject)
    for number, item in enumerate(_resolve(pipeline), 1):
        before = _copy(current)
        try:
            ran = PassManager([item]).run(current)
        except PassError:
            return number, item, before
        current = ran.program or current
        if not good(current):
            return number, item, before
    return None


# -- meaning -----------------------------------------------------------------------------------------------------------


_comparisons: list[Callable[[Graph, Graph, bool], str]] = []


def register_comparison(compare: Callable[[Graph, Graph, bool], str]) -> None:
    """Have ``check="full"`` compare graphs with ``compare``. Its third argument is true if results must be equal bit by
    bit; it returns the reason why it did not run the graphs, else an empty string. This module cannot run operators."""
    _comparisons.append(compare)


def _held_to_meaning(item: BasePass, before: Any, after: Any) -> tuple[str, ...]:
    """Compare the graphs before and after a pass that changed operators or outputs. Returns a note if it could not."""
    if not isinstance(item, Pass):
        return ()
    first, then = (
        [(node.name, f"{node.op} {node.args} {node.attrs}") for node in each.nodes] for each in (before, after)
    )
    if not item.keeps_meaning or (first == then and repr(before.outputs) == repr(after.outputs)):
        return ()
    reason = "" if _comparisons else "pygraph.frontend.meaning is not imported"
    for compare in _comparisons:
        reason = compare(before, after, dict(first).items() >= dict(then).items())
    return (f"its meaning was not checked: {reason}",) if reason else ()


# -- stages ------------------------------------------------------------------------------------------------------------


def _regions(graph: Graph | Program) -> tuple[object, object]:
    """Region of each node in a region, by name, and selection of each region, by index."""
    if isinstance(graph, Program):
        return (), ()
    members = {node.name: node.meta.get(REGION) for node in graph.nodes if REGION in node.meta}
    return members, {index: region.meta.get(SELECTED) for index, region in graph.regions.items()}


def _set_back(graph: Graph, stage: Stage) -> None:
    """Set the graph back to ``stage``, if it has reached that stage, and drop the annotations of every later stage.

    Annotations of later stages describe another graph. JUDGED owns the capturability of nodes, PARTITIONED the regions
    and the reasons of capturable nodes outside of regions, INDIRECTED the parameters of regions, and SELECTED their
    selection. Annotations of placement stay, and so do those that other passes add.
    """
    if not graph.stage.reached(stage):
        return
    graph.stage = stage
    partitioned, judged = stage.reached(Stage.PARTITIONED), stage.reached(Stage.JUDGED)
    if not partitioned:
        graph.regions.clear()
    for region in graph.regions.values():
        if not stage.reached(Stage.SELECTED):
            region.meta.drop(SELECTED, REASON, DETAIL)
        if not stage.reached(Stage.INDIRECTED):
            region.parameters.clear()
    for node in graph.nodes:
        if not judged or (not partitioned and node.meta.get(CAPTURABLE)):
            node.meta.drop(REASON, DETAIL)
        if not partitioned:
            node.meta.drop(REGION)
        if not judged:
            node.meta.drop(CAPTURABLE, EAGER)


# -- reproducers -------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"//\s*([a-z]+):\s*(.*)")


def _header(pipeline: str, ctx: PassContext, error: str) -> dict[str, str]:
    """Header of a reproducer, for ``read_header``, with the error."""
    return {
        "pipeline": pipeline,
        "device": ctx.device,
        "model": json.dumps(asdict(ctx.model)),
        "order": ctx.order,
        "error": " ".join(error.split()),
    }


def _write(
    folder: Path | None, name: str, subject: Graph | Program, header: Mapping[str, str] | None = None
) -> str | None:
    """Write ``subject`` as text to ``folder`` or a temporary folder. Returns the path, or None after a warning."""
    try:
        comments = "".join(f"// {key}: {value}\n" for key, value in (header or {}).items() if value)
        text = comments + str(subject)
        path = (folder or temporary_folder(os.getpid())) / f"{name}.pgir"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except Exception as problem:  # noqa: BLE001 - the graph may be too broken to print; the failure itself must be told
        _log.warning("cannot write %s: %s", f"{folder}/{name}.pgir" if folder else name, problem)
        return None
    return str(path)


@functools.cache
def temporary_folder(process: int) -> Path:
    """The folder for reproducers of a process without a dump directory. A reproducer replaces earlier ones of the same
    pass: once a property test has shrunk its graph, the smallest one is left."""
    return Path(tempfile.mkdtemp(prefix=f"pygraph-{process}-"))


def read_header(text: str) -> tuple[str | None, PassContext | None]:
    """Pipeline text and context from the leading comments of a ``.pgir`` text; each is None if the comments lack it.

    Raises ValueError if a value is malformed.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        match = _HEADER.fullmatch(line.strip())
        if match:
            found[match[1]] = match[2]
    ctx = None
    if "device" in found:
        known = MODELS.get(found["device"], HOST)
        try:
            model = DeviceModel.from_json(json.loads(found["model"])) if "model" in found else known
        except RecursionError as error:
            raise ValueError("brackets are nested too deep") from error
        ctx = PassContext(found["device"], model, found.get("order", PassContext().order))
    return found.get("pipeline"), ctx
