"""Fixtures shared by all tests: nothing compiled, counted or reported leaks from one test into the next."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

from pygraph.cache import user_dir
from pygraph.passes import manager

_ROOT = Path(__file__).parents[1]

# Workers of Inductor's take seconds to start, in each process, and a test compiles few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Vector instructions are those of the processor's flags: each process would compile and start another one to try them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# A thread of OpenMP spins while it waits for one that has no core: with a worker of pytest's on each core, that is most
# of the time of small operators. Tests of kernels on several threads ask Inductor for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes to draw and to run is the machine's affair, and other work's beside it.
_SLOW = hypothesis.HealthCheck.too_slow
hypothesis.settings.register_profile("any-machine", deadline=None, suppress_health_check=[_SLOW])
hypothesis.settings.load_profile("any-machine")

_numbers = itertools.count()

_LIBRARIES = Path(os.environ.get("PYGRAPH_CACHE_DIR") or user_dir()).expanduser() / "native"


_LONG = ("training", "distributed")
_SHORT = ("ir", "passes", "program", "frontend", "filecheck", "report", "calibration")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that compile most come first, and those that compile nothing last: with two workers, none is left with a
    long one at the end."""
    # pytest listens to loggers that do not propagate: torch would write out all that it compiles, for nobody.
    logging.getLogger("torch.__trace").propagate = True
    items.sort(key=lambda item: (item.path.parent.name in _SHORT) - (item.path.parent.name in _LONG))


@pytest.fixture(scope="session")
def _caches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    _LIBRARIES.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (
        "torch" in sys.modules
    ):  # until it is built, which the processes that tests start do not wait for, all is uncaptured
        from pygraph.errors import CaptureError
        from pygraph.runtime.host import build
        from tests.runtime.cuda.simulated import simulated

        # All workers wait for the host driver's, which the first one builds: the second builds another one meanwhile.
        uses = any(item.path.name == "test_native_half.py" for item in request.session.items)
        if uses and os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and sys.modules["torch"].version.cuda is None:
            with contextlib.suppress(CaptureError):
                simulated().build()
        with contextlib.suppress(CaptureError):  # each test says so
            build.load()
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a job in a shell's background ignores it, and endless loops would go on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, _caches: Path) -> None:
    """Each test has a cache of its own: no decision or calibration reaches the next test, or the user's cache. Native
    libraries are shared, since they are slow to build."""
    folder = _caches / str(next(_numbers))
    folder.mkdir()
    (folder / "native").symlink_to(_LIBRARIES)
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(folder))


@pytest.fixture(autouse=True)
def _reproducers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of passes that fail in a test that fails, beside hypothesis's examples; those of other tests go."""
    name = re.sub(r"\W+", "-", request.node.nodeid)[:120]
    folder, failed = _ROOT / ".hypothesis" / "reproducers" / name, request.session.testsfailed
    monkeypatch.setattr(manager, "temporary_folder", lambda process: folder)
    shutil.rmtree(folder, ignore_errors=True)
    yield
    if request.session.testsfailed == failed:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures and orders depend on no clock: only tests of that have one."""
    monkeypatch.setenv("PYGRAPH_LEDGER", "0")
    monkeypatch.setenv("PYGRAPH_ORDER", "program")


def _no_latency(*_: object) -> float:
    """Dynamo times the guards of each compilation behind a flush of the processor's caches, which takes 20 ms."""
    return 0.0


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """AOTAutograd's cache would restore what another test compiled, and skip what this one is about."""
    if "torch" not in sys.modules:
        yield
        return
    from torch._dynamo import guards
    from torch._functorch import config

    with (
        config.patch(enable_autograd_cache=False),
        mock.patch.object(guards, "profile_guard_manager", _no_latency),
    ):
        yield


@pytest.fixture(autouse=True)
def _uncaptured_before() -> None:
    """Captures that one test has left make no room in another, where memory is said to be short."""
    live = sys.modules.get("pygraph.runtime.live")
    if live is not None:
        live.release()


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
