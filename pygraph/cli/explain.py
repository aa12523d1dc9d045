"""``pygraph explain``: run a script and report what PyGraph captured of the graphs that it compiled.

Running the script is ``script``'s business, the report that of ``pygraph.report``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pygraph.cli.failures import Failure, write_out
from pygraph.cli.script import ScriptCommand, call_model, running, told

if TYPE_CHECKING:
    from pygraph.report.model import GraphReport

__all__ = ["STRICT_STATUS", "explain"]

STRICT_STATUS = 3
"""Exit status of ``--strict`` when something could not be captured."""

_NO_TERMINAL_WIDTH = 100


@click.command(cls=ScriptCommand)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--html", metavar="FILE", help="Write a self-contained page with a picture of each graph.")
@click.option("--json", metavar="FILE", help="Write the report as JSON.")
@click.option("--dot", metavar="FILE", help="Write the graphs as Graphviz text.")
@click.option("--strict", is_flag=True, help="Exit with status 3 when anything could not be captured.")
def explain(
    script: str, args: tuple[str, ...], html: str | None, json: str | None, dot: str | None, strict: bool
) -> None:
    """Run SCRIPT with ARGS and report what was captured, what was not, and why.

    The script may compile with torch.compile(…, backend="pygraph") itself. If it compiles nothing that way but leaves
    a 'model' and 'inputs' at its top level, that model is compiled and called until it is replayed, as a rule three
    times: a tuple or list of inputs is the positional arguments, a mapping the keyword arguments, anything else the
    only argument.

    Options of this command may stand before or after SCRIPT. Those of the script go after '--', as in
    'pygraph explain train.py -- --lr 3'. For FILE, '-' is stdout, which then holds nothing else: what the script prints
    goes to stderr.
    """
    outputs = {name: path for name, path in (("html", html), ("json", json), ("dot", dot)) if path is not None}
    _check_outputs(outputs)
    with _stdout_kept("-" in outputs.values()):
        reports = _run(script, args)
    _write(reports, outputs)
    if strict and any(_incomplete(report) for report in reports):
        raise click.exceptions.Exit(STRICT_STATUS)


def _check_outputs(outputs: Mapping[str, str]) -> None:
    """A long run must not end in a file that cannot be written."""
    if list(outputs.values()).count("-") > 1:
        raise click.UsageError("only one of --html, --json and --dot can go to stdout")
    for path in outputs.values():
        target = Path(path)
        if path != "-" and (target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK)):
            raise Failure(f"{path}: cannot be written: {_obstacle(target)}")


def _obstacle(target: Path) -> str:
    code = errno.EISDIR if target.is_dir() else errno.EACCES if target.parent.is_dir() else errno.ENOENT
    return os.strerror(code)


@contextlib.contextmanager
def _stdout_kept(kept: bool) -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
        yield


def _run(script: str, args: Sequence[str]) -> list[GraphReport]:
    """The reports of the graphs that the script compiled, or that its model was compiled to."""
    from pygraph.report import collect  # rendering needs more than 'opt' and 'passes' should load
    from pygraph.report.progress import working

    before = {report.index for report in collect.reports()}

    def fresh() -> list[GraphReport]:
        return [report for report in collect.reports() if report.index not in before]

    with contextlib.ExitStack() as stack:
        with working(f"running {script}", moving=False) as step, told(step, lambda: [r.name for r in fresh()]):
            found = stack.enter_context(running(script, args))
        if not fresh():
            call_model(script, found)
    if not fresh():
        raise Failure(
            f"{script}: the model was called, but Dynamo found nothing in it to compile: torch skips some modules, "
            "such as nn.LSTM, and code without tensors. TORCH_LOGS=graph_breaks says what it met; torch.compile(…, "
            "fullgraph=True) raises there"
        )
    return fresh()


def _write(reports: Sequence[GraphReport], outputs: Mapping[str, str]) -> None:
    from pygraph.report.progress import working

    renderers = _renderers()
    with working("writing the report") as step:
        for name, path in outputs.items():
            step(path)
            write_out(path, renderers[name](reports))
    if "-" not in outputs.values():
        write_out("-", renderers["text"](reports))


def _renderers() -> dict[str, Callable[[Sequence[GraphReport]], str]]:
    from pygraph.report.as_json import json_text
    from pygraph.report.dot import report_dot
    from pygraph.report.html import render_html
    from pygraph.report.text import render_text

    shown = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if shown else _NO_TERMINAL_WIDTH
    color = shown and not os.environ.get("NO_COLOR")
    return {
        "html": render_html,
        "json": json_text,
        "dot": lambda reports: "\n".join(report_dot(report) for report in reports if report.graph is not None),
        "text": lambda reports: render_text(reports, width, color),
    }


def _incomplete(report: GraphReport) -> bool:
    """Whether something could not be captured; what was left off because it does not pay, or on demand, could be."""
    from pygraph.report.facts import unselected

    if report.error is not None or any(row.reason != "max-regions" for row in report.uncaptured()):
        return True
    regions = [region for region in report.regions if region.kernels and not unselected(report, region)]
    return any(region.state == "uncaptured" for region in regions)
