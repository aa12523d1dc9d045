"""Inductor's program under a decision: cuts, order, operators kept out whatever Inductor's patterns make of them, and
the record held against the decision."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm

import pygraph
from pygraph.inductor.compile import compare
from pygraph.inductor.decision import Decision, Placed
from pygraph.inductor.emitted import PatternNode, ProgramRecord, RecordedMaps, Step
from pygraph.inductor.partition_hooks import _behind_views
from pygraph.ir import CAPTURABLE, REASON, Graph, Stage, sources
from pygraph.passes import Pass, PassContext, PassResult
from pygraph.report.model import GraphReport

pytestmark = pytest.mark.usefixtures("fresh")

REST = "placement,partitioning"
aten = torch.ops.aten


@dataclass(frozen=True)
class KeepOut(Pass):
    """A user's pass, as in the documentation: leaves uncaptured what a function computes."""

    name: ClassVar[str] = "keep-out"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage] = Stage.JUDGED

    function: str = ""

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        chosen = [n for n in graph.nodes if any(source.function == self.function for source in sources(n))]
        for node in chosen:
            node.meta.set(CAPTURABLE, False)
            node.meta.set(REASON, "kept-out")
        return PassResult(bool(chosen))


def forbidding(op: str) -> Sequence[Any]:
    return [f"legality{{forbid=[{op}]}},{REST}"]


def keeping_out(function: str) -> Sequence[Any]:
    return ["legality", KeepOut(function), REST]


def compiled(function: Callable[..., Any], passes: Sequence[Any], *inputs: torch.Tensor) -> GraphReport:
    """The report of ``function`` compiled under ``passes``, once its results have been held against eager."""
    ours = torch.compile(function, backend="pygraph", options={"passes": passes})
    with torch.no_grad():
        for _ in range(4):
            fresh = [torch.randn_like(x) for x in inputs]
            torch.testing.assert_close(ours(*fresh), function(*fresh), rtol=1e-4, atol=1e-4)
    (report,) = pygraph.reports()
    assert report.error is None
    return report


def assert_outside(report: GraphReport, kernel: str) -> None:
    """A kernel of that name runs, and no region has one."""
    assert any(kernel in name for name in report.emitted.outside)
    assert not any(kernel in name for region in report.emitted.regions for name in region.kernels)


def assert_captured(report: GraphReport, kernel: str) -> None:
    assert any(kernel in name for region in report.emitted.regions for name in region.kernels)
    assert "replay" in {region.state for region in report.regions}


def square(*sizes: int) -> torch.Tensor:
    return torch.empty(*(sizes or (32, 32)))


# -- cuts and order ----------------------------------------------------------------------------------------------------

SORT = forbidding("aten.sort.default")


def test_a_forbidden_pointwise_operator_takes_its_fused_kernel_along() -> None:
    report = compiled(lambda x, w: (torch.sin(x @ w) + 1) @ w, forbidding("aten.sin.default"), square(), square())
    assert not any("sin" in name for region in report.regions for name in region.nodes)
    assert any("left outside: forbidden" in note for note in report.notes)
    assert len(report.regions) == 2


def test_forbidden_operators_are_outside_and_independent_cuts_brought_together() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.sort(torch.relu(x @ w), dim=-1).values @ w
        b = torch.sort(torch.tanh(x @ w.t()), dim=-1).values @ w
        return a, b

    report = compiled(f, SORT, square(), square())
    assert_outside(report, "sort")
    assert [region.state for region in report.regions] == ["replay", "replay"]
    assert any("sort" in name for step in report.record.outside for name in step.origins)


def test_a_graph_without_any_capturable_launch_has_no_region() -> None:
    report = compiled(lambda x: torch.sort(x, dim=-1).values, SORT, square())
    assert (report.regions, report.coverage) == ([], 0.0)


# -- concatenations that a cut goes through ----------------------------------------------------------------------------


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first operand lies before the sort, in a kernel that the sort needs; the second behind it."""
    t = (x @ x).sin()
    late = (t.sort()[0] @ x).cos()
    return torch.cat([t.tanh(), late.tanh()]), t, late


def three(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each operand lies in a region of its own."""
    t = (x @ x).sin()
    u = (t.sort()[0] @ x).cos()
    v = (u.sort()[0] @ x).cos()
    return torch.cat([t.tanh(), u.tanh(), v.tanh()], 1), t, u, v


def nested(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An operand is a concatenation itself."""
    t = (x @ x).sin()
    u = (t.sort()[0] @ x).cos()
    inner = torch.cat([t.tanh(), u.tanh()])
    v = (u.sort()[0] @ x).cos()
    return torch.cat([inner, v.tanh()]), t, u, v


def read_early(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An operand is used besides."""
    t = (x @ x).sin()
    part = t.tanh()
    late = (t.sort()[0] @ x).cos()
    return torch.cat([part, late.tanh()]), t, late @ part


def sorted_between(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An operand is what is outside of every region."""
    t = (x @ x).sin()
    late = (t.sort()[0] @ x).cos()
    return torch.cat([t.tanh(), late.sort()[0], late.tanh()]), t, late


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [
        pytest.param(
            function,
            dynamic,
            marks=[] if function is not halves and dynamic == (function is three) else pytest.mark.sweep,
        )
        for function in (halves, three, nested, read_early, sorted_between)
        for dynamic in (False, True)
    ],
)
def test_operands_keep_what_was_written_before_the_cut(function: Callable[..., Any], dynamic: bool) -> None:
    """They lie in the result, which is allocated once."""
    passes = forbidding("aten.sort.default")
    ours = torch.compile(function, backend="pygraph", options={"passes": passes, "ledger": False}, dynamic=dynamic)
    with config.patch(fx_graph_cache=False), torch.no_grad():
        for size in (8, 8, 8, 8, 12, 12, 12) if dynamic else (8,) * 5:
            x = torch.randn(size, size)
            trash = [torch.full((4 * size, 4 * size), float("nan")) for _ in range(8)]  # what new memory holds
            del trash
            torch.testing.assert_close(ours(x), function(x), rtol=1e-4, atol=1e-4)
    (report,) = pygraph.reports()
    assert report.error is None
    assert report.record is not None
    assert report.record.inside.count(True) > 1
    assert [r.record.state for r in report.regions if r.record] == ["replay"] * report.record.inside.count(True)


# -- addmm: after the decision --------------------------------------------------------------------------------------


def test_inductors_plan_of_memory_gives_away_nothing_that_a_partition_returns(fresh: None) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.sin(), x.t().cos() @ x
        apart = torch.sort(second, 0)[0]
        return (first @ apart).relu() + second, first.sum(0)

    passes = "legality{forbid=[aten.sort.default]},placement,partitioning,indirection"
    with config.patch(memory_planning=True):
        compiled = torch.compile(f, backend="pygraph", options={"passes": passes, "ledger": False})
        for _ in range(4):
            x = torch.randn(8, 8)
            torch.testing.assert_close(compiled(x), f(x))
    assert pygraph.counters()["replays"] > 0


def read_by_another_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The write is outside of every region, and the reads are not."""
    x.exp_()
    return y.sum() + x.view(-1).sum()


def written_behind_a_read(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = y.sum() * 2
    x.exp_()
    return found + y.sum()


def read_behind_a_late_write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Inductor itself would read first, to let go of what is read sooner."""
    base = torch.cat([y.sin(), y.cos()])
    late = torch.sort(y.tanh(), 0)[0][:4, :2]
    written = torch.as_strided_scatter(base, late, (4, 2), (6, 2), 1)
    return (written.sum(0) + y).cos() + late.sum()


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [(read_by_another_view, True), (written_behind_a_read, True), (read_behind_a_late_write, False)],
)
def test_a_write_is_seen_by_other_views_that_operators_return(
    function: Callable[..., torch.Tensor], dynamic: bool
) -> None:
    """With Inductor's fallbacks, views are results of operators, which it may bring into another order."""
    options = {
        "passes": "legality{forbid=[aten.copy_]},placement,partitioning,indirection",
        "ledger": False,
        "inductor": {"fallback_by_default": True},
    }
    with config.patch(fx_graph_cache=False):
        compiled = torch.compile(function, backend="pygraph", options=options, dynamic=dynamic)
        for call in range(4):
            ours, theirs = (torch.full((24,), float(call) / 2) for _ in range(2))
            found = compiled(ours.view(2, 3, 4), ours.view(4, 6))
            torch.testing.assert_close(found, function(theirs.view(2, 3, 4), theirs.view(4, 6)))
            torch.testing.assert_close(ours, theirs)


def scheduled(reads: str, writes: str = "", made: str = "", of: str = "") -> Any:
    """A scheduled node, by names of one letter: ``made`` is a view of ``of``, where that is given."""
    buffers = [SimpleNamespace(get_name=lambda: made, get_aliases=lambda: [*of], get_mutations=lambda: [*writes])]
    depends = SimpleNamespace(reads=[SimpleNamespace(name=name) for name in reads])
    return SimpleNamespace(get_outputs=lambda: buffers, read_writes=depends)


def test_reads_and_writes_of_one_memory_by_several_names_keep_their_order() -> None:
    view, other = scheduled("a", made="v", of="a"), scheduled("a", made="u", of="a")
    read, write = scheduled("u", made="r"), scheduled("", writes="v", made="x")
    again, apart = scheduled("v", made="s"), scheduled("b", writes="b", made="t")
    found = [sorted(set(each)) for each in _behind_views([view, other, read, write, again, apart, write])]
    assert found == [[], [], [], [0, 1, 2], [3], [], [3, 4]]
    assert _behind_views([scheduled("a"), scheduled("", writes="a")]) == [[], []], "Inductor knows one name's order"


def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def plus(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + b


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sort(plus(times(x, w), b)).values @ w


LINEAR = (square(), square(), square(32))


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        (forbidding("aten.mm.default"), "forbidden"),
        pytest.param(forbidding("aten.addmm"), "forbidden", marks=pytest.mark.sweep),
        (keeping_out("plus"), "kept-out"),
    ],
)
def test_addmm_is_outside_where_either_half_or_itself_is(passes: Sequence[Any], reason: str) -> None:
    report = compiled(linear, passes, *LINEAR)
    assert_outside(report, "addmm")
    assert "addmm_default (aten.addmm.default), made from mm, add, was left outside: " + reason in report.notes


def test_a_chain_of_patterns_keeps_out_what_it_must_and_no_more() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return plus(times(x @ w + b, w) @ w, b)

    report = compiled(chain, keeping_out("plus"), *LINEAR)
    assert_captured(report, "addmm")
    made = {one.name: one.reason for run in report.record.runs for step in run for one in step.made}
    assert sorted(map(str, made.values())) == ["None", "kept-out"]


# -- patterns that ran before the decision --------------------------------------------------------------------------


def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 8.0, dim=-1)


def attending(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(weights(q, k) @ v @ w)


ATTENTION = (*(square(2, 4, 128, 64) for _ in range(3)), square(64, 64))


@pytest.mark.parametrize(
    "passes",
    [forbidding("aten.bmm"), pytest.param(keeping_out("weights"), marks=pytest.mark.sweep), forbidding("aten.sort")],
)
def test_attention_is_outside_where_a_part_of_it_is(passes: Sequence[Any]) -> None:
    report = compiled(attending, passes, *ATTENTION)
    assert_captured(report, "mm")
    if passes == forbidding("aten.sort"):
        assert_captured(report, "scaled_dot_product")
        return
    assert_outside(report, "scaled_dot_product")
    (left,) = report.uncaptured()
    assert left.loc is not None, "a node that a pattern made has the line of what it replaced"


def test_a_product_that_is_padded_is_outside_with_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def batched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, y)

    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sort(batched(x, y)).values @ w

    monkeypatch.setattr(pad_mm, "check_device", lambda a, b: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with config.patch(force_shape_pad=True):
        report = compiled(f, keeping_out("batched"), square(2, 36, 35), square(2, 35, 32), square())
    assert_outside(report, "bmm")
    assert_outside(report, "cpp_fused_")
    assert_captured(report, "sort")


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.norm.running_var.uniform_(0.5, 2)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.normed(self.conv(x)))


@pytest.mark.parametrize("kept_out", ["normed", "no_such_function"])
def test_a_convolution_that_a_norm_was_folded_into_is_outside_where_the_norm_is(kept_out: str) -> None:
    with config.patch(freezing=True):
        report = compiled(Normed().eval(), keeping_out(kept_out), square(2, 3, 8, 8))
    assert "batch_norm" not in str(report.graph)
    check = assert_outside if kept_out == "normed" else assert_captured
    check(report, "convolution")


# -- lowerings and passes that are no patterns, after the decision ---------------------------------------------------


@pytest.mark.parametrize(
    ("kept_out", "check"),
    [
        ("times", assert_outside),
        pytest.param("no_such_function", assert_captured, marks=pytest.mark.sweep),
    ],
)
def test_what_a_pattern_lowers_itself_follows_what_it_matched(kept_out: str, check: Callable[..., None]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sort(torch.relu(torch.nn.functional.conv2d(times(x, x), w))).values

    with config.patch(freezing=True):
        report = compiled(f, keeping_out(kept_out), square(2, 3, 8, 8), square(8, 3, 3, 3))
    check(report, "convolution")


def fuse_by_hand(graph: torch.fx.Graph) -> None:
    """A user's pass of Inductor's, without patterns: the product and the addition become one operator."""
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        product, bias = add.args
        with graph.inserting_before(add):
            fused = graph.call_function(aten.addmm.default, (bias, *product.args))
        fused.meta = dict(add.meta)
        add.replace_all_uses_with(fused)
        graph.erase_node(add)
        graph.erase_node(product)


def insert(graph: torch.fx.Graph) -> None:
    """A pass that makes a node, and replaces none."""
    for node in graph.find_nodes(op="call_function", target=aten.sort.default):
        operand = node.args[0]
        with graph.inserting_before(node):
            absolute = graph.call_function(aten.neg.default, (graph.call_function(aten.neg.default, (operand,)),))
        for made in (absolute, absolute.args[0]):
            made.meta["val"] = operand.meta["val"]
        node.args = (absolute, *node.args[1:])


def test_what_another_pass_fuses_is_outside_where_a_part_of_it_is() -> None:
    with config.patch(post_grad_custom_pre_pass=fuse_by_hand):
        report = compiled(linear, keeping_out("times"), *LINEAR)
    assert_outside(report, "addmm")
    assert any("made from add, mm, was left outside: kept-out" in note for note in report.notes)


def test_what_cannot_be_traced_is_outside_and_noted() -> None:
    with config.patch(post_grad_custom_pre_pass=insert):
        report = compiled(linear, keeping_out("no_such_function"), *LINEAR)
    assert_outside(report, "cpp_fused_")
    assert sum("made from nodes that are not known, was left outside: unknown-node" in n for n in report.notes) == 2
    assert_captured(report, "sort")
    assert len(report.regions) == 2


def test_random_operators_that_are_chained_in_subgraphs_are_captured() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(torch.relu(x @ x), 0.5)
        return torch.nn.functional.dropout(dropped @ x, 0.5)

    ours = torch.compile(f, backend="pygraph", options={"inductor": {"fallback_random": True}})
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            expected = f(torch.randn(32, 32))
            torch.manual_seed(seed)
            torch.testing.assert_close(ours(torch.randn(32, 32)), expected)
    (report,) = pygraph.reports()
    assert_captured(report, "native_dropout")
    assert report.emitted.outside == ()


# -- the record and the decision ---------------------------------------------------------------------------------------


def decision(**reasons: str | None) -> Decision:
    nodes = {n: Placed(f"aten.{n}.default", None if r else 0, r, not r) for n, r in reasons.items()}
    return Decision("cpu", nodes, frozenset({0}), "legality")


def step(*origins: str, reason: str | None = None) -> Step:
    return Step(origins, origins, True, reason)


MADE = PatternNode("addmm", "aten.addmm.default", ("mm",), "forbidden")
FOLDED = {
    "held": Placed("pygraph.constant", None, "cpu-operator", False),
    "held_cuda": Placed("prims.device_put.default", 0, None, True),
}


@pytest.mark.parametrize(
    ("record", "decided", "note"),
    [
        (
            ProgramRecord(((step("mm"), step("item")),), (True,)),
            decision(mm=None, item="host-read"),
            "region 0 holds item (aten.item.default), judged not capturable: host-read",
        ),
        (
            ProgramRecord(((Step(("buf0",), ("addmm",), True, None, (MADE,)),),), (True,)),
            decision(mm="forbidden", relu=None),
            "region 0 holds addmm (aten.addmm.default), which has to stay outside: forbidden",
        ),
        (
            ProgramRecord(((step("mm"),), (step("x", reason="other"),), (step("relu"),)), (True, False, True)),
            decision(mm=None, relu=None),
            "2 regions were emitted where 1 were decided",
        ),
        (
            ProgramRecord(((step("mm"),), (step("item", reason="host-read"),)), (True, False)),
            decision(mm=None, item="host-read"),
            "",
        ),
        # a constant that was folded into a kernel bars nothing
        (
            ProgramRecord(((step("held", "held_cuda"),),), (True,)),
            Decision("cuda", FOLDED, frozenset({0}), "legality"),
            "",
        ),
    ],
)
def test_a_region_that_holds_what_must_be_outside_is_barred_and_all_differences_are_noted(
    record: ProgramRecord, decided: Decision, note: str
) -> None:
    kept = pickle.loads(pickle.dumps(RecordedMaps(["map"], record)))  # as in Inductor's cache
    assert (list(kept), kept.record) == (["map"], record)
    notes, forbidden = compare(decided, kept.record)
    assert notes == ([note] if note else [])
    assert forbidden == ({0} if "region 0 holds" in note else set())
