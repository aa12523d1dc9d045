"""``pygraph opt``: run a pipeline on a graph in a ``.pgir`` file and print what comes out.

Everything about passes is ``pygraph.passes``'s; this module reads options and files.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import click

from pygraph.cli import Failure, failing, write_out
from pygraph.errors import OptionError
from pygraph.ir import MODELS, Graph
from pygraph.ir import parse as parse_graph
from pygraph.ir.verify import verify as verify_graph
from pygraph.passes import Pass, PassContext, PassManager, PipelineResult
from pygraph.passes import parse as parse_pipeline
from pygraph.passes.legality.rules import captured_device
from pygraph.passes.manager import Check, Reproducer, read_header

__all__ = ["opt"]

_CHECKS: dict[bool | None, Check] = {None: "result", True: "full", False: "off"}


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("-p", "--pipeline", help="Passes to run, such as 'legality,partitioning{max-regions=4}'.")
@click.option("--load", multiple=True, metavar="MODULE", help="Import MODULE first, for the passes that it registers.")
@click.option("--print-before", multiple=True, metavar="PASS", help="Print the graph before PASS (or 'all') on stderr.")
@click.option("--print-after", multiple=True, metavar="PASS", help="Print the graph after PASS (or 'all') on stderr.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="--verify also compares what a pass says it changed with the printed graphs; --no-verify checks nothing.  "
    "[default: verify each result]",
)
@click.option("--timing", is_flag=True, help="Print the time of each pass on stderr.")
@click.option("--device", type=click.Choice(list(MODELS)), help="What is captured.  [default: as the graph says]")
@click.option("--bisect-limit", type=click.IntRange(min=0), metavar="N", help="Run the first N passes only.")
@click.option("--dump-dir", type=click.Path(file_okay=False), help="Write the graph after each pass, and reproducers.")
@click.option("-o", "--output", default="-", type=click.Path(dir_okay=False, allow_dash=True), help="[default: stdout]")
def opt(
    file: str,
    pipeline: str | None,
    load: tuple[str, ...],
    verify: bool | None,
    timing: bool,
    device: str | None,
    output: str,
    **around: Any,
) -> None:
    """Run passes on the graph in FILE ('-' for stdin) and print the result.

    Without -p, the '// pipeline:' line of a reproducer says what to run, and its '// device:' line on which device.
    With neither, the graph is verified and printed.
    """
    source, text = _read(file)
    with failing(source, text):
        for module in load:
            _import(module)
        header = _header(source, text)
        graph = parse_graph(text, source)
        if verify is not False:
            verify_graph(graph)
        manager = PassManager(_passes(pipeline, header, source), check=_CHECKS[verify], **around)
        result = manager.run(graph, _context(graph, header, device))
    if timing:
        _print_times(result)
    write_out(output, str(graph))


def _import(module: str) -> None:
    """Import a module of the user's, also from the working directory, as ``python -m`` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(module)
    except Exception as error:
        raise OptionError(f"--load {module}: {type(error).__name__}: {error}") from error


def _read(file: str) -> tuple[str, str]:
    """The name for errors, and the text."""
    try:
        if file == "-":
            return "<stdin>", sys.stdin.buffer.read().decode("utf-8")
        with open(file, encoding="utf-8") as stream:
            return file, stream.read()
    except OSError as error:
        raise Failure(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Failure(f"{file}: is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def _header(source: str, text: str) -> Reproducer:
    try:
        return read_header(text)
    except ValueError as error:
        raise OptionError(f"{source}: malformed value in the leading comments: {error}") from error


def _passes(pipeline: str | None, header: Reproducer, source: str) -> tuple[Pass, ...]:
    if pipeline is not None:
        return parse_pipeline(pipeline)
    return parse_pipeline(header.pipeline or "", f"{source}, pipeline of the leading comments")


def _context(graph: Graph, header: Reproducer, device: str | None) -> PassContext:
    ctx = header.ctx or PassContext()
    if device is None and header.ctx is not None:
        return ctx
    chosen = device or captured_device(graph)
    return dataclasses.replace(ctx, device=chosen, model=MODELS[chosen])


def _print_times(result: PipelineResult) -> None:
    rows = [(f"{record.time_ms:.3f} ms", record.text, "changed" if record.modified else "") for record in result.passes]
    rows.append((f"{result.time_ms:.3f} ms", "all passes", ""))
    width = max(len(time) for time, _, _ in rows)
    for time, name, changed in rows:
        click.echo(f"{time:>{width}}  {name}  {changed}".rstrip(), err=True)
