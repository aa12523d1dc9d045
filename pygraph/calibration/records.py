"""What a calibration found, as data: figures with their spread, predictions beside measurements, the error they state.

Measuring is in ``probes`` and ``validation``; files in ``store``. Nothing here imports torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pygraph.ir import DeviceModel

__all__ = ["DEVICE", "HOST_CALL", "PANELS", "Calibration", "Error", "Figure", "Identity", "Point", "Sweep", "error_of"]

FORMAT = 2
"""Of the JSON; a file of another one is not read."""

DEVICE = "device"
HOST_CALL = "host"
WORST = 3.0
"""The median error, as a factor, of a model that is still worth using."""

PANELS = {DEVICE: "device time per operator", HOST_CALL: "host time per call"}
"""What is predicted, by its short name."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What figures hold for. ``kind`` is cpu or cuda, ``driver`` the version of what launches there."""

    kind: str
    device: str
    driver: str
    torch: str
    pygraph: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and the quartiles of its estimates. ``field`` is the model's field that it is; empty for none."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    field: str = ""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Times in µs over amounts (bytes moved, or operations) of one kind of kernel: what rates were fitted to."""

    name: str
    unit: str
    amounts: tuple[float, ...]
    times_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One prediction beside its measurement, µs, and the quartiles of that. ``panel`` is DEVICE or HOST_CALL."""

    panel: str
    kind: str
    name: str
    predicted_us: float
    measured_us: float
    low_us: float
    high_us: float

    @property
    def off(self) -> float:
        """The factor, 1 or more, between the two."""
        return math.exp(abs(math.log(self.predicted_us / self.measured_us)))


@dataclass(frozen=True, slots=True)
class Error:
    """Factors within which predictions lie: half of them, and nine in ten of ``count``."""

    median: float
    tenth: float
    count: int

    @property
    def text(self) -> str:
        """``within a factor of 1.30 for half of them, 2.10 for nine in ten (24 predictions)``."""
        return f"within a factor of {self.median:.2f} for half of them, {self.tenth:.2f} for nine in ten " + (
            f"({self.count} predictions)"
        )


def error_of(points: Iterable[Point]) -> Error | None:
    """Median and 90th percentile (linear between ranks) of ``|log(predicted / measured)|``, as factors."""
    logs = sorted(abs(math.log(point.predicted_us / point.measured_us)) for point in points)
    if not logs:
        return None
    rank = 0.9 * (len(logs) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(logs) - 1)
    tenth = logs[below] + (logs[above] - logs[below]) * (rank - below)
    return Error(math.exp(statistics.median(logs)), math.exp(tenth), len(logs))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that was found on one device. ``date`` is ISO 8601, ``seconds`` what it took."""

    identity: Identity
    date: str
    seconds: float
    model: DeviceModel
    figures: tuple[Figure, ...]
    sweeps: tuple[Sweep, ...]
    points: tuple[Point, ...]

    def panel(self, name: str) -> tuple[Point, ...]:
        """The predictions of one kind of time."""
        return tuple(point for point in self.points if point.panel == name)

    def unfit(self) -> str | None:
        """Why compilations should not use the model, in words: it predicts badly, as on a busy machine. None if not.

        Each kind of call has to be predicted by itself: what is decided follows from how they compare.
        """
        parts = [(title, self.panel(name)) for name, title in PANELS.items()]
        for kind in dict.fromkeys(point.kind for point in self.panel(HOST_CALL)):
            one = tuple(point for point in self.panel(HOST_CALL) if point.kind == kind)
            parts.append((f"{PANELS[HOST_CALL]} ({kind})", one))
        for title, points in parts:
            error = error_of(points)
            if error is not None and error.median > WORST:
                return f"{title} is off by more than a factor of {WORST:g} for half of them"
        return None

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON has it, with the errors that follow from it."""
        errors = {name: error_of(self.panel(name)) for name in PANELS}
        stated = {name: asdict(error) for name, error in errors.items() if error is not None}
        return {"format": FORMAT, **asdict(self), "model": self.model.as_json(), "errors": stated}

    @staticmethod
    def from_json(data: Any) -> Calibration:
        """What ``as_json`` gave. Raises ValueError when it is anything else."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, not {FORMAT}")
            made = Calibration(
                identity=Identity(**{key: str(value) for key, value in data["identity"].items()}),
                date=str(data["date"]),
                seconds=float(data["seconds"]),
                model=DeviceModel.from_json(data["model"]),
                figures=tuple(Figure(**_numbers(row, ("value", "low", "high"))) for row in data["figures"]),
                sweeps=tuple(_sweep(row) for row in data["sweeps"]),
                points=tuple(_point(row) for row in data["points"]),
            )
        except KeyError as error:
            raise ValueError(f"not a calibration: it has no {error}") from error
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a calibration: {type(error).__name__}: {error}") from error
        for figure in made.figures:
            if figure.field and getattr(made.model, figure.field, None) != figure.value:
                raise ValueError(f"not a calibration: {figure.field} of the model is not what was measured")
        return made


def _numbers(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: float(value) if key in names else str(value) for key, value in row.items()}


def _sweep(row: dict[str, Any]) -> Sweep:
    amounts, times = (tuple(float(value) for value in row[key]) for key in ("amounts", "times_us"))
    return Sweep(str(row["name"]), str(row["unit"]), amounts, times)


def _point(row: dict[str, Any]) -> Point:
    point = Point(**_numbers(row, ("predicted_us", "measured_us", "low_us", "high_us")))
    if not (0.0 < point.predicted_us < math.inf and 0.0 < point.measured_us < math.inf):
        raise ValueError(f"not a calibration: the times of {point.name} are not positive")
    return point
