"""Trials of measured selection as people read them, and as JSON has them.

A trial comes as plain data, from the record of a region. What it means is ``pygraph.runtime.selection``'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

__all__ = ["SampleJson", "TrialJson", "passed_over", "trial_json", "trial_text"]

_RUNS = {"patched": "replays with patched addresses", "uncaptured": "runs uncaptured"}


class SampleJson(TypedDict):
    """The blocks of one candidate that counted: how many, and their median; None where there is none."""

    blocks: int
    median_us: float | None


class TrialJson(TypedDict):
    """One trial: of which of the region's captures, what was decided and why, and at what cost.

    ``blocks`` and ``looks`` are as in ``pygraph.runtime.selection.records``, times in seconds; what is not bounded is
    None.
    """

    capture: int
    candidates: list[str]
    decision: str
    reason: str
    detail: str
    calls: int
    lost_us: float
    budget_us: float
    per_call_us: dict[str, float]
    samples: dict[str, SampleJson]
    dropped: list[str]
    seed: int
    blocks: list[dict[str, Any]]
    looks: list[dict[str, Any]]


def trial_json(trial: Mapping[str, Any]) -> TrialJson:
    """A trial with its sums in µs."""
    return TrialJson(
        capture=trial["capture"],
        candidates=list(trial["candidates"]),
        decision=trial["decision"],
        reason=trial["reason"],
        detail=trial["detail"],
        calls=trial["calls"],
        lost_us=trial["lost"] * 1e6,
        budget_us=trial["budget"] * 1e6,
        per_call_us={name: seconds * 1e6 for name, seconds in trial["per_call"].items()},
        samples={name: _sample(sample) for name, sample in trial["samples"].items()},
        dropped=list(trial["dropped"]),
        seed=trial["seed"],
        blocks=_finite(trial["blocks"]),
        looks=_finite(trial["looks"]),
    )


def _sample(sample: Mapping[str, Any]) -> SampleJson:
    seconds = sample["median"]
    return SampleJson(blocks=sample["blocks"], median_us=None if seconds is None else seconds * 1e6)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def trial_text(trial: Mapping[str, Any]) -> str:
    """A trial in one line: decision, reason, medians per call of the caller's whole loop, lost time and its budget."""
    decision = trial["decision"]
    medians = ", ".join(_median(name, sample) for name, sample in trial["samples"].items())
    lost, budget = trial["lost"] * 1e6, trial["budget"] * 1e6
    return (
        f"measured: capture {trial['capture']} {_RUNS.get(decision, decision)} ({trial['reason']}: {trial['detail']}); "
        f"µs per call of the program: {medians}; lost {lost:.0f} of {budget:.0f} µs in {trial['calls']} calls"
    )


def _median(name: str, sample: Mapping[str, Any]) -> str:
    if sample["median"] is None:
        return f"{name} not timed"
    blocks = "1 block" if sample["blocks"] == 1 else f"{sample['blocks']} blocks"
    return f"{name} {sample['median'] * 1e6:.1f} (median of {blocks})"


def passed_over(trials: Sequence[Mapping[str, Any]], captures: int) -> bool:
    """Whether the last trial of each of a region's ``captures`` left it uncaptured."""
    latest = {trial["capture"]: trial["decision"] for trial in trials}
    return 0 < captures == len(latest) and set(latest.values()) == {"uncaptured"}
