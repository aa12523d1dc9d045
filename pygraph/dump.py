"""Writes what was made of a graph into the dump directory: the annotated program and the reports.

The passes' own dumps are written by the pass manager into the same folder, ``DUMP_DIR/<graph name>/``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from pygraph import compat
from pygraph.inductor.emitted import annotate
from pygraph.inductor.record import Step
from pygraph.report.collect import dumped
from pygraph.report.model import GraphReport
from pygraph.runtime.driver import Program

__all__ = ["dump_launches", "dump_program", "graph_dir", "program_text", "trace_report"]

_log = logging.getLogger("pygraph")


def graph_dir(dump_dir: str | None, report: GraphReport) -> Path | None:
    """The folder of one graph's dumps, or None when nothing is dumped."""
    return None if dump_dir is None else Path(dump_dir) / report.name


def dump_program(dump_dir: str | None, report: GraphReport) -> None:
    """Write program and report now, and the report again at exit, when it knows what was replayed.

    What cannot be rendered or written is warned of and changes nothing else.
    """
    trace_report(report)
    folder = graph_dir(dump_dir, report)
    if folder is None:
        return
    with _warned(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if report.source:
            (folder / "program.py").write_text(program_text(report), encoding="utf-8")
        _write_report(folder, report)
        report.dumped = folder


def trace_report(report: GraphReport) -> None:
    """Give the report and the IR to ``TORCH_TRACE``, where that is on: tlparse shows them beside Inductor's program."""
    if compat.absent(compat.trace_structured):
        return
    for name, text in (("pygraph_report", _report_text), ("pygraph_ir", _graph_text)):
        with _warned("TORCH_TRACE"):
            compat.trace_structured(
                "artifact",
                functools.partial(dict, name=name, encoding="string"),
                payload_fn=functools.partial(text, report),
                expect_trace_id=False,
            )


def dump_launches(folder: Path, region: int, device: str, program: Program) -> None:
    """Write the launches of a captured region as IR, in the memory that they are replayed in.

    What cannot be lifted or written is warned of, as in ``dump_program``.
    """
    from pygraph.frontend import lift_launches  # either takes a while
    from pygraph.ir import Device

    name = f"region{region}"
    with _warned(folder):
        graph = lift_launches(program.recording, program.slots, program.layout, device=Device.parse(device), name=name)
        (folder / f"{name}.launches.pgir").write_text(str(graph), encoding="utf-8")


def _graph_text(report: GraphReport) -> str:
    graph = report.complete().graph
    return "" if graph is None else str(graph)


def _report_text(report: GraphReport) -> str:
    from pygraph.report.text import render_text  # renderers are needed only where something is rendered

    return render_text([report.complete()], width=140, color=False)


@atexit.register
def _write_again() -> None:
    for report in dumped():
        if report.dumped is not None:
            with _warned(report.dumped):
                _write_report(report.dumped, report)


@contextlib.contextmanager
def _warned(folder: object) -> Iterator[None]:
    """Turn whatever a dump meets into a warning: the program that it describes must run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - renderers and the file system raise anything
        _log.warning("cannot write dumps to %s: %s", folder, error)


def _write_report(folder: Path, report: GraphReport) -> None:
    from pygraph.report.as_json import to_json

    if not folder.is_dir():
        return
    (folder / "report.txt").write_text(_report_text(report), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(to_json([report]), indent=1), encoding="utf-8")


def program_text(report: GraphReport) -> str:
    """Inductor's program, each region function under a comment on what it is and what becomes of it."""
    above = {}
    for region in report.regions:
        verdict = "may be captured" if region.wrapped else f"stays uncaptured: {region.reason}"
        above[region.index] = [
            f"region {region.index}: {verdict}",
            f"  operators: {', '.join(region.nodes)}",
            f"  launches:  {', '.join(region.kernels)}",
        ]
    return annotate(report.source, above, _header(report))


def _header(report: GraphReport) -> list[str]:
    lines = [f"{report.name} on {report.device}; pipeline: {report.pipeline}"]
    lines += [f"note: {note}" for note in report.notes]
    outside = report.record.outside if report.record else ()
    lines += [_outside_line(step, report) for step in outside]
    return [*lines, ""]


def _outside_line(step: Step, report: GraphReport) -> str:
    placed = [report.decision.nodes[o] for o in step.origins if report.decision and o in report.decision.nodes]
    where = next((p.loc for p in placed if p.region is None and p.loc), None)
    at = f" at {where}" if where else ""
    return f"outside: {', '.join(step.origins) or ', '.join(step.buffers)}: {step.reason}{at}"
