"""Trials of measured selection as people read them, and as JSON has them.

A trial comes as plain data, from the record of a region. What it means is ``pygraph.runtime.selection``'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

__all__ = ["SampleJson", "StoredJson", "TrialJson", "passed_over", "trial_json", "trial_text"]

_RUNS = {
    "patched": "replays with patched addresses",
    "copied": "replays with copied inputs",
    "uncaptured": "runs uncaptured",
}


class SampleJson(TypedDict):
    """The blocks of one candidate that counted: how many, and their median; None where there is none."""

    blocks: int
    median_us: float | None


class StoredJson(TypedDict):
    """Where a decision of an earlier trial was found: the file, its age in seconds when it was read, and how many
    ``trials`` there had been by then."""

    path: str
    age_s: float
    trials: int


class TrialJson(TypedDict):
    """One trial: of which of the region's captures, what was decided and why, and at what cost.

    ``stored`` is None for a trial of this process; what was decided earlier cost nothing here. ``capture`` 0: none was
    made, since it was decided against.

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
    stored: StoredJson | None
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
        stored=_stored(trial.get("stored")),
        blocks=_finite(trial["blocks"]),
        looks=_finite(trial["looks"]),
    )


def _stored(stored: Mapping[str, Any] | None) -> StoredJson | None:
    if stored is None:
        return None
    return StoredJson(path=stored["path"], age_s=stored["age"], trials=stored["trials"])


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
    """A trial in one line: decision, reason, medians per call of the caller's whole loop, lost time and its budget, or
    the file that it was found in."""
    decision = trial["decision"]
    medians = ", ".join(_median(name, sample) for name, sample in trial["samples"].items())
    runs = _RUNS.get(decision, decision)
    said = f"({trial['reason']}: {trial['detail']}); µs per call of the program: {medians}"
    stored = trial.get("stored")
    if stored is not None:
        what = f"capture {trial['capture']} {runs}" if trial["capture"] else f"not captured, {runs}"
        return f"measured: {what}, as an earlier trial decided {_age(stored['age'])} ago {said}; {stored['path']}"
    lost, budget = trial["lost"] * 1e6, trial["budget"] * 1e6
    cost = f"lost {lost:.0f} of {budget:.0f} µs in {trial['calls']} calls"
    return f"measured: capture {trial['capture']} {runs} {said}; {cost}"


def _age(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3 h``, ``5 days``: rounded down."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds // 86400:.0f} days"


def _median(name: str, sample: Mapping[str, Any]) -> str:
    if sample["median"] is None:
        return f"{name} not timed"
    blocks = "1 block" if sample["blocks"] == 1 else f"{sample['blocks']} blocks"
    return f"{name} {sample['median'] * 1e6:.1f} (median of {blocks})"


def passed_over(trials: Sequence[Mapping[str, Any]], captures: int) -> bool:
    """Whether the last trial of each of a region's ``captures`` left it uncaptured, or no capture was made for that."""
    latest = {trial["capture"]: trial["decision"] for trial in trials}
    unmade = latest.pop(0, None)
    return captures == len(latest) and {unmade, *latest.values()} - {None} == {"uncaptured"}
