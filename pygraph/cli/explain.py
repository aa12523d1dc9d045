"""``pygraph explain``: run a script and report what PyGraph captured of the graphs that it compiled."""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import click

from pygraph.cli import Failure, ScriptCommand, writing

if TYPE_CHECKING:
    from pygraph.report.model import GraphReport

__all__ = ["STRICT_STATUS", "explain"]

STRICT_STATUS = 3
"""Exit status of ``--strict`` when something could not be captured."""

_FRAMES = (__file__, "<frozen runpy>", runpy.__file__)


@click.command(cls=ScriptCommand)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--html", metavar="FILE", help="Write a self-contained page with a picture of each graph.")
@click.option("--json", metavar="FILE", help="Write the report as JSON.")
@click.option("--strict", is_flag=True, help="Exit with status 3 when anything could not be captured.")
def explain(script: str, args: tuple[str, ...], html: str | None, json: str | None, strict: bool) -> None:
    """Run SCRIPT with ARGS and report what was captured, what was not, and why.

    The script may compile with torch.compile(…, backend="pygraph") itself. If it compiles nothing that way but leaves
    a 'model' and 'inputs' at its top level, that model is compiled and called until it is replayed, as a rule three
    times: a tuple or list of inputs is the positional arguments, a mapping the keyword arguments, anything else the
    only argument.

    Options of this command may stand before or after SCRIPT. Those of the script go after '--', as in
    'pygraph explain train.py -- --lr 3'. For FILE, '-' is stdout, which then holds nothing else: what the script prints
    goes to stderr.
    """
    from pygraph.report.facts import json_text
    from pygraph.report.html import render_html
    from pygraph.report.text import render_text

    if html == json == "-":
        raise click.UsageError("only one of --html and --json can go to stdout")
    kept = "-" in (html, json)
    with writing(html, json) as files:
        with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
            reports = _run(script, args)
        for file, render in zip(files, (render_html, json_text), strict=True):
            if file is not None:
                file.write(render(reports))
    if not kept:
        shown = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if shown else 100
        click.echo(render_text(reports, width, color=shown and not os.environ.get("NO_COLOR")), nl=False)
    if strict and any(_incomplete(report) for report in reports):
        raise click.exceptions.Exit(STRICT_STATUS)


def _run(script: str, args: Sequence[str]) -> list[GraphReport]:
    """The reports of the graphs that the script compiled, or that its model was compiled to."""
    import pygraph

    before = {report.index for report in pygraph.reports()}

    def fresh() -> list[GraphReport]:
        return [report for report in pygraph.reports() if report.index not in before]

    found: dict[str, Any] = {}
    path = [str(Path(script).resolve().parent), *sys.path]
    with mock.patch.object(sys, "argv", [script, *args]), mock.patch.object(sys, "path", path):
        with _shown_as_python_would(script):
            found = runpy.run_path(script, run_name="__main__")
        if fresh():
            return fresh()
        if "model" not in found or "inputs" not in found:
            raise Failure(
                f"{script}: PyGraph compiled nothing. Compile with torch.compile(…, backend='pygraph'), "
                "or leave a 'model' and its 'inputs' at the top level of the script"
            )
        inputs = found["inputs"]
        keywords = inputs if isinstance(inputs, Mapping) else {}
        given = inputs if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
        with _shown_as_python_would(script):
            pygraph.explain(found["model"], *given, **keywords)
    if not fresh():
        raise Failure(
            f"{script}: the model was called, but Dynamo found nothing in it to compile: torch skips some modules, "
            "such as nn.LSTM, and code without tensors. TORCH_LOGS=graph_breaks says what it met; torch.compile(…, "
            "fullgraph=True) raises there"
        )
    return fresh()


@contextlib.contextmanager
def _shown_as_python_would(path: str) -> Iterator[None]:
    """Turn what the user's code raises into a Failure with its traceback, without the frames that run it."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise Failure(f"{path}: the script exited with status {error.code}") from error
    except SyntaxError as error:
        raise Failure("".join(traceback.format_exception_only(error)).rstrip()) from error
    except Exception as error:  # the script is anybody's code: its traceback is what the user needs to see
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _FRAMES:
            frames = frames.tb_next
        raise Failure("".join(traceback.format_exception(type(error), error, frames)).rstrip()) from error


def _incomplete(report: GraphReport) -> bool:
    """Whether something could not be captured; what was left off because it does not pay, or on demand, could be."""
    from pygraph.report.facts import unselected

    if report.error is not None or any(row.reason != "max-regions" for row in report.uncaptured()):
        return True
    regions = [region for region in report.regions if region.kernels and not unselected(report, region)]
    return any(region.state == "uncaptured" for region in regions)
