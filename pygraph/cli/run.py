"""``pygraph run``: execute a graph in a ``.pgir`` file, compiled, and compare it with its operators run one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from pygraph.cli import Failure, failing, read_text
from pygraph.cli.opt import is_program, load_modules
from pygraph.errors import OptionError
from pygraph.ir import MODELS, parse_graph
from pygraph.ir.verify import verify as verify_graph
from pygraph.logs import step

if TYPE_CHECKING:
    from pygraph.execute import Execution


@click.command()
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option("-p", "--pipeline", help="Passes to run first, such as 'partitioning{max-regions=2},selection'.")
@click.option("--load", multiple=True, metavar="MODULE", help="Import MODULE first, to register passes and operators.")
@click.option("--inputs", "saved", metavar="FILE", help="File of inputs that the option 'dump_inputs' wrote.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for random inputs, constants and draws.")
@click.option("--size", "sizes", multiple=True, metavar="s0=N", help="Value of a symbol.  [default: its hint]")
@click.option("--device", type=click.Choice(list(MODELS)), help="Device to run on.  [default: that of the graph]")
def run(
    file: IO[str],
    pipeline: str | None,
    load: tuple[str, ...],
    saved: str | None,
    seed: int,
    sizes: tuple[str, ...],
    device: str | None,
) -> None:
    """Compile and execute the graph in FILE ('-' for stdin), and compare it with its operators run one by one.

    Inductor compiles the graph, cut at the regions in FILE, or at those that the pipeline draws; without either, at
    those of the default passes. The graph is called several times, with inputs at other addresses each time, so that
    regions are captured and replayed. Inputs that are not in a file are random. A graph with symbols is compiled for
    one value of each symbol. If a result differs, the first operator at fault is named, and the exit status is 1.
    """
    source, text = file.name, read_text(file)
    with failing(source, text):
        load_modules(load)
        if is_program(text):
            raise OptionError(
                f"{source}: a launch program is replayed where it was captured: 'pygraph opt' verifies it"
            )
        graph = parse_graph(text, source)
        verify_graph(graph)
        if device is not None:
            moved = re.sub(r"\b(cpu|cuda)(:\d+)?\b(?![\w.(])", device, str(graph))
            graph = parse_graph(moved, source)
        from pygraph.execute import Inputs, execute

        kept = _saved(saved) if saved is not None else {}
        given = Inputs(kept.get("inputs", {}), kept.get("constants", {}), dict(map(_size, sizes)), seed)
        step(f"compiling and running {source}")
        done = execute(graph, given, pipeline)
    for line in _lines(source, done, saved or f"random inputs of seed {seed}"):
        click.echo(line)
    if done.difference is not None:
        raise click.exceptions.Exit(1)


def _lines(source: str, done: Execution, inputs: str) -> Iterator[str]:
    """Report of a run: regions, calls, and the first difference."""
    from pygraph.report.facts import clean, plural

    report, difference = done.report, done.difference
    operators = plural(len(report.graph), "operator") if report.graph is not None else "a graph"
    yield f"{source}: {operators} on {report.device}, {inputs}"
    for region in report.regions:
        state = "replayed" if region.state == "replay" else region.state
        launches = plural(len(region.kernels), "launch", "launches")
        drawn = " and ".join(map(str, region.planned)) or "none"
        why = f": {clean(region.why)}" if region.why else ""
        yield f"  partition {region.index}, region {drawn} of the graph: {launches}, {state}{why}"
    if report.emitted is not None and report.emitted.outside:
        yield f"  outside: {plural(len(report.emitted.outside), 'launch', 'launches')}"
    yield from (f"  {clean(note)}" for note in report.notes)
    if done.unsure:
        yield f"not compared, since it follows from random numbers: {', '.join(done.unsure)}"
    if difference is None:
        answered = sum(map(bool, done.replayed))
        yield f"{len(done.replayed)} calls, {answered} of them replayed: as the operators run one by one"
        return
    node = difference.node
    yield f"differs first in {difference.where} ({difference.when}): {difference.text}"
    if node is not None:
        places = [f"in {node.module}" if node.module else "", str(node.loc or ""), node.loc.code if node.loc else ""]
        yield "  " + clean(", ".join(filter(None, (node.op, *places))))


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.strip().isdigit():
        raise OptionError(f"--size {text}: write a symbol and its value, as in s0=128")
    return name.strip(), int(number)


def _saved(path: str) -> Any:
    """The content of a file of inputs, loaded without executing code in it."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise Failure(f"{path}: No such file") from error
    except Exception as error:  # the file may have any content
        raise Failure(f"{path}: no inputs that 'dump_inputs' saved: tensors and numbers, by torch.save") from error
    if not isinstance(found, dict) or not isinstance(found.get("inputs"), dict):
        raise Failure(f"{path}: no inputs that 'dump_inputs' saved: it has no 'inputs' by name")
    return found
