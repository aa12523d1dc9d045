"""PYGRAPH_LOGS: level and handler of the package's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pygraph.errors import OptionError
from pygraph.logs import configure


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("pygraph")
    state = found.level, list(found.handlers), found.propagate
    yield found
    found.level, found.handlers, found.propagate = state


def test_without_the_variable_nothing_changes(logger: logging.Logger) -> None:
    before = logger.level, list(logger.handlers)
    configure({})
    assert (logger.level, logger.handlers) == before


def test_a_level_is_set_with_one_handler(logger: logging.Logger) -> None:
    configure({"PYGRAPH_LOGS": "INFO"})
    configure({"PYGRAPH_LOGS": "debug"})
    assert logger.level == logging.DEBUG
    assert [handler.get_name() for handler in logger.handlers].count("pygraph-stderr") == 1


def test_another_level_is_refused() -> None:
    with pytest.raises(OptionError, match="PYGRAPH_LOGS must be one of debug, info, warning, error, not 'all'"):
        configure({"PYGRAPH_LOGS": "all"})
