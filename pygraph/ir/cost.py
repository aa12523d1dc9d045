"""Symbolic cost of a node, and device models that turn it into time. Unknown is None and never 0.

Formulas per operator live in ``pygraph.frontend``; this file only adds, substitutes and evaluates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import sympy

from pygraph.ir.types import Dim, as_dim, symbol

__all__ = ["FREE", "H200", "HOST", "UNKNOWN", "Cost", "DeviceModel", "evaluate", "total"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What running a node takes. Each field is a dimension, or None where nobody knows.

    flops     floating-point operations (a multiply-add counts two, as torch.utils.flop_counter does)
    read      bytes read from memory
    written   bytes written to memory
    launches  kernels launched, before any fusion
    host_us   host time beyond the launches, µs
    """

    flops: Dim | None = None
    read: Dim | None = None
    written: Dim | None = None
    launches: Dim | None = None
    host_us: Dim | None = None

    def __add__(self, other: Cost) -> Cost:
        return total((self, other))

    def substitute(self, values: Mapping[str, int]) -> Cost:
        """The cost with the named symbols replaced by their ``values``."""
        return Cost(*(_substitute(getattr(self, f.name), values) for f in fields(self)))


FREE = Cost(0, 0, 0, 0, 0)
"""A view, a size computation: nothing runs on the device."""
UNKNOWN = Cost()


def _substitute(value: Dim | None, values: Mapping[str, int]) -> Dim | None:
    if not isinstance(value, sympy.Expr):
        return value
    return as_dim(value.subs({symbol(name): number for name, number in values.items()}))


def evaluate(value: Dim | None, values: Mapping[str, int]) -> float | None:
    """``value`` as a number once symbols are substituted; None when it is unknown or symbols are left."""
    substituted = _substitute(value, values)
    if substituted is None:
        return None
    if isinstance(substituted, int):
        return float(substituted)
    return float(substituted) if substituted.is_number else None


def total(costs: Iterable[Cost]) -> Cost:
    """Sum field by field. One unknown summand makes that field unknown."""
    columns = list(zip(*((c.flops, c.read, c.written, c.launches, c.host_us) for c in costs), strict=True))
    if not columns:
        return FREE
    return Cost(*(_sum_column(column) for column in columns))


def _sum_column(column: tuple[Dim | None, ...]) -> Dim | None:
    if any(value is None for value in column):
        return None
    number = sum(value for value in column if isinstance(value, int))
    symbolic = [value for value in column if isinstance(value, sympy.Expr)]
    return as_dim(sympy.Add(number, *symbolic)) if symbolic else number


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Rates and overheads of one device, to turn a cost into µs.

    bandwidth_gbs   memory traffic, GB/s
    peak_gflops     arithmetic, GFLOP/s (dense, the common training type)
    launch_us       host time to launch one kernel without a graph
    replay_us       host time to launch a captured region
    node_us         further host time per captured launch
    patch_us        host time to patch one launch's addresses
    kernel_us       device time that a kernel takes however small
    copy_us         time of a small device-to-device copy; larger ones cost bandwidth
    """

    name: str
    bandwidth_gbs: float
    peak_gflops: float
    launch_us: float
    replay_us: float
    node_us: float
    patch_us: float
    kernel_us: float
    copy_us: float

    def time_us(self, cost: Cost, values: Mapping[str, int]) -> float | None:
        """Device time of ``cost`` in µs by the roofline rule, or None where the cost is unknown."""
        parts = [evaluate(part, values) for part in (cost.flops, cost.read, cost.written, cost.launches)]
        if any(part is None for part in parts):
            return None
        flops, read, written, launches = (part or 0.0 for part in parts)
        work = max(flops / (self.peak_gflops * 1e3), (read + written) / (self.bandwidth_gbs * 1e3))
        return max(work, launches * self.kernel_us)

    def copy_time_us(self, nbytes: float) -> float:
        """Time in µs to copy ``nbytes`` within the device (each byte is read and written)."""
        return max(self.copy_us, 2 * nbytes / (self.bandwidth_gbs * 1e3))


H200 = DeviceModel("h200", 4300.0, 790_000.0, 2.7, 0.9, 0.0011, 0.24, 1.0, 2.9)
"""Measured on one H200 with CUDA 13.0; bandwidth counts bytes read and written, the rate is dense bf16."""

HOST = DeviceModel("host", 12.0, 60.0, 1.6, 2.5, 0.25, 0.01, 0.2, 0.3)
"""A small CPU: overheads are those of Inductor's Python wrapper and of the host driver's replay."""
