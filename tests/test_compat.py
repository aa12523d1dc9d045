"""Private symbols of torch: the installed release has each; one that is missing is named, once, with its cost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pygraph import compat
from tests import forked

PROGRAM = """
import importlib, sys
import torch, torch._inductor.compile_fx, torch._inductor.graph

owners = {}
for symbol in sys.argv[1:]:
    path, _, name = symbol.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        outer, _, inner = path.rpartition(".")
        owner = getattr(importlib.import_module(outer), inner)
    owners[owner, name] = owner.__dict__[name]
    delattr(owner, name)
import pygraph.compat
for (owner, name), value in owners.items():  # torch itself goes on using them
    setattr(owner, name, value)

import pygraph

x = torch.randn(8, 8)
for f in (lambda x: (x @ x).relu() + 1, lambda x: (x @ x).sin() * 2):
    run = torch.compile(f, backend="pygraph", options={"inductor": {"fallback_by_default": True}})
    for _ in range(4):
        torch.testing.assert_close(run(x), f(x))
print("replays", pygraph.counters().get("replays", 0))
print("errors", {report.error for report in pygraph.reports()})
str(pygraph.Explanation(pygraph.reports()))
"""


def without(*symbols: str) -> tuple[str, str]:
    """Stdout and stderr of a process that compiles two functions on a torch where PyGraph does not find ``symbols``."""
    done = forked.run(PROGRAM, *symbols)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_installed_release_has_every_symbol() -> None:
    assert compat.MISSING == {}
    assert compat.missing_text() == ""


def test_a_stand_in_is_nothing_and_cannot_be_used() -> None:
    found = compat._find("torch._inductor.ir.Nothing", "torch.nowhere.Nothing", cost="all is lost")
    try:
        named = "torch._inductor.ir.Nothing or torch.nowhere.Nothing"
        assert dict(compat.MISSING) == {named: "all is lost"}
        assert compat.missing_text() == compat.missing_text("all is lost")
        assert compat.missing_text().endswith(f"{named}: all is lost")
        assert compat.missing_text(compat.UNUSABLE) == ""
        assert compat.absent(found)
        assert not isinstance(torch.ones(1), found)
        for use in (found, lambda: found.attribute, type("Sub", (found,), {})):
            with pytest.raises(compat.MissingSymbolError, match=named):
                use()
    finally:
        compat.MISSING.clear()


@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="mended in torch 2.12")
def test_loops_of_nested_foreach_kernels_are_not_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.scheduler import FusedSchedulerNode

    nested = SimpleNamespace(snodes=[FusedSchedulerNode.__new__(FusedSchedulerNode)], is_template=lambda: False)
    before = FusedSchedulerNode.reorder_loops_by_dep_pair
    monkeypatch.setattr(FusedSchedulerNode, "reorder_loops_by_dep_pair", before)  # is put back
    compat.mend_loop_order()
    assert FusedSchedulerNode.reorder_loops_by_dep_pair(nested, None, None) is False


def test_without_a_symbol_that_can_be_spared_graphs_are_replayed_and_one_warning_names_it() -> None:
    out, log = without("torch._inductor.ir.WhileLoop", "torch._inductor.memory.estimate_peak_memory")
    assert "replays 4" in out
    assert "errors {None}" in out
    assert log.count(f"torch {torch.__version__} lacks what PyGraph uses") == 1
    assert log.count("torch._inductor.ir.WhileLoop: Inductor's loops are told by their FX nodes alone") == 1
    assert log.count("torch._inductor.memory.estimate_peak_memory: operators are not reordered") == 1


@pytest.mark.parametrize(
    "symbol",
    [
        "torch._inductor.scheduler.Scheduler.process_grouped_nodes",
        pytest.param("torch._guards.TracingContext", marks=pytest.mark.sweep),
    ],
)
def test_without_a_symbol_that_is_needed_programs_run_and_one_warning_says_that_nothing_is_captured(
    symbol: str,
) -> None:
    out, log = without(symbol)
    said = f"torch {torch.__version__} lacks what PyGraph uses: {symbol}: nothing is captured"
    assert "replays 0" in out
    assert said in out.partition("errors")[2]
    assert log.count(said) == 1
    assert "left graph" not in log
