"""Symbolic cost of a node, and device models that turn it into time. An unknown cost is None, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import sympy

from pygraph.ir.types import Dim, as_dim, symbol

__all__ = ["FREE", "H200", "HOST", "MODELS", "UNKNOWN", "Cost", "DeviceModel", "evaluate", "total"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one run of a node. Each field is an int or a symbolic expression; None is unknown.

    Args:
        flops: floating-point operations; a multiply-add counts as two, as in ``torch.utils.flop_counter``
        read: bytes read from memory
        written: bytes written to memory
        launches: kernels launched, before fusion
    """

    flops: Dim | None = None
    read: Dim | None = None
    written: Dim | None = None
    launches: Dim | None = None


COST_FIELDS = tuple(each.name for each in fields(Cost))
"""Names of the cost fields in ``.pgir`` text."""

FREE = Cost(0, 0, 0, 0)
"""Cost of a view or a size computation: nothing runs on the device."""
UNKNOWN = Cost()


def evaluate(value: Dim | None, values: Mapping[str, int]) -> float | None:
    """``value`` as a number, with symbols from ``values``; None if it is unknown or symbols are left."""
    if isinstance(value, sympy.Expr):
        found: sympy.Expr = value.subs({symbol(name): number for name, number in values.items()})
        return float(found) if found.is_number else None
    return None if value is None else float(value)


def total(costs: Iterable[Cost]) -> Cost:
    """Sum of ``costs``, field by field. An unknown summand makes its field unknown."""
    summands = list(costs)
    columns = ([getattr(cost, one.name) for cost in summands] for one in fields(Cost))
    return Cost(*(None if any(part is None for part in column) else as_dim(sympy.Add(*column)) for column in columns))


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Rates of one device, which turn a cost into µs.

    Args:
        name: name of the device
        bandwidth_gbs: rate of memory traffic, GB/s
        peak_gflops: rate of arithmetic, GFLOP/s (dense, the common training type); of products, if ``peaks`` lacks the
            type
        kernel_us: device time of the smallest kernel, µs
        peaks: rate of matrix products, GFLOP/s, by element type as in ``.pgir`` text; default: none
        source: origin of the figures
    """

    name: str
    bandwidth_gbs: float
    peak_gflops: float
    kernel_us: float
    peaks: Mapping[str, float] = field(default_factory=dict)
    source: str = "built-in"

    @property
    def label(self) -> str:
        """Name and source, for display."""
        return f"{self.name}, {self.source}"

    def time_us(self, cost: Cost, values: Mapping[str, int], dtype: str | None = None) -> float | None:
        """Device time of ``cost`` in µs; None if the cost is unknown or has symbols without a value.

        It is ``launches × kernel_us`` plus the longer of arithmetic, at the rate of ``dtype``, and memory traffic.
        """
        parts = [evaluate(part, values) for part in (cost.flops, cost.read, cost.written, cost.launches)]
        if any(part is None for part in parts):
            return None
        flops, read, written, launches = (part or 0.0 for part in parts)
        return launches * self.kernel_us + max(flops / self.gflops(dtype), (read + written) / self.bandwidth_gbs) / 1e3

    def gflops(self, dtype: str | None) -> float:
        """Rate of products in ``dtype``, GFLOP/s: that in ``peaks``, else ``peak_gflops``."""
        return self.peak_gflops if dtype is None else self.peaks.get(dtype, self.peak_gflops)

    def with_tf32(self) -> DeviceModel:
        """The model of a program that multiplies float32 in TF32; ``self`` if that rate is unknown."""
        return replace(self, peaks={**self.peaks, "f32": self.peaks["tf32"]}) if "tf32" in self.peaks else self

    @staticmethod
    def from_json(data: Any) -> DeviceModel:
        """The model with the fields in ``data``. Raises ValueError for wrong fields or impossible figures."""
        try:
            given = dict(data)
            peaks = {str(dtype): float(gflops) for dtype, gflops in given.pop("peaks").items()}
            name, source = str(given.pop("name")), str(given.pop("source"))
            figures: dict[str, Any] = {key: float(value) for key, value in given.items()}
            rates = figures["bandwidth_gbs"], figures["peak_gflops"], *peaks.values()
            times = [value for key, value in figures.items() if key.endswith("_us")]
            if not all(1e-3 <= rate <= 1e9 for rate in rates) or not all(0.0 <= time <= 1e6 for time in times):
                raise ValueError("a rate is not within 0.001 and 1e9, or a time not within 0 and 1e6 µs")
            return DeviceModel(name, **figures, peaks=peaks, source=source)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"not a device model: {error}") from error


H200 = DeviceModel("h200", 4300.0, 790_000.0, 1.0)
"""Measured on one H200 with CUDA 13.0; bandwidth counts bytes read and written, the rate is dense bf16."""

HOST = DeviceModel("host", 12.0, 60.0, 0.2)
"""A small CPU."""

MODELS = {"cpu": HOST, "cuda": H200}
"""The built-in device models, by kind of the captured device; used without a calibrated model."""
