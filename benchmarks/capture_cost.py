"""Host time of the call that captures another size, relative to uncaptured calls of that size, and of its parts.

    size 128   4 uncaptured calls   one captures, twice, and compares   2 replays     the first: apart
    size 2     4 uncaptured calls   one captures                        2 replays     host: that call in uncaptured ones

``benchmarks/new_sizes.py`` prints the medians. PyGraph compiles all models, which are measured in one process. Each
size is called seven times; the first call does not count, and the last two may capture another order instead. Results
of a size are compared. A capture of proven kernels, ``proven``, is used without comparison; others are ``compared``.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn

import pygraph
from benchmarks import llama
from benchmarks.suite import language, vision
from benchmarks.suite.inference import floating, made, normalised
from pygraph.backend import driver_for
from pygraph.backend import pygraph as backend
from pygraph.runtime import life

__all__ = ["PROGRAMS", "Meter", "Program", "assert_close", "cost_of", "drain"]

OPTIONS = {
    "capture_after": 5,
    "ledger": False,
    "passes": "legality,placement,partitioning,indirection",  # captures all that it can, even if that saves little
    "cache_dir": None,
}
CALLS_OF_A_SIZE = 7
TOLERANCE = 1e-2
"""Tolerance, relative to the largest magnitude: half-precision sums may be in another order."""

Arguments: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A model and its arguments for each size, in normal and in tiny form.

    Args:
        model: makes the model; its argument is true for the tiny form
        arguments: makes the arguments of a size, on the default device
        sizes: batch sizes or lengths
        tiny: sizes of the tiny form
    """

    model: Callable[[bool], nn.Module]
    arguments: Callable[[int, torch.dtype, bool], Arguments]
    sizes: Sequence[int]
    tiny: Sequence[int]


class Logits(nn.Module):
    """A model of ``transformers`` that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return logits


def _of_tokens(family: language.Family) -> Callable[[bool], nn.Module]:
    def make(tiny: bool) -> nn.Module:
        words = language.TINY_WORDS if tiny else language.WORDS
        return Logits(family.model(**(family.tiny if tiny else family.base), vocab_size=words))

    return make


def _tokens(length: int, dtype: torch.dtype, tiny: bool) -> Arguments:
    return (torch.randint(0, language.TINY_WORDS if tiny else language.WORDS, (1, length)),)


def _decoder(tiny: bool) -> nn.Module:
    return llama.Llama(**(llama.TINY if tiny else llama.BILLION), batch=128)


def _decoded(batch: int, dtype: torch.dtype, tiny: bool) -> Arguments:
    return torch.randint(0, llama.TINY["words"], (batch,)), torch.tensor([7])


def _resnet(tiny: bool) -> nn.Module:
    make = vision.tiny_resnet if tiny else vision.resnet50
    return normalised(make, lambda dtype: torch.randn(4, 3, 64, 64, dtype=dtype))()


def _images(batch: int, dtype: torch.dtype, tiny: bool) -> Arguments:
    side = 32 if tiny else 224
    return (torch.randn(batch, 3, side, side, dtype=dtype),)


LENGTHS, TINY_LENGTHS = tuple(range(64, 256, 16)), (8, 10, 12, 14)
PROGRAMS: dict[str, Program] = {
    "bert": Program(_of_tokens(language.BERT), _tokens, LENGTHS, TINY_LENGTHS),
    "gpt2": Program(_of_tokens(language.GPT2), _tokens, LENGTHS, TINY_LENGTHS),
    "llama-decode": Program(_decoder, _decoded, (128, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112), (8, 2, 4, 6)),
    "resnet50": Program(_resnet, _images, (16, 2, 3, 4, 6, 8, 10, 12, 20, 24), (2, 3, 4, 5)),
}


@dataclass
class Meter:
    """Seconds spent in the parts of a capture, and their calls, since the last ``empty``."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def empty(self) -> None:
        """Reset all counts."""
        self.seconds.clear()
        self.calls.clear()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
                self.calls[part] = self.calls.get(part, 0) + 1

        return run


@contextlib.contextmanager
def metered(meter: Meter, device: str) -> Iterator[None]:
    """Have ``meter`` time captures, instantiations and comparisons (which include the uncaptured run of the call)."""
    driver = driver_for(device)
    if driver is None:
        raise RuntimeError(f"no driver captures on {device}")
    with (
        mock.patch.object(driver, "capture", meter.timed("capture", driver.capture)),
        mock.patch.object(driver, "instantiate", meter.timed("instantiate", driver.instantiate)),
        mock.patch.object(life, "compare", meter.timed("comparison", life.compare)),
    ):
        yield


def cost_of(program: Program, device: str, *, tiny: bool = False) -> dict[str, Any]:
    """Host times of the calls that capture a size, relative to uncaptured calls of that size: ``host`` is the median
    over all sizes except the first, and each size has a figure. Parts of these calls in µs."""
    torch._dynamo.reset()
    pygraph.reset()
    model = made(lambda: program.model(tiny), device)
    compiled = torch.compile(model, backend=backend, options=OPTIONS, dynamic=True)
    sizes = program.tiny if tiny else program.sizes
    meter = Meter()
    with torch.no_grad():
        given = {size: _placed(program, size, device, tiny) for size in sizes}
        for size in sizes[:2]:
            compiled(*given[size])
        programs = len(pygraph.reports())
        with metered(meter, device):
            rows = [_row(size, lambda size=size: compiled(*given[size]), meter, device) for size in sizes]
    later = [row for row in rows[1:] if "host" in row]
    found: dict[str, Any] = {"host": statistics.median(row["host"] for row in later) if later else None}
    for kind in ("proven", "compared"):
        of_kind = [row["host"] for row in later if row["kind"] == kind]
        found[kind] = len(of_kind)
        found[f"host {kind}"] = statistics.median(of_kind) if of_kind else None
    found |= {"uncaptured": len(rows) - 1 - len(later), "first": rows[0].get("host"), "programs": programs}
    return found | {"compiled later": len(pygraph.reports()) - programs, "sizes": rows}


def _placed(program: Program, size: int, device: str, tiny: bool) -> Arguments:
    torch.manual_seed(size)
    with torch.device(device):
        return program.arguments(size, floating(device), tiny)


def _row(size: int, call: Callable[[], Any], meter: Meter, device: str) -> dict[str, Any]:
    """Times of the calls of one size, µs: uncaptured calls, the first capture, later captures, and replays."""
    times: dict[str, list[float]] = {}
    found: dict[str, Any] = {"size": size}
    results = []
    for _ in range(CALLS_OF_A_SIZE):
        meter.empty()
        before = _counts()
        drain(device)
        start = time.perf_counter()
        result = call()
        time_us = (time.perf_counter() - start) * 1e6
        drain(device)
        kind = _kind(before, _counts(), meter)
        if kind in ("proven", "compared") and "kind" not in found:
            found |= {"kind": kind, "captured_us": time_us}
            found |= {f"{part}_us": seconds * 1e6 for part, seconds in meter.seconds.items()}
        else:
            times.setdefault("captured again" if kind in ("proven", "compared") else kind, []).append(time_us)
        results.append(result)
    for result in results[1:]:
        assert_close(result, results[0], TOLERANCE)
    for kind, all_of_kind in times.items():
        later = all_of_kind[1:] if kind == "uncaptured" and len(all_of_kind) > 1 else all_of_kind
        found[f"{kind}_us"] = statistics.median(later)
    if "kind" in found:
        found["host"] = found["captured_us"] / found["uncaptured_us"]
    return found


def drain(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def assert_close(result: Any, expected: Any, tolerance: float) -> None:
    """Raise AssertionError if a result differs by more than ``tolerance`` times the largest expected magnitude."""
    if isinstance(expected, torch.Tensor):
        off = (result.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12)
        assert off <= tolerance, f"a result is off by {off:.2e} of its largest magnitude"
        return
    for one, other in zip(result, expected, strict=True):
        assert_close(one, other, tolerance)


def _counts() -> tuple[int, int, int]:
    """Number of captures and replays of all regions so far, and of captures without comparison."""
    records = [region.record for report in pygraph.reports() for region in report.regions]
    known = [record for record in records if record is not None]
    return (
        sum(record.captures for record in known),
        sum(record.replays for record in known),
        sum(record.proven for record in known),
    )


def _kind(before: tuple[int, int, int], after: tuple[int, int, int], meter: Meter) -> str:
    captures, replays, proven = (now - then for now, then in zip(after, before, strict=True))
    if captures:
        return "proven" if proven >= captures else "compared"
    if meter.calls.get("capture", 0):
        return "refused"
    return "replayed" if replays else "uncaptured"
