"""The JSON report keeps to its schema and survives a round trip."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing

import pytest

from pygraph.ir import parse
from pygraph.report.as_json import SCHEMA_VERSION, ReportJson, json_text, to_json
from tests.report.samples import DECISION, cut_graph, failed_report, full_report


def problems(value: object, wanted: object, at: str = "$") -> list[str]:
    """Where ``value`` differs from the type ``wanted``: typed dictionaries, lists, unions and plain types."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        found = [problems(value, choice, at) for choice in args]
        return min(found, key=len)
    if origin is list:
        if not isinstance(value, list):
            return [f"{at}: no list"]
        return [p for i, item in enumerate(value) for p in problems(item, args[0], f"{at}[{i}]")]
    if origin is dict:
        assert isinstance(value, dict)
        return [p for key, item in value.items() for p in problems(item, args[1], f"{at}.{key}")]
    if typing.is_typeddict(wanted):
        return keys_of(value, typing.cast("type", wanted), at)
    fits = (wanted is type(None) and value is None) or (isinstance(wanted, type) and type(value) is wanted)
    return [] if fits else [f"{at}: {value!r} is no {wanted}"]


def keys_of(value: object, wanted: type, at: str) -> list[str]:
    hints = typing.get_type_hints(wanted)
    if not isinstance(value, dict) or list(value) != list(hints):
        return [f"{at}: keys are {value!r}, not {list(hints)}"]
    return [p for key, hint in hints.items() for p in problems(value[key], hint, f"{at}.{key}")]


@pytest.mark.parametrize("known", [True, False])
def test_it_keeps_to_its_schema_also_as_text(known: bool) -> None:
    document = to_json([full_report(known=known), failed_report()])
    assert problems(document, ReportJson) == []
    assert json.loads(json_text([full_report(known=known), failed_report()])) == document
    assert document["schema"] == SCHEMA_VERSION == 4


def test_the_checker_itself_finds_mistakes() -> None:
    document = to_json([full_report()])
    document["graphs"][0]["operators"] = "six"
    document["graphs"][0]["cost"][0]["flops"]["known"] = None
    assert len(problems(document, ReportJson)) == 2
    del document["summary"]["launches"]
    assert len(problems(document, ReportJson)) == 3


def test_it_says_what_the_report_says() -> None:
    graph, failed = to_json([full_report(), failed_report()])["graphs"]
    assert graph["coverage"] == {
        "launches": 4,
        "selected_launches": 3,
        "replayed_launches": 2,
        "outside": ["item"],
        "share": 0.75,
    }
    assert [(region["state"], region["selected"]) for region in graph["regions"]] == [
        ("replay", True),
        ("uncaptured", True),
    ]
    assert graph["regions"][0]["record"]["workspace_bytes"] == 4096
    assert graph["regions"][0]["record"]["python_runs"] == {"lib.op.default": 2}
    assert [row["node"] for row in graph["uncaptured"]] == ["item"]
    assert graph["cost"][0]["flops"] == {"value": 1088.0, "known": 1088.0, "unknown": 0}
    assert failed["error"] == "LiftError: <unknown> operand & more"
    assert failed["coverage"] is None
    assert failed["pgir"] is None


def test_the_graph_comes_along_and_parses() -> None:
    (graph,) = to_json([full_report()])["graphs"]
    assert parse(graph["pgir"]) == cut_graph()


def test_unknown_is_null() -> None:
    found = json.loads(json_text([full_report(known=False)]))
    assert found["graphs"][0]["cost"][0]["flops"] == {"value": None, "known": 1024.0, "unknown": 1}


def test_decisions_of_measured_selection_are_told() -> None:
    report = full_report()
    record = report.regions[0].record
    assert record is not None
    record.decisions = [DECISION]
    (plain,) = json.loads(json_text([report]))["graphs"][0]["regions"][0]["record"]["decisions"]
    assert plain == dataclasses.asdict(DECISION)


def test_the_same_report_gives_the_same_text_without_addresses() -> None:
    assert json_text([full_report()]) == json_text([full_report()])
    assert not re.search(r"0x[0-9a-f]{6,}", json_text([full_report()]))
