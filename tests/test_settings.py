"""Options of the backend: names, types, environment variables, precedence."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from pygraph.errors import OptionError
from pygraph.settings import Settings


def test_an_option_wins_over_its_variable() -> None:
    environ = {"PYGRAPH_STRICT": "1", "PYGRAPH_CAPTURE_AFTER": "5", "PYGRAPH_DUMP_DIR": "out"}
    environ["PYGRAPH_ORDER_MEMORY"] = "0.25"
    assert Settings.make({}, environ).order_memory == 0.25
    assert Settings.make({"order_memory": 0}, environ).order_memory == 0.0
    settings = Settings.make({"capture-after": 3}, environ)
    assert settings.strict is True
    assert settings.capture_after == 3
    assert settings.dump_dir == "out"


@pytest.mark.parametrize("text", ["", "0", "false", "No"])
def test_a_false_variable(text: str) -> None:
    assert Settings.make({}, {"PYGRAPH_DISABLE": text}).disable is False


def test_captures_must_pay_unless_that_is_turned_off() -> None:
    assert Settings.make({}, {}).ledger is True
    assert Settings.make({}, {"PYGRAPH_LEDGER": "0"}).ledger is False
    assert Settings.make({"ledger": False}, {"PYGRAPH_LEDGER": "1"}).ledger is False
    with pytest.raises(OptionError, match="PYGRAPH_LEDGER"):
        Settings.make({}, {"PYGRAPH_LEDGER": "often"})


def test_decisions_are_kept_in_the_users_cache_unless_said_otherwise(tmp_path: Path) -> None:
    assert Settings.make({}, {}).cache_dir == platformdirs.user_cache_dir("pygraph")
    assert Settings.make({}, {"PYGRAPH_CACHE_DIR": "here"}).cache_dir == "here"
    assert Settings.make({"cache_dir": tmp_path}, {"PYGRAPH_CACHE_DIR": "here"}).cache_dir == str(tmp_path)


def test_a_limit_of_memory_is_a_number_of_bytes_or_the_drivers() -> None:
    assert Settings.make({}, {}).memory_limit is None
    assert Settings.make({}, {"PYGRAPH_MEMORY_LIMIT": "2000000000"}).memory_limit == 2_000_000_000
    assert Settings.make({"memory_limit": "1.5 MiB"}, {"PYGRAPH_MEMORY_LIMIT": "2GiB"}).memory_limit == 3 << 19
    assert Settings.make({}, {"PYGRAPH_MEMORY_LIMIT": "2GiB"}).memory_limit == 2 << 30
    assert Settings.make({"memory_limit": None}, {"PYGRAPH_MEMORY_LIMIT": "5"}).memory_limit is None


def test_an_empty_cache_directory_keeps_nothing() -> None:
    assert Settings.make({}, {"PYGRAPH_CACHE_DIR": ""}).cache_dir is None
    for nothing in ("", None):
        assert Settings.make({"cache_dir": nothing}, {"PYGRAPH_CACHE_DIR": "here"}).cache_dir is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 1),
        ("disable", "yes"),
        ("verify", "sometimes"),
        ("capture_after", 1),
        ("capture_after", True),
        ("memory_limit", 0),
        ("memory_limit", True),
        ("memory_limit", 0.1),
        ("memory_limit", "2GB"),
        ("memory_limit", "lots"),
        ("order_memory", -0.1),
        ("order_memory", True),
        ("order_memory", float("inf")),
        ("order_memory", float("nan")),
        ("order_memory", 10**400),
        ("ledger", 1),
        ("ledger", "on"),
        ("cache_dir", 3),
        ("passes", 3),
        ("dump_dir", 4),
        ("inductor", "max_autotune"),
    ],
)
def test_a_value_of_the_wrong_kind_is_rejected(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        Settings.make({name: value}, {})


@pytest.mark.parametrize(
    ("name", "text"), [("PYGRAPH_STRICT", "maybe"), ("PYGRAPH_CAPTURE_AFTER", "two"), ("PYGRAPH_ORDER_MEMORY", "much")]
)
def test_a_malformed_variable_names_itself(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=name):
        Settings.make({}, {name: text})


def test_a_variable_that_nobody_reads_is_a_warning_with_the_nearest_one(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PYGRAPH_STRCT": "1", "PYGRAPH_LOGS": "info", "PYGRAPH_LEDGER": "0", "PATH": "/bin"}
    environ["PYGRAPH_CACHE_SIZE"] = "64"
    for _ in range(2):
        Settings.make({}, environ)
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable PYGRAPH_STRCT is ignored; did you mean 'PYGRAPH_STRICT'?"
    ]
