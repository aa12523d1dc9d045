"""``pygraph explain``: run a script and report what PyGraph captured of the graphs that it compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import click

from pygraph.cli import Failure, ScriptCommand, writing
from pygraph.logs import step, working

if TYPE_CHECKING:
    from pygraph.report.model import GraphReport
    from pygraph.report.ranks import Ranks

SHORT_STATUS = 3
"""Exit status when less was captured than ``--strict`` or ``--min-coverage`` asks for."""

_FRAMES = (__file__, "<frozen runpy>", runpy.__file__)


class _Nothing(Failure):
    """Nothing was compiled, which is not an error for some of several ranks."""


class _Sigterm:
    """Rank 0's handler of SIGTERM, which torchrun sends to ranks once one has failed. Within ``with``, the signal ends
    the script. Outside, it is only recorded, and the report is still written."""

    def __init__(self) -> None:
        self.came = self._ends = False
        self._process = os.getpid()

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        if os.getpid() != self._process:  # the script forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.came = True
        if self._ends:
            raise SystemExit("SIGTERM, which torchrun sends once another rank has failed")

    def __enter__(self) -> None:
        self._ends = True
        if self.came:
            self._on_signal()

    def __exit__(self, *_: object) -> None:
        self._ends = False


@click.command(cls=ScriptCommand)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--html", metavar="FILE", help="Write a self-contained page with a picture of each graph.")
@click.option("--json", metavar="FILE", help="Write the report as JSON.")
@click.option("--svg", metavar="FILE", help="Write the pictures of all graphs as SVG.")
@click.option("--dot", metavar="FILE", help="Write the pictures of all graphs as DOT, for Graphviz.")
@click.option("--strict", is_flag=True, help="Exit with status 3 at a graph break, or if anything is not captured.")
@click.option(
    "--min-coverage",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Exit with status 3 if less than PERCENT of launches is selected. A graph break counts as one that is not.",
)
def explain(
    script: str,
    args: tuple[str, ...],
    html: str | None,
    json: str | None,
    svg: str | None,
    dot: str | None,
    strict: bool,
    min_coverage: float | None,
) -> None:
    """Run SCRIPT with ARGS and report what was captured, what was not, and why.

    The script may call torch.compile(…, backend="pygraph") itself. If it compiles nothing that way but defines 'model'
    and 'inputs' at its top level, the model is compiled and called until it is replayed, usually three times. A tuple
    or list of inputs becomes the positional arguments, a mapping the keyword arguments, anything else the only
    argument.

    Options of this command may stand before or after SCRIPT. Those of the script go after '--', as in
    'pygraph explain train.py -- --lr 3'. A FILE of '-' is stdout, which then has nothing else: output of the script
    goes to stderr.

    Under torchrun, as in 'torchrun --nproc-per-node 2 -m pygraph explain train.py', rank 0 writes its own report, with
    the differences of the other ranks.
    """
    from pygraph.report.facts import json_text
    from pygraph.report.html import render_html, render_svg
    from pygraph.report.picture import render_dot
    from pygraph.report.ranks import Ranks
    from pygraph.report.text import render_text

    paths: tuple[str | None, ...] = (html, json, svg, dot)
    if paths.count("-") > 1:
        raise click.UsageError("only one of --html, --json, --svg and --dot can go to stdout")
    kept = "-" in paths
    ranks, sigterm = Ranks.of_torchrun(), _Sigterm()
    if ranks is not None and ranks.rank:
        paths = ()  # rank 0 writes them, and tells the steps
        logging.getLogger("pygraph.progress").setLevel(logging.WARNING)
    elif ranks is not None:
        sigterm.install()
    with writing(*paths) as files:
        with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
            reports, failure = _run(script, args, sigterm)
        told = None
        if ranks is None:
            if failure is not None:
                raise failure
        elif ranks.rank:
            _send(ranks, reports, failure)
            return
        else:
            sigterm.install()  # the script may have replaced the handler
            told, failure = _gather(ranks, reports, failure, sigterm)
        renders: tuple[Callable[[], str], ...] = (
            partial(render_html, reports, told),
            partial(json_text, reports, told),
            partial(render_svg, reports),
            partial(render_dot, reports),
        )
        for file, render in zip(files, renders, strict=True):
            if file is not None:
                file.write(render())
    if not kept:
        shown = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if shown else 100
        color = shown and not os.environ.get("NO_COLOR")
        click.echo(render_text(reports, width, color, told), nl=False)
    if failure is not None:
        raise failure
    short = list(_short(reports, told, strict, min_coverage))
    for line in short:
        click.echo(line, err=True)
    if short:
        raise click.exceptions.Exit(SHORT_STATUS)


def _short(
    reports: Sequence[GraphReport], ranks: Sequence[Any] | None, strict: bool, min_coverage: float | None
) -> Iterator[str]:
    """Violations of ``strict`` (one line per other rank that fails) and of ``min_coverage``, as lines for stderr."""
    from pygraph.report.facts import percent, summarize

    if strict:
        yield from dict.fromkeys(f"--strict: {line}" for report in reports for line in _incomplete(report))
        yield from (f"--strict: rank {rank['rank']}, too" for rank in (ranks or ())[1:] if rank["incomplete"])
    if min_coverage is None:
        return
    summaries = [(rank["summary"], f" on rank {rank['rank']}") for rank in ranks or () if rank["summary"]]
    for summary, where in summaries or [(dataclasses.asdict(summarize(reports)), "")]:
        share = summary["coverage"]
        if share is None or share * 100 < min_coverage:
            yield f"--min-coverage {min_coverage:g}: coverage is {percent(share)}{where}"


def _run(script: str, args: Sequence[str], sigterm: _Sigterm) -> tuple[list[GraphReport], Failure | None]:
    """The reports of the graphs compiled by the script, or from its model, and the failure that ended it, if any."""
    import pygraph
    from pygraph.frontend.location import noting_all_breaks
    from pygraph.runtime.native_build import waiting_for_builds

    before = {report.index for report in pygraph.reports()}

    def fresh() -> list[GraphReport]:
        return [report for report in pygraph.reports() if report.index not in before]

    path = [str(Path(script).resolve().parent), *sys.path]
    found: dict[str, Any] = {}
    failure = None
    step(f"running {script}")
    with mock.patch.object(sys, "argv", [script, *args]), mock.patch.object(sys, "path", path):
        try:
            with _shown_as_python_would(script), sigterm, noting_all_breaks(), waiting_for_builds():
                found = runpy.run_path(script, run_name="__main__")
            if not fresh():
                _call_model(script, found, sigterm)
            if not fresh():
                raise _Nothing(
                    f"{script}: the model was called, but Dynamo found nothing in it to compile: torch skips some "
                    "modules, such as nn.LSTM, and code without tensors. TORCH_LOGS=graph_breaks says what it met; "
                    "torch.compile(…, fullgraph=True) raises there"
                )
        except Failure as error:
            failure = error
    return fresh(), failure


def _call_model(script: str, found: Mapping[str, Any], sigterm: _Sigterm) -> None:
    """Compile and call the model in ``found``, the top level of the script."""
    import pygraph

    if "model" not in found or "inputs" not in found:
        raise _Nothing(
            f"{script}: PyGraph compiled nothing. Compile with torch.compile(…, backend='pygraph'), "
            "or leave a 'model' and its 'inputs' at the top level of the script"
        )
    inputs = found["inputs"]
    keywords = inputs if isinstance(inputs, Mapping) else {}
    given = inputs if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
    with _shown_as_python_would(script), sigterm:
        pygraph.explain(found["model"], *given, **keywords)


def _document(reports: Sequence[GraphReport], failure: Failure | None) -> dict[str, Any]:
    """The facts of a rank for rank 0."""
    from pygraph.report.facts import to_json

    error = None if failure is None or isinstance(failure, _Nothing) else failure.message
    told = to_json(reports)
    incomplete = any(line for report in reports for line in _incomplete(report))
    return {"error": error, "incomplete": incomplete, **{k: told[k] for k in ("summary", "graphs")}}


def _send(ranks: Ranks, reports: Sequence[GraphReport], failure: Failure | None) -> None:
    """Send the report to rank 0. Raises Failure if the script failed, or if rank 0 cannot be reached."""
    document = _document(reports, failure)
    try:
        ranks.send(document)
    except RuntimeError as error:
        document["error"] = document["error"] or f"rank 0 cannot be told: {error}"
    if document["error"] is not None:
        raise Failure(f"rank {ranks.rank}: {document['error']}")


def _gather(
    ranks: Ranks, reports: Sequence[GraphReport], failure: Failure | None, sigterm: _Sigterm
) -> tuple[list[dict[str, Any]], Failure | None]:
    """The comparison of all ranks, and a failure if one of them failed or none compiled anything."""
    from pygraph.report.ranks import compared

    with working("waiting for the other ranks"):
        others = ranks.gather(lambda: sigterm.came)
    told = compared([_document(reports, failure), *others])
    own = told[0]["error"]
    failed = [f"rank 0: {own}"] if own else []
    # the other ranks have printed their own tracebacks
    failed += (f"rank {i}: {other['error'].splitlines()[-1]}" for i, other in enumerate(others, 1) if other["error"])
    if failed:
        return told, Failure("\n".join(failed))
    return told, None if any(each["graphs"] for each in told) else failure


@contextlib.contextmanager
def _shown_as_python_would(path: str) -> Iterator[None]:
    """Turn exceptions of the user's code into a Failure with its traceback, without the frames that run it."""
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


def _incomplete(report: GraphReport) -> Iterator[str]:
    """Lines on graph breaks, and on operators and regions that could not be captured; without those that the user left
    out, or that do not pay."""
    from pygraph.report.facts import clean, unselected

    for line, reason in report.origin.breaks.items():
        yield clean(f"graph break at {line}: {reason}" + (f": {line.code}" if line.code else ""))
    if report.error is not None:
        yield clean(f"{report.name} is left to plain Inductor: {report.error}")
    for row in report.uncaptured():
        if row.reason != "max-regions":
            yield clean(
                f"{row.op} at {row.loc or 'unknown line'}: {row.reason}" + (f": {row.code}" if row.code else "")
            )
    for region in report.regions:
        if region.kernels and not unselected(report, region) and region.state == "uncaptured":
            yield clean(f"{report.name}, region {region.index}: {region.why}")
