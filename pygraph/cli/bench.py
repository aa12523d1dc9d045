"""``pygraph bench``: workloads of a suite, or a script, compiled in several ways and timed next to each other.

Reading the command line and showing progress; everything else is ``pygraph.bench``'s.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pygraph.cli import Failure, ScriptCommand
from pygraph.logs import working

if TYPE_CHECKING:
    from pygraph.bench.output import Outputs
    from pygraph.bench.plan import Program

__all__ = ["bench"]


@dataclass(frozen=True)
class _Wanted:
    """The options, by their names on the command line."""

    out: tuple[str, ...]
    source: tuple[str, ...]
    sides: str
    ablations: bool
    seconds: float
    jobs: int
    blocks: int
    calls: int | None
    device: str | None
    phase: str
    caches: str | None
    compile_time: bool
    tiny: bool | None
    suite: str | None
    seed: int
    listing: bool


@click.command(cls=ScriptCommand)
@click.argument("names", nargs=-1, type=click.UNPROCESSED, metavar="[NAMES… | SCRIPT.py [ARGS…]]")
@click.option("--list", "listing", is_flag=True, help="List the workloads, and what keeps any from running here.")
@click.option("--sides", default="", metavar="A,B,…", help="Ways of compiling.  [default: all that apply]")
@click.option("--ablations", is_flag=True, help="Also PyGraph with each mechanism off.")
@click.option("--out", multiple=True, metavar="PATH", help="A folder for everything, or a .json, .md or .png file.")
@click.option("--from", "source", multiple=True, metavar="JSON",
              help="Measure nothing: write --out from these results. Several files are put together.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True, metavar="N",
              help="What is not measured by then is left out, and named.")  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(min=1), default=8, show_default=True, help="Processes that compile at once."
)
@click.option("--blocks", type=click.IntRange(min=1), default=11, show_default=True, help="Rounds of blocks.")
@click.option("--calls", type=click.IntRange(min=1), help="Calls of a block.  [default: as the workload says; 10]")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda, if there is one]")
@click.option("--phase", type=click.Choice(["all", "compile", "time"]), default="all", show_default=True,
              help="One phase only; what was compiled is kept in --caches for the other.")  # fmt: skip
@click.option("--caches", metavar="DIR", help="Keep what was compiled here, and use it next time.")
@click.option("--compile-time", is_flag=True, help="Report it: sides are compiled from nothing, one by one.")
@click.option("--tiny/--full", default=None, help="Small versions of the workloads.  [default: small on a CPU]")
@click.option("--suite", metavar="MODULE", help="A module with WORKLOADS of your own.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of blocks.")
def bench(names: tuple[str, ...], **options: Any) -> None:
    """Time programs side by side: eager, Inductor's modes, CUDA graphs by hand, and PyGraph.

    NAMES are workloads, domains or kinds of the suite (see --list); without any, all are run. Or name a SCRIPT: it runs
    once for each side, unchanged, with torch.compile compiling in that side's way, whatever backend, mode or options
    it gives. What is timed is the time from one call of an outermost compiled callable to the next, with all that the
    script does in between, once it is warm. It has to make about 7 + blocks × (calls + 3) calls, and half a second's
    more; where calls are short, a block has as many as take 20 ms. It is ended when enough was seen, and one that ends
    early gives what was measured by then. Options of this command may stand before or after SCRIPT; those of the
    script go after '--'.

    Each side has a process of its own, so that none disturbs what another one measures. First all are compiled, several
    at once, into caches on disk. Then, program by program, all sides are started, and run blocks of calls in turns, in
    random order, while the others wait. Ratios are taken within these rounds.

    Results are compared with eager's. A side whose results are wrong, or could not be compared, gets no speed-up. Steps
    and scripts that draw random numbers are compared in processes of their own, in which Inductor draws as eager does.
    """
    wanted = _Wanted(**options)
    if wanted.listing:
        return _list(wanted)
    with _refused():
        outputs = _outputs(wanted)
        if wanted.source:
            return _again(wanted.source, outputs, names)
        programs, skipped = _programs(names, wanted)
    _run(programs, skipped, wanted, outputs)
    return None


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What cannot be asked for is an error of the command line."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _outputs(wanted: _Wanted) -> Outputs:
    from pygraph.bench.output import Outputs

    if wanted.compile_time and wanted.caches is not None:
        raise ValueError("--compile-time compiles from nothing: it cannot be used with --caches")
    if wanted.phase != "all" and (wanted.caches is None or wanted.compile_time):
        raise ValueError(f"--phase {wanted.phase} needs --caches, where the phases meet")
    if wanted.source and not wanted.out:
        raise ValueError("--from needs --out: what should be written")
    return Outputs.of(wanted.out)


def _again(sources: Sequence[str], outputs: Outputs, names: Sequence[str]) -> None:
    """Write the outputs from results that were measured before."""
    from pygraph.bench.results import combine, read

    if names:
        raise ValueError("--from measures nothing: it takes no names")
    try:
        document = combine([read(Path(source)) for source in sources])
    except OSError as error:
        raise Failure(f"{error.filename}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Failure(str(error)) from error
    _draw(outputs, document, again=True)


def _draw(outputs: Outputs, document: Any, *, again: bool = False) -> None:
    try:
        for said in outputs.draw(document, again=again):
            click.echo(said, err=True)
    except OSError as error:
        raise Failure(f"{error.filename}: cannot be written: {error.strerror}") from error


def _device(wanted: _Wanted) -> str:
    import torch

    there = torch.cuda.is_available()
    if wanted.device == "cuda" and not there:
        raise ValueError("--device cuda: torch finds no GPU")
    return wanted.device or ("cuda" if there else "cpu")


def _programs(names: Sequence[str], wanted: _Wanted) -> tuple[list[Program], dict[str, str]]:
    """What is to be run, and what of it cannot run here, with the reason. Raises ValueError."""
    from pygraph.bench.plan import program_of_script, program_of_workload
    from pygraph.bench.registry import SUITE, chosen, missing, workloads
    from pygraph.bench.sides import sides_for

    named = [name.strip() for name in wanted.sides.split(",") if name.strip()]
    sides = sides_for(named, _device(wanted), wanted.ablations)
    if names and names[0].endswith(".py"):
        if not Path(names[0]).is_file():
            raise ValueError(f"there is no script {names[0]}")
        return [program_of_script(names[0], names[1:], sides, wanted.calls)], {}
    picked = chosen(names, workloads(wanted.suite or SUITE))
    skipped = {w.name: f"not installed: {', '.join(missing(w))}" for w in picked if missing(w)}
    programs = [program_of_workload(w, sides, wanted.calls) for w in picked if w.name not in skipped]
    return programs, skipped


def _run(programs: Sequence[Program], skipped: dict[str, str], wanted: _Wanted, outputs: Outputs) -> None:
    from pygraph.bench.coordinator import Options, run
    from pygraph.bench.plan import Launcher
    from pygraph.bench.process import Home
    from pygraph.bench.registry import SUITE

    device = _device(wanted)
    small = device == "cpu" if wanted.tiny is None else wanted.tiny
    tiny = small and not any(program.script for program in programs)
    chosen = (wanted.seconds, wanted.jobs, wanted.blocks, wanted.seed, wanted.phase, wanted.compile_time)
    with tempfile.TemporaryDirectory() as scratch, working("benchmark") as step, _unwritable():
        home = Home(Path(wanted.caches or scratch), cold=wanted.compile_time)
        launcher = Launcher(home, device, tiny, wanted.suite or SUITE)
        timing = wanted.phase != "compile"
        results = run(
            programs,
            launcher,
            Options(*chosen),
            outputs.save if timing else lambda _: None,
            skipped=skipped,
            tell=lambda line: click.echo(line, err=True),
            step=step,
        )
    if timing:
        document = results.as_json()
        _draw(outputs, document)
        _conclude(document)


@contextlib.contextmanager
def _unwritable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}") from error


def _conclude(document: Any) -> None:
    """The page goes to stdout, so that a run without --out shows what it found."""
    from pygraph.bench.markdown import render_markdown

    click.echo(render_markdown(document), nl=False)


def _list(wanted: _Wanted) -> None:
    from pygraph.bench.registry import SUITE, missing, workloads

    with _refused():
        known = workloads(wanted.suite or SUITE)
    for name, workload in known.items():
        lacking = missing(workload)
        click.echo(
            f"{name}  ({workload.domain}, {workload.kind})" + (f"  needs {', '.join(lacking)}" if lacking else "")
        )
        click.echo(f"    {workload.about}")
