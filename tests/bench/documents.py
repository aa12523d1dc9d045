"""A document of results that does not change, for everything that is drawn or printed of one."""

from __future__ import annotations

from typing import Any

__all__ = ["document"]

_WALL = {"eager": 4.0, "default": 2.0, "reduce-overhead": 1.25, "pygraph": 1.0, "pygraph-uncaptured": 1.9}


def _side(name: str, wall: float) -> dict[str, Any]:
    median = {"median": 100.0 * wall, "quartiles": [99.0 * wall, 101.0 * wall], "count": 9}
    memory = {"peak_bytes": 2**27, "reserved_bytes": int(2**28 * wall), "device_bytes": 2**29}
    more = {"coverage": {"share": 0.75}, "regions": [_region()]} if name == "pygraph" else {}
    return {"status": "ok", "error": "", "difference": 1e-4, "wall_us": median, "host_us": median, **memory, **more}


def _region() -> dict[str, Any]:
    decision = {"choice": "replay", "replay_us": 50.0, "uncaptured_us": 65.0, "calls": 36}
    return {"name": "graph0.region0", "state": "replay", "why": "", "decisions": [decision, decision]}


def _ratio(value: float) -> dict[str, Any]:
    return {"ratio": value, "interval": [value * 0.9, value * 1.1], "confidence": 0.96, "rounds": 9}


def _workload(domain: str, wall: dict[str, float]) -> dict[str, Any]:
    return {
        "about": "",
        "kind": "inference",
        "domain": domain,
        "tolerance": 0.01,
        "why_tolerance": "",
        "results_compared": "while timed",
        "sides": {name: _side(name, value) for name, value in wall.items()},
        "ratios": {name: {"wall_us": _ratio(v), "host_us": _ratio(v)} for name, v in wall.items() if name != "pygraph"},
        "groups": [],
        "notes": [],
    }


def document() -> dict[str, Any]:
    """Gains, a loss over each baseline, wrong results on either side, a side that fails, and what was left out."""
    workloads = {
        "gains-1": _workload("language", _WALL),
        "loses-1": _workload("language", {**_WALL, "reduce-overhead": 0.9}),
        "level-1": _workload("vision", {**_WALL, "default": 0.99}),
        "wrong-1": _workload("vision", _WALL),
        "wrong-baseline-1": _workload("vision", _WALL),
        "fails-1": _workload("vision", _WALL),
    }
    wrong = {"status": "wrong", "error": "results differ from eager's by 0.5 of their largest magnitude"}
    workloads["wrong-1"]["sides"]["pygraph"] = dict(wrong)
    workloads["wrong-1"]["ratios"] = {}
    workloads["wrong-baseline-1"]["sides"]["reduce-overhead"] = dict(wrong)
    del workloads["wrong-baseline-1"]["ratios"]["reduce-overhead"]
    workloads["fails-1"]["sides"]["default"] = {"status": "failed", "error": "Traceback\nRuntimeError: a | b"}
    del workloads["fails-1"]["ratios"]["default"]
    workloads["fails-1"]["notes"] = ["there was time for 5 of 9 rounds"]
    return {
        "schema": 1,
        "pygraph": "0.1.0",
        "machine": {"gpu": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "cuda": "13.0", "date": "2026-11-21"},
        "settings": {"blocks": 9, "tiny": False},
        "sides": {},
        "ablations": {"pygraph-uncaptured": "capture", "pygraph-no-placement": "placement"},
        "workloads": workloads,
        "left_out": {"late-1": "the time was up before its turn"},
        "skipped": {"absent-1": "not installed: timm"},
    }
