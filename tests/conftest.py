"""Fixtures shared by all tests: nothing compiled, counted or reported leaks from one test into the next."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, _caches: Path) -> None:
    """What one test decided or calibrated is none of the next one's, nor of the user's."""
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(_caches / str(next(_numbers))))


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured selection leaves some calls uncaptured: only tests of it have any."""
    monkeypatch.setenv("PYGRAPH_MEASURE", "0")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """AOTAutograd's cache would restore what another test compiled, and skip what this one is about."""
    if "torch" not in sys.modules:
        yield
        return
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Compile from scratch: Dynamo, reports and counters are empty before and after."""
    import torch

    import pygraph

    torch._dynamo.reset()
    pygraph.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    pygraph.reset()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that are compiled again, in order."""
    from pygraph import recompile

    seen: list[str] = []
    attempt = recompile.Recompilation._attempt

    def noted(self: Any, *args: Any) -> Any:
        seen.append(self._report.name)
        return attempt(self, *args)

    monkeypatch.setattr(recompile.Recompilation, "_attempt", noted)
    return seen
