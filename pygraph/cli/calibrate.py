"""``pygraph calibrate``: measure this machine's device model, and keep it for compilations."""

from __future__ import annotations

import shutil
import sys

import click

from pygraph.cli import Failure, failing
from pygraph.logs import working

_FIGURES = {  # printed figures of a model, by field
    "kernel_us": "smallest kernel, µs",
    "bandwidth_gbs": "memory, GB/s",
    "peak_gflops": "matrix products, GFLOP/s",
}


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Device to measure.  [default: cuda if any]")
@click.option("--no-save", is_flag=True, help="Do not keep the model: compilations use the previous one.")
def calibrate(device: str | None, no_save: bool) -> None:
    """Measure a device model of this machine, for passes to use from now on.

    It takes some seconds. Nothing else should run meanwhile. The model is kept in the user's cache folder
    (PYGRAPH_CACHE_DIR sets another), for this device, driver, torch and version of PyGraph.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from pygraph.calibration.calibrate import calibrate as measure
    from pygraph.calibration.store import identity_of, save
    from pygraph.ir import MODELS

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with failing(), working(f"calibrating {kind}") as step:
        try:
            model = measure(kind, step=step)
        except ValueError as error:
            raise Failure(f"no model fits what was measured: {error}; was the machine busy?") from error
    built_in = MODELS[kind]
    table = Table("figure", "measured", f"built in ({built_in.name})", box=None, padding=(0, 2, 0, 0))
    for field, name in _FIGURES.items():
        table.add_row(name, _number(getattr(model, field)), _number(getattr(built_in, field)))
    for dtype, gflops in model.peaks.items():
        table.add_row(f"matrix products, {dtype}, GFLOP/s", _number(gflops), "–")
    console = Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 100, highlight=False)
    console.print(model.label, markup=False, soft_wrap=True)
    console.print(table)
    if not no_save:
        path = save(identity_of(kind), model)
        click.echo("not kept" if path is None else f"kept in {path}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
