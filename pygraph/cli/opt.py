"""``pygraph opt``: run a pipeline on a graph or a launch program in a ``.pgir`` file and print the result."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterable
from typing import IO, Any

import click

from pygraph.cli import failing, read_text
from pygraph.errors import OptionError
from pygraph.ir import MODELS, Graph, parse_graph
from pygraph.passes import PassContext, PassManager, parse_pipeline
from pygraph.passes.legality.rules import captured_device
from pygraph.passes.manager import Check, read_header, verify_subject
from pygraph.program.program import Program
from pygraph.program.text import parse_program

_CHECKS: dict[bool | None, Check] = {None: "result", True: "full", False: "off"}


@click.command()
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option("-p", "--pipeline", help="Passes to run, such as 'legality,partitioning{max-regions=4}'.")
@click.option("--load", multiple=True, metavar="MODULE", help="Import MODULE first, to register its passes.")
@click.option("--print-before", multiple=True, metavar="PASS", help="Print the graph before PASS (or 'all') to stderr.")
@click.option("--print-after", multiple=True, metavar="PASS", help="Print the graph after PASS (or 'all') to stderr.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="--verify also checks the claims of each pass: whether it changed the graph, and, on random inputs, that the "
    "graph computes the same results as before; --no-verify checks nothing.  "
    "[default: verify each result]",
)
@click.option("--timing", is_flag=True, help="Print the time of each pass to stderr.")
@click.option("--device", type=click.Choice(list(MODELS)), help="Device to capture on.  [default: that in FILE]")
@click.option("--bisect-limit", type=click.IntRange(min=0), metavar="N", help="Run only the first N passes.")
@click.option("--dump-dir", type=click.Path(file_okay=False), help="Folder for reproducers and graphs after each pass.")
@click.option("-o", "--output", default="-", type=click.File("w", encoding="utf-8"), help="Output.  [default: stdout]")
def opt(
    file: IO[str],
    pipeline: str | None,
    load: tuple[str, ...],
    verify: bool | None,
    timing: bool,
    device: str | None,
    output: IO[str],
    **around: Any,
) -> None:
    """Run passes on the graph or launch program in FILE ('-' for stdin), and print the result.

    Without -p, the '// pipeline:' line of a reproducer names the passes. Without --device, its '// device:' line names
    the device. If there are no passes, the content of FILE is verified and printed.
    """
    source, text = file.name, read_text(file)
    if verify:
        import pygraph.frontend.meaning  # noqa: F401 - runs graphs, on torch, which takes a while
    with failing(source, text):
        load_modules(load)
        try:
            described, context = read_header(text)
        except ValueError as error:
            raise OptionError(f"{source}: malformed value in the leading comments: {error}") from error
        subject = _read(text, source)
        if verify is not False:
            verify_subject(subject)
        if device is not None or context is None:
            on = subject.recording.device if isinstance(subject, Program) else captured_device(subject)
            device = device or on
            context = dataclasses.replace(context or PassContext(), device=device, model=MODELS[device])
        if pipeline is not None:
            passes = parse_pipeline(pipeline)
        else:
            passes = parse_pipeline(described or "", f"{source}, pipeline of the leading comments")
        result = PassManager(passes, check=_CHECKS[verify], **around).run(subject, context)
    if timing:
        rows = [(record.time_ms, record.text, "changed" if record.modified else "") for record in result.passes]
        for ms, name, changed in [*rows, (result.time_ms, "all passes", "")]:
            click.echo(f"{ms:10.3f} ms  {name}  {changed}".rstrip(), err=True)
    output.write(str(result.program or subject))


def is_program(text: str) -> bool:
    """True if ``text`` is a launch program, by its first word after comments."""
    return re.match(r"(\s|//[^\n]*\n)*program\b", text) is not None


def _read(text: str, source: str) -> Graph | Program:
    return parse_program(text, source) if is_program(text) else parse_graph(text, source)


def load_modules(names: Iterable[str]) -> None:
    """Import the user's modules, also from the working directory, as ``python -m`` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise OptionError(f"--load {name}: {type(error).__name__}: {error}") from error
