"""``pygraph calibrate``: measure this machine's device model, keep it, and say how far its predictions are off.

Measuring, keeping and drawing are ``pygraph.calibration``'s; this module reads options and prints.
"""

from __future__ import annotations

import json as json_text
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pygraph.cli import Failure, failing, write_out
from pygraph.logs import working

if TYPE_CHECKING:
    from rich.table import Table

    from pygraph.calibration.records import Calibration, Figure
    from pygraph.ir import DeviceModel

__all__ = ["calibrate"]

_NO_TERMINAL_WIDTH = 100
_OUT = click.Path(dir_okay=False, allow_dash=True)


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="What to measure.  [default: cuda if there is one]")
@click.option("--plot", type=_OUT, metavar="FILE", help="Draw predictions against measurements as a PNG (matplotlib).")
@click.option("--json", type=_OUT, metavar="FILE", help="Write everything that was measured; '-' is stdout.")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Measure nothing: show what --json wrote.",
)
@click.option("--no-save", is_flag=True, help="Do not keep the model: compilations go on with what they had.")
def calibrate(device: str | None, plot: str | None, json: str | None, source: str | None, no_save: bool) -> None:
    """Measure a model of the device on this machine, for the passes to use from now on.

    Takes a minute or less, in which nothing else should run. The model is kept in the user's cache (PYGRAPH_CACHE_DIR
    names another folder), for this device, driver, torch and version of PyGraph.
    """
    if source is not None and (device is not None or no_save):
        raise click.UsageError("--from measures nothing: it goes with --plot and --json only")
    with failing():
        found = _measured(device) if source is None else _read(source)
        unfit = found.unfit()
        kept = None if source is not None or no_save or unfit else _kept(found)
        if json is not None:
            write_out(json, json_text.dumps(found.as_json(), indent=1) + "\n")
        if plot is not None:
            _draw(found, plot)
    if json != "-":
        _show(found, kept)
    if unfit and source is None and not no_save:
        raise Failure(f"the model is not kept, since {unfit}: was the machine busy? Nothing else should run meanwhile")


def _measured(device: str | None) -> Calibration:
    import torch

    from pygraph.calibration.run import calibrate as measure

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with working(f"calibrating {kind}") as step:
        try:
            return measure(kind, step=step)
        except ValueError as error:
            raise Failure(f"no model fits what was measured: {error}; was the machine busy?") from error


def _read(source: str) -> Calibration:
    from pygraph.calibration.records import Calibration

    try:
        return Calibration.from_json(json_text.loads(Path(source).read_text(encoding="utf-8")))
    except OSError as error:
        raise Failure(f"{source}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Failure(f"{source}: cannot be used: {error}") from error


def _kept(found: Calibration) -> str:
    from pygraph.calibration.store import save

    path = save(found)
    return "not kept" if path is None else f"kept in {path}"


def _draw(found: Calibration, plot: str) -> None:
    from pygraph.calibration.plot import draw

    try:
        draw(found, Path(plot))
    except OSError as error:
        raise Failure(f"{plot}: cannot be written: {error.strerror}") from error


# -- what is printed ---------------------------------------------------------------------------------------------------


def _show(found: Calibration, kept: str | None) -> None:
    from rich.console import Console

    from pygraph.calibration.records import PANELS, error_of

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _NO_TERMINAL_WIDTH
    console = Console(width=width, highlight=False)
    console.print(f"{found.model.label}, in {found.seconds:.1f} s", markup=False)
    console.print(_table(found))
    for name, title in PANELS.items():
        error = error_of(found.panel(name))
        console.print(f"{title}: {'nothing to compare' if error is None else error.text}", markup=False, soft_wrap=True)
    if kept is not None:
        console.print(kept, markup=False, soft_wrap=True)


def _table(found: Calibration) -> Table:
    from rich.table import Table

    from pygraph.ir import H200, HOST

    built_in = H200 if found.identity.kind == "cuda" else HOST
    table = Table("figure", "unit", box=None, padding=(0, 2, 0, 0))
    for column in ("measured", "quartiles", f"built in ({built_in.name})"):
        table.add_column(column, justify="right")
    for figure in found.figures:
        table.add_row(figure.name, figure.unit, *_values(figure, built_in))
    return table


def _values(figure: Figure, built_in: DeviceModel) -> tuple[str, str, str]:
    known: Any = getattr(built_in, figure.field, None) if figure.field else None
    spread = f"{_number(figure.low)} – {_number(figure.high)}"
    return _number(figure.value), spread, _number(known) if known else "–"


def _number(value: float) -> str:
    """Three digits; thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
