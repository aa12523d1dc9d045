"""``pygraph profile SCRIPT``: causes of the time of a script's calls, uncaptured and replayed."""

from __future__ import annotations

import json as text
import shutil
import sys

import click

from pygraph.cli import ScriptCommand, failing, writing
from pygraph.logs import working


@click.command(cls=ScriptCommand)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--out", metavar="FILE", help="Write a self-contained page with a timeline of some calls.")
@click.option("--json", metavar="FILE", help="Write the figures as JSON.")
@click.option("--trace", metavar="FILE", help="Write both runs as a trace for Perfetto or chrome://tracing.")
@click.option("--calls", type=click.IntRange(min=1), default=20, show_default=True, help="Calls to profile.")
def profile(
    script: str, args: tuple[str, ...], out: str | None, json: str | None, trace: str | None, calls: int
) -> None:
    """Show how calls of SCRIPT spend the host's time, uncaptured and replayed, and when the GPU is busy.

    The script runs twice, as under 'pygraph bench': torch.compile compiles with PyGraph, and ignores the backend, mode
    and options that the script passes. A call lasts from one call of an outermost compiled callable to the next, such
    as a training step. In the first run, no region is captured, and a callable of pygraph.graph runs as it is. In the
    second run, all are captured, even if that does not pay. After warm-up, calls run under torch.profiler. The script
    must make about 20 + 2 × calls calls. It is stopped after enough calls.

    Options of this command may stand before or after SCRIPT; those of the script go after '--'. A FILE of '-' is
    stdout, which then has nothing else.
    """
    from rich.console import Console

    from pygraph.bench.causes import document, measure, notes, page, table, timeline

    if (out, json, trace).count("-") > 1:
        raise click.UsageError("only one of --out, --json and --trace can go to stdout")
    with writing(out, json, trace) as (page_file, json_file, trace_file):
        with failing(), working("profile") as step:
            runs = measure(script, args, calls, step)
        told = document(script, args, runs)
        if page_file is not None:
            page_file.write(page(told, runs))
        if json_file is not None:
            json_file.write(text.dumps(told, indent=2) + "\n")
        if trace_file is not None:
            text.dump(timeline(runs), trace_file)
    if "-" not in (out, json, trace):
        console = Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 100, highlight=False)
        console.print(table(told))
        for note in notes(told):
            console.print(note, markup=False)
