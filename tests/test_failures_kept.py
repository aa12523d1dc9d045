"""Compiling again after a failed capture: how often, when not, what is freed, and what is written."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph import compat, recompile
from pygraph.ir import parse
from pygraph.runtime.counters import RegionRecord
from tests import failing
from tests.failing import CALLS, check, compiled, double, inputs, one, only, states, two, weight
from tests.small import living_regions

pytestmark = pytest.mark.usefixtures("fresh")

# -- bounds ------------------------------------------------------------------------------------------------------------


def test_the_number_of_compilations_is_bounded(monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> None:
    monkeypatch.setattr(recompile, "LIMIT", 1)
    ours, w = compiled(two), weight()
    for seed in range(2 * CALLS):
        check(ours, two, inputs(seed=seed), w)
    assert len(compilations) == 1
    assert "uncaptured" in states(only())


def test_a_failure_that_stays_is_not_compiled_for_again(
    monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    """Even where the cut does not come out as decided, the same operator is tried once."""
    monkeypatch.setattr("pygraph.inductor.failed.Failed.mark", lambda self, graph: None)
    ours, w = compiled(one), weight()
    for seed in range(CALLS):
        check(ours, one, inputs(seed=seed), w)
    assert len(compilations) == 1
    report = only()
    assert states(report) == ["uncaptured"]
    assert any("is in no region" in note for note in report.notes)


def test_a_compilation_that_raises_keeps_the_old_program(
    monkeypatch: pytest.MonkeyPatch, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours, w = compiled(one), weight()
    for seed in range(2):
        check(ours, one, inputs(seed=seed), w)
    source = only().source

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(compat, "compile_fx_inner", fail)
    with caplog.at_level(logging.WARNING, "pygraph"):
        for seed in range(CALLS):
            check(ours, one, inputs(seed=seed), w)
    assert len(compilations) == 1
    assert only().source == source
    assert "no more" in caplog.text
    assert any("no more" in note for note in only().notes)


def test_other_strides_than_promised_are_not_used(monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> None:
    promises = iter([("second",), ("first",)])
    monkeypatch.setattr(recompile.Compiled, "promises", lambda self: next(promises))
    ours, w = compiled(one), weight()
    for seed in range(CALLS):
        check(ours, one, inputs(seed=seed), w)
    assert len(compilations) == 1
    assert states(only()) == ["uncaptured"]
    assert any("other strides" in note for note in only().notes)


def test_more_assumptions_on_sizes_are_not_used(monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> None:
    ours, w = compiled(two, dynamic=True), weight()
    taken = iter(range(100))
    monkeypatch.setattr("pygraph.inductor.again.Original.assumptions", lambda self: next(taken))
    for seed in range(CALLS):
        check(ours, two, inputs(seed=seed), w)
    assert len(compilations) == 1, "what was assumed once would count as known the next time"
    assert states(only()) == ["uncaptured"]


def test_a_new_guard_counts_as_an_assumption() -> None:
    ours, w = compiled(one, dynamic=True), weight()
    check(ours, one, inputs(), w)
    (again,) = [o for o in gc.get_objects() if type(o) is recompile.Recompilation and o._report is only()]
    original = again._original
    before = original.assumptions()
    assert original.assumptions() == before
    size = next(value for value in original.inputs if isinstance(value, torch.SymInt))
    assert size * 3 != 77
    assert original.assumptions() != before


def test_strict_raises_and_compiles_nothing_again(compilations: list[str]) -> None:
    ours, w = compiled(one, options={"strict": True}), weight()
    with torch.no_grad():
        ours(inputs(), w)
        with pytest.raises(Exception, match=r"pygraphfails_double"):
            ours(inputs(), w)
    assert compilations == []


# -- what is held, and by whom -----------------------------------------------------------------------------------------


def test_old_regions_are_freed() -> None:
    before = {id(region) for region in living_regions()}
    ours, w = compiled(two), weight()
    for seed in range(2):
        check(ours, two, inputs(seed=seed), w)
    old = [weakref.ref(region) for region in living_regions() if id(region) not in before]
    assert old
    for seed in range(2 * CALLS):
        check(ours, two, inputs(seed=seed), w)
    gc.collect()
    assert [ref() for ref in old if ref() is not None] == []
    new = [weakref.ref(region) for region in living_regions() if id(region) not in before]
    assert len(new) == 3
    del ours
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in new if ref() is not None] == []


def test_old_regions_give_back_what_they_captured_whoever_holds_them() -> None:
    ours, w = compiled(two), weight()
    for seed in range(4):
        check(ours, two, inputs(seed=seed), w)
    (again,) = [o for o in gc.get_objects() if type(o) is recompile.Recompilation and o._report is only()]
    old = again._current
    held = [entry[0] for entry in old.regions if entry is not None]
    assert any(region._variants.captured for region in held), "the first cut has captured something by now"
    check(ours, two, inputs(), w)
    assert again._current is not old
    assert [region._variants.captured for region in held] == [0] * len(held)
    assert {region.record.state for region in held} == {"uncaptured"}
    plain = [entry[1] for entry in old.regions if entry is not None]
    assert list(old.program.compiled_fn_runner.partitions) == plain
    with torch.no_grad():
        (result,) = old.program([inputs(), w])
    torch.testing.assert_close(result, two(inputs(), w), msg="a thread that is still inside goes on")


def test_the_users_model_is_not_held() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(double(self.layer(x)))

    model = Model()
    ours = compiled(model)
    for seed in range(CALLS):
        ours(inputs(seed=seed)).sum().backward()
    assert "replay" in {state for report in pygraph.reports() for state in states(report)}
    alive = weakref.ref(model)
    del model, ours
    gc.collect()
    assert alive() is None


def test_two_threads_call_at_once(compilations: list[str]) -> None:
    ours, w = compiled(one), weight()
    for seed in range(2):
        check(ours, one, inputs(seed=seed), w)
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(offset: int) -> None:
        try:
            barrier.wait()
            for seed in range(3 * CALLS):
                check(ours, one, inputs(seed=offset + seed), w)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(compilations) == 1
    check(ours, one, inputs(), w)
    assert states(only()) == ["replay", "replay"]


def test_a_dispatch_mode_puts_the_compilation_off(compilations: list[str]) -> None:
    class Watching(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    ours, w = compiled(one), weight()
    for seed in range(2):
        check(ours, one, inputs(seed=seed), w)
    (again,) = [o for o in gc.get_objects() if type(o) is recompile.Recompilation and o._report is only()]
    with torch.no_grad(), Watching():  # Dynamo does not enter compiled code here
        again._retry([inputs(), w])
    assert compilations == []
    check(ours, one, inputs(), w)
    assert len(compilations) == 1


def test_another_compilation_under_way_puts_it_off(compilations: list[str]) -> None:
    ours, w = compiled(one), weight()
    for seed in range(2):
        check(ours, one, inputs(seed=seed), w)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with compat.compile_lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        check(ours, one, inputs(), w)
        assert compilations == []
    finally:
        done.set()
        thread.join()
    check(ours, one, inputs(), w)
    assert len(compilations) == 1


# -- what is written ---------------------------------------------------------------------------------------------------


def test_dumps_show_what_was_tried_and_parse(tmp_path: Path) -> None:
    ours, w = compiled(one, options={"dump_dir": str(tmp_path)}), weight()
    for seed in range(CALLS):
        check(ours, one, inputs(seed=seed), w)
    folder = tmp_path / only().name
    text = (folder / "01-legality.pgir").read_text()
    assert 'reason = "failed-capture"' in text
    assert "only while compiling" in text
    graph = parse(text)
    assert str(graph) == text.rstrip("\n") or str(parse(str(graph))) == str(graph)
    assert "partition_1" in (folder / "program.py").read_text()
    launches = (folder / "region0.launches.txt").read_text()
    assert Path(failing.__file__).name in launches, "a launch names the user's line"


def test_the_report_keeps_its_name_and_counts_anew() -> None:
    ours, w = compiled(one), weight()
    check(ours, one, inputs(), w)
    report = only()
    name = report.name
    for seed in range(CALLS):
        check(ours, one, inputs(seed=seed), w)
    assert only() is report
    assert report.name == name
    assert all(isinstance(region.record, RegionRecord) for region in report.regions)
    assert report.coverage < 1.0
