"""``pygraph bench SCRIPT``: a user's script compiled in several ways, timed side by side."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import click

from pygraph.cli import ScriptCommand
from pygraph.logs import working


@click.command(cls=ScriptCommand)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--sides", default="", metavar="A,B,…", help="Sides, as in 'default,pygraph'.  [default: all that fit]")
@click.option("--out", type=click.Path(file_okay=False), help="Folder for results as JSON and Markdown.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True, metavar="N",
              help="Time limit in seconds. Results that are missing by then are left out.")  # fmt: skip
@click.option("--blocks", type=click.IntRange(min=1), default=11, show_default=True, help="Blocks of each side.")
@click.option("--calls", type=click.IntRange(min=1), default=10, show_default=True, help="Calls in a block.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Device to run on.  [default: cuda if there is one]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for the order of blocks.")
def bench(
    script: str,
    args: tuple[str, ...],
    sides: str,
    out: str | None,
    seconds: float,
    blocks: int,
    calls: int,
    device: str | None,
    seed: int,
) -> None:
    """Time SCRIPT side by side: eager, Inductor's modes, and PyGraph.

    The script runs unchanged, once for each side: torch.compile compiles as the side does, and ignores the backend,
    mode and options that the script passes. On sides other than PyGraph's, a callable of pygraph.graph runs as it is.
    After warm-up, time is measured from one call of an outermost compiled callable to the next, with the script's code
    in between. The script must make about 7 + blocks × (calls + 3) calls, and calls for another half second. It is
    stopped after enough calls; if it ends early, results so far are used. Options of this command may stand before or
    after SCRIPT; those of the script go after '--'.

    Each side has its own process. All processes are alive at the same time, and run blocks of calls in turn, in random
    order. Ratios are taken within rounds. Before, results are compared with eager's, in processes in which Inductor
    draws random numbers as eager does. A side with wrong or uncompared results gets no speed-up.
    """
    import torch

    from pygraph.bench.render import page, write_all
    from pygraph.bench.results import document, machine, row_of
    from pygraph.bench.sides import sides_for
    from pygraph.bench.timing import Bench, Program

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU")
        wanted = sides_for([name.strip() for name in sides.split(",") if name.strip()], kind)
        if not Path(script).is_file():
            raise ValueError(f"there is no script {script}")
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)  # a long run must not end in a folder that cannot be written
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    name = re.sub(r"[^\w.-]+", "-", Path(script).stem)
    about = {"about": " ".join([script, *args])}
    program = Program(name, "pygraph.bench.script:run_script", script, wanted, args, about=about, calls=calls)
    settings = {"blocks": blocks, "seed": seed, "seconds": seconds, "device": kind, "tiny": False}
    with tempfile.TemporaryDirectory() as folder, working("benchmark") as step:
        measuring = Bench(Path(folder), kind, blocks=blocks, seed=seed, step=step)
        found = measuring.measure(program, time.monotonic() + seconds)
    told = document(machine(kind), settings, {name: row_of(program, found)}, {}, {})
    if out is not None:
        write_all(Path(out), told)
    click.echo(page(told), nl=False)
