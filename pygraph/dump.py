"""Writes the annotated program and the reports of a graph into the dump directory.

The pass manager writes the IR before and after each pass into the same folder, ``DUMP_DIR/<graph>/``, and the launch
programs of a region into its ``region<n>/``. If a process group is initialised, the folder is
``DUMP_DIR/rank<n>/<graph>/``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pygraph import compat
from pygraph.inductor.emitted import Step, annotate
from pygraph.report.model import GraphReport
from pygraph.runtime.tensors import blocks, take

_log = logging.getLogger("pygraph")

INPUTS = "inputs.pt"
"""The file of saved arguments: ``{"inputs": {name: tensor or number}, "constants": {target: tensor}}``."""
_INPUTS_LIMIT = 2**30

Boxed = Callable[[list[Any]], Any]
"""A compiled program, or one region of it: it takes its arguments in a list, which it clears."""

_dumped: deque[tuple[Path, GraphReport]] = deque(maxlen=256)
"""Dumps whose reports are written again at exit, with the replays."""


def graph_dir(dump_dir: str | None, report: GraphReport) -> Path | None:
    """The folder of one graph's dumps, or None if nothing is dumped."""
    if dump_dir is None:
        return None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = f"rank{torch.distributed.get_rank()}" if distributed else ""
    return Path(dump_dir, rank, report.name)


def dump_program(dump_dir: str | None, report: GraphReport) -> None:
    """Write program and report now, and the report again at exit.

    A failure to render or write a dump only logs a warning.
    """
    trace_report(report)
    folder = graph_dir(dump_dir, report)
    if folder is None:
        return
    with _warned(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if report.source:
            (folder / "program.py").write_text(_program_text(report), encoding="utf-8")
        _write_report(folder, report)
        _dumped.append((folder, report))


def trace_report(report: GraphReport) -> None:
    """Add the report and the IR to ``TORCH_TRACE``, if it is on: tlparse shows them next to Inductor's program."""
    if compat.absent(compat.trace_structured):
        return
    texts: dict[str, Callable[[GraphReport], str]] = {"pygraph_report": _report_text, "pygraph_ir": _graph_text}
    for name, text in texts.items():
        with _warned("TORCH_TRACE"):
            compat.trace_structured(
                "artifact",
                functools.partial(dict, name=name, encoding="string"),
                payload_fn=functools.partial(text, report),
                expect_trace_id=False,
            )


def saving_inputs(folder: Path, inputs: Sequence[str], constants: dict[str, Any], run: Boxed) -> Boxed:
    """``run``, which writes the arguments of its first call into ``folder``, with the names of its ``inputs``."""
    waiting = [None]

    def first(args: list[Any]) -> Any:
        if waiting:
            waiting.clear()
            with _warned(folder):
                _save(folder / INPUTS, dict(zip(inputs, args, strict=True)), constants)
            constants.clear()
        return run(args)

    return first


def _save(path: Path, inputs: dict[str, Any], constants: dict[str, Any]) -> None:
    tensors = [value for value in (*inputs.values(), *constants.values()) if isinstance(value, torch.Tensor)]
    size = sum(block.nbytes for block in blocks(tensors))
    if size > _INPUTS_LIMIT:
        raise ValueError(f"the inputs take {size} bytes, and no more than {_INPUTS_LIMIT} are saved")
    args = [*inputs.values(), *constants.values()]
    copies = take([value.detach() if isinstance(value, torch.Tensor) else value for value in args], blocks(args)).args
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "inputs": dict(zip(inputs, copies, strict=False)),
            "constants": dict(zip(constants, copies[len(inputs) :], strict=True)),
        },
        path,
    )


def _graph_text(report: GraphReport) -> str:
    graph = report.complete().graph
    return "" if graph is None else str(graph)


def _report_text(report: GraphReport) -> str:
    from pygraph.report.text import render_text  # imported only if something is rendered

    return render_text([report.complete()], width=140, color=False)


def _write_report(folder: Path, report: GraphReport) -> None:
    from pygraph.report.facts import json_text

    if folder.is_dir():
        (folder / "report.txt").write_text(_report_text(report), encoding="utf-8")
        (folder / "report.json").write_text(json_text([report]), encoding="utf-8")


@atexit.register
def _write_again() -> None:
    for folder, report in _dumped:
        with _warned(folder):
            _write_report(folder, report)


@contextlib.contextmanager
def _warned(folder: object) -> Iterator[None]:
    """Turn exceptions of a dump into warnings: the program that it describes must run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - renderers and the file system raise anything
        _log.warning("cannot write dumps to %s: %s", folder, error)


def _program_text(report: GraphReport) -> str:
    """Inductor's program, with a comment above each region function: operators, launches, and if it may be captured."""
    above = {}
    for region in report.regions:
        verdict = "may be captured" if region.wrapped else f"stays uncaptured: {region.reason}"
        above[region.index] = [
            f"region {region.index}: {verdict}",
            f"  operators: {', '.join(region.nodes)}",
            f"  launches:  {', '.join(region.kernels)}",
        ]
    header = [f"{report.name} on {report.device}; pipeline: {report.pipeline}"]
    header += [f"note: {note}" for note in report.notes]
    header += [_outside_line(step, report) for step in (report.record.outside if report.record else ())]
    return annotate(report.source, above, [*header, ""])


def _outside_line(step: Step, report: GraphReport) -> str:
    from pygraph.ir import REGION  # takes a while, and a restored program needs none

    nodes = [node for node in report.graph.nodes if node.name in step.origins] if report.graph is not None else []
    where = next((node.loc for node in nodes if node.loc is not None and REGION not in node.meta), None)
    at = f" at {where}" if where else ""
    return f"outside: {', '.join(step.origins) or ', '.join(step.buffers)}: {step.reason}{at}"
