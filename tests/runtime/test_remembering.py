"""Keys of decisions: equal in all processes for the same region, call and machine, and for nothing else."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.runtime import identity, remembering
from pygraph.runtime.host import HostDriver
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.remembering import LeftOut, Memory, call_digest, content_digest, memory_of
from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.records import Decided
from pygraph.runtime.selection.store import Store
from tests.runtime.fake import FakeDriver, double

CANDIDATES = ("patched", "uncaptured")

MODULE = """# AOT ID: ['{count}_inference']
import torch
compile = lambda *args: None
# kernel path: {folder}/ab/cab.py
triton_poi_fused_add_0 = compile('triton_poi_fused_add_0', '''
#pragma unroll
def triton_poi_fused_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), {value}, xmask)
''')

def partition_0(args):
    # Topologically Sorted Source Nodes: [add]
    triton_poi_fused_add_0.run(args[0], {grid})

def partition_1(args):
    triton_poi_fused_add_0.run(args[0], {grid})
"""


def module(folder: Path, count: int = 0, value: str = "tmp0 + 1.0", grid: str = "4096") -> types.ModuleType:
    """What Inductor might have emitted, imported from ``folder``. What it calls is not run."""
    folder.mkdir(exist_ok=True)
    path = folder / "emitted.py"
    path.write_text(MODULE.format(count=count, folder=folder, value=value, grid=grid))
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# -- the region's content ----------------------------------------------------------------------------------------------


def test_the_same_program_has_one_digest_wherever_and_whenever_it_was_emitted(tmp_path: Path) -> None:
    one, two = module(tmp_path / "a", count=0), module(tmp_path / "b", count=3)
    assert content_digest(one.partition_0) == content_digest(two.partition_0)
    assert content_digest(one.partition_0) is not None


@pytest.mark.parametrize("change", [{"value": "tmp0 * 2.0"}, {"grid": "8192"}], ids=["kernel", "grid"])
def test_kernels_of_the_same_names_that_do_other_things_differ(tmp_path: Path, change: dict[str, str]) -> None:
    one, two = module(tmp_path / "a"), module(tmp_path / "b", **change)
    assert content_digest(one.partition_0) != content_digest(two.partition_0)


def test_lines_of_kernels_are_no_comments_whatever_they_begin_with(tmp_path: Path) -> None:
    one = module(tmp_path / "a")
    path = Path(module(tmp_path / "b").__file__ or "")
    path.write_text(path.read_text().replace("#pragma unroll", "#pragma once"))
    assert remembering._source_digest(str(path)) != remembering._source_digest(str(one.__file__))


def test_two_regions_of_a_program_differ(tmp_path: Path) -> None:
    emitted = module(tmp_path / "a")
    assert content_digest(emitted.partition_0) != content_digest(emitted.partition_1)


def _closed_over(value: int) -> Callable[[list[Any]], list[Any]]:
    return lambda args: [args[0] * value]


class _Callable:
    def method(self, args: list[Any]) -> list[Any]:
        return args


@pytest.mark.parametrize(
    "fn",
    [
        _closed_over(3),
        _Callable().method,
        functools.partial(double),
        eval("lambda args: args"),
        len,
    ],
    ids=["closure", "method", "partial", "no file", "built in"],
)
def test_what_depends_on_more_than_a_file_has_no_digest(fn: Callable[[list[Any]], list[Any]]) -> None:
    assert content_digest(fn) is None
    assert _memory(fn).entry([torch.ones(2)]) is None


PRINTS = """
import sys, torch
from pygraph.runtime import region
from pygraph.runtime.remembering import call_digest, content_digest
made = region.Region.__init__
def noted(self, fn, *args, **options):
    print("digest", content_digest(fn))
    made(self, fn, *args, **options)
region.Region.__init__ = noted

def before(x):
    return x.exp().sum(-1)

def model(x, total):
    total.add_(1)
    return torch.tanh(x @ x).softmax(-1) * float(sys.argv[1]) + total

with torch.no_grad():
    if sys.argv[1] == "2":
        torch.compile(before)(torch.ones(3, 5))
        torch.compile(model, backend="pygraph")(torch.ones(4, 4), torch.zeros(4, 4))
        torch._dynamo.reset()
    sys.argv[1] = "3"
    torch.compile(model, backend="pygraph")(torch.ones(4, 4), torch.zeros(4, 4))
"""


def test_a_compiled_region_has_one_digest_in_all_processes_and_another_one_with_other_kernels(tmp_path: Path) -> None:
    """The second program of one process is the first of another, whose caches lie elsewhere."""
    found = []
    for factor in ("2", "3"):
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / factor)}
        command = [sys.executable, "-c", PRINTS, factor]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found += [line.split()[1] for line in done.stdout.splitlines() if line.startswith("digest")]
    other, later, first = found
    assert first == later != other
    assert "None" not in found


# -- the call ----------------------------------------------------------------------------------------------------------


def test_calls_of_the_same_sizes_have_one_digest_whatever_the_memory() -> None:
    base = torch.ones(20)
    assert call_digest([torch.ones(2, 3), 4]) == call_digest([torch.zeros(2, 3), 4])
    assert call_digest([base[:5]]) == call_digest([base[3:8]])
    assert call_digest([torch.nn.Parameter(base)]) == call_digest([base])


CALLS: list[list[Any]] = [
    [],
    [torch.ones(6)],
    [torch.ones(2, 3)],
    [torch.ones(3, 2)],
    [torch.ones(3, 2).t()],
    [torch.ones(2, 3, dtype=torch.float64)],
    [torch.ones(2, 3, device="meta")],
    [torch.ones(6), torch.ones(6)],
    [torch.ones(6), None],
    [torch.ones(6), 0],
    [torch.ones(6), 1],
    [torch.ones(6), True],
    [torch.ones(6), 1.0],
    [torch.ones(6), 0.0],
    [torch.ones(6), -0.0],
]


def test_calls_that_differ_have_different_digests() -> None:
    assert len({call_digest(call) for call in CALLS}) == len(CALLS)


# -- keys --------------------------------------------------------------------------------------------------------------


def _memory(
    fn: Callable[[list[Any]], Any] = double,
    machine: str = "fake",
    candidates: tuple[str, ...] = CANDIDATES,
    **options: Any,
) -> Memory:
    driver = FakeDriver()
    driver.machine = machine
    return Memory(fn, driver, RegionOptions(**options), Store(Path("nowhere")), candidates)


def _key(memory: Memory) -> dict[str, str]:
    entry = memory.entry([torch.ones(2)])
    assert entry is not None
    return entry.key


def test_a_key_is_the_same_for_the_same() -> None:
    assert _key(_memory()) == _key(_memory())
    assert _key(_memory()) == _key(_memory(capture_after=9, max_captures=3)), "which replays do not depend on"


def _other(args: list[Any]) -> list[Any]:
    return args


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("content", {"fn": _other}),
        ("device", {"machine": "another"}),
        ("candidates", {"candidates": ("patched", "copied", "uncaptured")}),
        ("candidates", {"candidates": ("uncaptured", "patched")}),
        ("options", {"alignment": 32}),
        ("options", {"reuse_workspace": False}),
    ],
)
def test_each_part_makes_another_key(part: str, change: dict[str, Any]) -> None:
    usual, changed = _key(_memory()), _key(_memory(**change))
    assert [name for name in usual if usual[name] != changed[name]] == [part]
    store = Store(Path("nowhere"))
    assert store.path(usual) != store.path(changed)


@pytest.mark.parametrize("name", ["pygraph", "torch", "triton", "python"])
def test_each_version_makes_another_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    usual = _key(_memory())
    changed = {**identity.versions(), name: "9.9"}
    monkeypatch.setattr(remembering, "versions", lambda: changed)
    other = _key(_memory())
    assert [part for part in usual if usual[part] != other[part]] == [name]
    assert usual["torch"] == torch.__version__
    assert Store(Path("nowhere")).path(usual) != Store(Path("nowhere")).path(other)


def test_the_call_is_a_part_of_the_key() -> None:
    memory = _memory()
    one, two = memory.entry([torch.ones(2)]), memory.entry([torch.ones(3)])
    assert one is not None
    assert two is not None
    assert [part for part in one.key if one.key[part] != two.key[part]] == ["call"]


def test_the_host_is_its_processor_and_its_threads() -> None:
    driver, threads = HostDriver(), torch.get_num_threads()
    usual = driver.identity(None)
    assert identity.cpu_model() in usual
    assert identity.cpu_model()
    try:
        torch.set_num_threads(threads + 1)
        assert driver.identity(None) != usual
    finally:
        torch.set_num_threads(threads)
    assert driver.identity(None) == usual


@pytest.mark.parametrize(
    "options", [{"measure": False}, {"verify_always": True}, {"cache_dir": None}], ids=["off", "verified", "not kept"]
)
def test_nothing_is_remembered_where_nothing_is_measured_or_kept(options: dict[str, Any], tmp_path: Path) -> None:
    usual: dict[str, Any] = {"measure": True, "cache_dir": str(tmp_path)}
    assert memory_of(double, FakeDriver(), RegionOptions(**usual), CANDIDATES) is not None
    assert memory_of(double, FakeDriver(), RegionOptions(**{**usual, **options}), CANDIDATES) is None


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(self: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert memory_of(double, FakeDriver(), RegionOptions(measure=True, cache_dir="~/here"), CANDIDATES) is None


# -- what is not captured ----------------------------------------------------------------------------------------------


class _Site:
    """All calls of one argument fit; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def fits(self, args: Any) -> bool:
        self.asked += 1
        return len(args) == 1


def _left_out(pace: float | None, *, trials: int = 1) -> tuple[LeftOut, _Site, list[float], list[float]]:
    """One that is watched each 10 calls, its site, the paces it told, and a list of which the only item is the time."""
    past = Decided(CANDIDATES, "uncaptured", "faster", "", {}, {}, trials, pace)
    site, now, told = _Site(), [0.0], list[float]()
    made = LeftOut(site, past, lambda: now[0], told.append, SelectionOptions(period=10))
    return made, site, told, now


def _run(made: LeftOut, now: list[float], calls: int, pace: float) -> int:
    """How many of ``calls`` were granted."""
    granted = 0
    for _ in range(calls):
        granted += made.grants([1], alone=True)
        now[0] += pace
    return granted


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_a_pace_that_is_another_one_than_the_earlier_process_had_ends_it(pace: float) -> None:
    made, _, told, now = _left_out(1.0)
    assert 50 <= _run(made, now, 200, pace) < 70
    assert made.over
    assert not made.grants([1], alone=True)
    assert told == []


def test_a_pace_that_stays_does_not_and_few_calls_are_looked_at() -> None:
    made, site, told, now = _left_out(1.0)
    assert _run(made, now, 1000, 1.1) == 1000
    assert not made.over
    assert site.asked == 100
    assert told == []


def test_a_pace_that_nobody_knew_is_told_once_and_watched_from_then_on() -> None:
    made, _, told, now = _left_out(None)
    assert _run(made, now, 1000, 3.0) == 1000
    assert told == [pytest.approx(3.0)]
    assert _run(made, now, 200, 1.0) < 100
    assert made.over


def test_where_no_trial_is_left_it_goes_on() -> None:
    made, site, _, now = _left_out(1.0, trials=SelectionOptions().trials)
    assert _run(made, now, 1000, 9.0) == 1000
    assert site.asked == 100, "calls of other sizes are noticed all the same"


def test_calls_of_another_variant_are_not_its_own() -> None:
    made, _, _, _ = _left_out(1.0)
    assert not made.grants([1, 2], alone=True), "the first is looked at"
    assert made.grants([1, 2], alone=True), "the others are not"
    assert not made.grants([1, 2], alone=False)
    assert made.grants([1], alone=False)
