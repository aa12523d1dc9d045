"""Samples of time that bear noise: blocks of calls, the fastest of a few, in rounds over everything that is measured.

Which clock is read is the target's business (``targets``); what is made of the samples that of ``fitting``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Effort", "Sampler", "Samples", "calls_in", "sampled", "seconds_of"]

Sampler = Callable[[], float]
"""One measurement, µs per call."""
Samples: TypeAlias = Sequence[tuple[float, ...]]
"""For each sampler, its samples: one for each round."""

_MOST_CALLS = 2000


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: ``rounds`` of all samples, each the fastest of ``blocks`` blocks of ``block_s`` seconds.

    ``largest`` bounds the bytes of one tensor. Products of matrices grow until one takes ``slowest_us``.
    """

    rounds: int = 9
    blocks: int = 3
    block_s: float = 0.001
    largest: int = 1 << 28
    slowest_us: float = 2000.0


def seconds_of(call: Callable[[], Any], calls: int) -> float:
    """What ``calls`` calls take, by the host's clock."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def calls_in(seconds: float, one: float, most: int = _MOST_CALLS) -> int:
    """How many calls of ``one`` second each fill ``seconds``: at least one, and no more than ``most``."""
    return max(1, min(most, round(seconds / max(one, 1e-7))))


def sampled(samplers: Sequence[Sampler], effort: Effort, step: Callable[[str], None] = lambda _: None) -> Samples:
    """The samples of each sampler. A round goes over all samplers, so that what drifts meets all alike.

    A sample is the fastest of its blocks, since whatever else runs can only add to it. ``step`` is told of each round.
    """
    rounds: list[list[float]] = []
    for index in range(effort.rounds):
        step(f"round {index + 1} of {effort.rounds}")
        rounds.append([min(sampler() for _ in range(effort.blocks)) for sampler in samplers])
    return list(zip(*rounds, strict=True))
