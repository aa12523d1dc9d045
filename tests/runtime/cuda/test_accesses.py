"""Operands of operators and kernels, as facts of the launches that they made."""

from __future__ import annotations

import types
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from pygraph.program.program import Layout, Program, Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, LaunchKind, is_written
from pygraph.runtime.cuda import spans
from pygraph.runtime.cuda.spans import Observer, Operand, Span, _Kernel, observing, with_calls
from tests.runtime.captures import Capture

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL


def given(*addresses: int, writes: bool = False) -> tuple[Operand, ...]:
    """Operands at ``addresses``, of eight bytes each."""
    return tuple(Operand(address, Bytes(0, 8), writes) for address in addresses)


def test_an_argument_is_written_unless_its_call_says_that_it_is_only_read() -> None:
    capture = Capture()
    x, y, z = capture.input(64), capture.input(64), capture.input(64)
    out = capture.pool(64)
    capture.launch(x, y, out)
    capture.launch(z)
    span = Span(0, 1, "add", given(x, y + 8) + given(y, out, writes=True))
    launches = with_calls(capture.launches, [span], capture.allocations, [])
    assert [launch.uses for launch in launches] == [None, None]
    assert launches[0].read_only == {(INPUT, 0)}
    slots = (Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, 0), Slot(0, 2, POOL, 0, 0), Slot(1, 0, INPUT, 2, 0))
    assert Program(capture.recording(launches=launches), slots, Layout(0, {}, ())).written == {1, 2}


def test_launches_that_use_the_generators_memory_draw() -> None:
    capture = Capture()
    capture.launch(5, 0x7E00_0000_0000)
    capture.launch(5)
    launches = with_calls(capture.launches, [], capture.allocations, [0x7E00_0000_0000, 0x7E00_0000_0200])
    assert [launch.random for launch in launches] == [True, False]


def reach_of(name: str, reads: tuple[int, ...]) -> frozenset[tuple[AllocationKind, int]] | None:
    """The allocations that the second of three launches can reach, when its call ``name`` reads ``reads``; None for
    any."""
    capture = Capture(0x7F00_0000_0000)
    capture.input(64)
    capture.constant(0x5500_0000_0000, 64)
    capture.launch(1)
    capture.input(0)
    capture.pool(64)
    capture.launch(2)
    capture.launch(3)
    capture.pool(64)
    spans = [Span(0, 1, "aten.relu.default", ()), Span(1, 2, name, given(*reads))]
    launches = with_calls(capture.launches, spans, capture.allocations, [])
    assert [launch.call for launch in launches] == ["aten.relu.default", name, None]
    assert launches[2].may_access is None
    return launches[1].may_access


X, WEIGHT, NOBODYS = 0x7F00_0000_0000, 0x5500_0000_0000, 0x7B00_0000_0000


def test_an_operator_of_aten_reaches_what_it_was_given_and_what_it_made() -> None:
    assert reach_of("aten.add.Tensor", (X + 8, WEIGHT, 0)) == {(INPUT, 0), (POOL, 0)}
    assert reach_of("aten.add.Tensor", (X + 64 + 4096,)) == {(INPUT, 1), (POOL, 0)}


@pytest.mark.parametrize("name", ["triton_poi_fused_0", "mylib.add.default", "aten_extra.add.default"])
def test_others_may_reach_anything(name: str) -> None:
    assert reach_of(name, (X,)) is None


def test_an_operator_that_was_given_memory_of_nobodys_may_reach_anything() -> None:
    assert reach_of("aten.add.Tensor", (X, NOBODYS)) is None


def test_copies_and_fills_use_every_word() -> None:
    capture = Capture()
    x = capture.input(64)
    capture.launch(x, x + 32, kind=LaunchKind.MEMCPY, signature=(8, 1, 1))
    capture.launch(x, kind=LaunchKind.MEMSET, signature=(0, 1, 8))
    spans = [Span(0, 2, "aten.copy_.default", given(x) + given(x, writes=True))]
    launches = with_calls(capture.launches, spans, capture.allocations, [])
    assert [launch.may_access for launch in launches] == [None, None]
    assert [launch.call for launch in launches] == ["aten.copy_.default"] * 2


# -- what a call does to its operands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
def test_operands_are_told_by_allocation_and_bytes(closed: bool) -> None:
    capture = Capture(X)
    x = capture.input(64)
    capture.constant(WEIGHT, 64)
    out = capture.pool(64)
    capture.launch(x, out)
    operands = (
        Operand(x + 16, Bytes(0, 32, 16, 4), writes=False),
        Operand(WEIGHT + 8, None, writes=False),
        Operand(out, Bytes(0, 64), writes=True, reads=False),
        Operand(0, Bytes(0, 0), writes=True),
    )
    span = Span(0, 1, "triton_poi_fused_0", operands, closed=closed)
    (launch,) = with_calls(capture.launches, [span], capture.allocations, [])
    if not closed:
        assert launch.operands is None
        return
    assert launch.operands == (
        Access((INPUT, 0), Bytes(16, 48, 16, 4), writes=False),
        Access((AllocationKind.CONSTANT, 0), Bytes(0, 64), writes=False),
        Access((POOL, 0), Bytes(0, 64), writes=True, reads=False),
    )


def test_launches_of_a_call_are_told_together_from_those_of_the_next_one() -> None:
    """Two calls whose operands are known, one that may do anything, one with a known one inside, and nobody's."""
    capture = Capture(X)
    x = capture.input(64)
    for _ in range(10):
        capture.launch(x)
    spans = [Span(*bound, "aten.add.Tensor", given(x), closed=True) for bound in ((0, 2), (2, 3))]
    spans += [Span(3, 5, "mylib.op.default", given(x)), Span(6, 8, "aten.add.Tensor", given(x), closed=True)]
    spans.append(Span(5, 9, "mylib.op.default", given(x)))
    launches = with_calls(capture.launches, spans, capture.allocations, [])
    found = [(0, 2)] * 2 + [(2, 3)] + [(3, 5)] * 2 + [(5, 9), *[(6, 8)] * 2, (5, 9), (9, 10)]
    assert capture.recording(launches=launches).calls() == tuple(range(*each) for each in found)
    assert [launch.operands is None for launch in launches] == [False] * 3 + [True] * 7
    assert Capture().recording().calls() == ()


def test_a_call_that_is_given_memory_of_nobodys_may_do_anything() -> None:
    capture = Capture(X)
    capture.launch(capture.input(64))
    span = Span(0, 1, "aten.add.Tensor", given(X, NOBODYS), closed=True)
    (launch,) = with_calls(capture.launches, [span], capture.allocations, [])
    assert launch.operands is None


class Compiled:
    """One of Inductor's kernels, or of the user's, by its name."""

    def __init__(self, name: str, *parameters: str, mutated: tuple[str, ...] = ()) -> None:
        self.fn = types.SimpleNamespace(__name__=name)
        self.triton_meta = {"signature": dict.fromkeys(parameters, "*fp32")}
        self.mutated_arg_names = list(mutated)
        self.run = lambda *args: None


def operands_of(kernel: Compiled, *args: Any) -> tuple[Operand, ...]:
    """Operands that a kernel is known to be given, once it has run."""
    observer = Observer(lambda: 0)
    _Kernel(observer, kernel, nondeterministic=False).run(*args)
    return observer.spans[-1].operands


def test_kernels_of_inductors_use_elements_alone_and_say_by_name_what_they_write() -> None:
    x, y = torch.zeros(4, 8)[:, 2:4], torch.zeros(6)
    parameters = ("in_ptr0", "in_ptr1", "in_out_ptr0", "out_ptr0", "out_ptr1")
    kernel = Compiled("triton_poi_0", *parameters, mutated=("in_ptr1", "out_ptr0"))
    assert operands_of(kernel, x, y, y, y, y, 7) == (
        Operand(x.data_ptr(), Bytes(0, 104, 32, 8), writes=False),
        *[Operand(y.data_ptr(), Bytes(0, 24), writes=True)] * 3,
        Operand(y.data_ptr(), Bytes(0, 24), writes=True, reads=False),
    )
    (sum_of,) = operands_of(Compiled("triton_tem_fused_0", "out_ptr0"), y)
    assert sum_of == Operand(y.data_ptr(), Bytes(0, 24), writes=True)
    own = operands_of(Compiled("my_kernel", "in_ptr0", "out_ptr0"), x, x)
    assert own == tuple(Operand(x.data_ptr(), None, writes=written) for written in (False, True))
    unknown = operands_of(Compiled("triton_poi_0", "in_ptr0"), y, x, y)
    assert [operand.writes for operand in unknown] == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32])
def test_a_kernel_of_the_users_that_may_be_given_addresses_may_do_anything(dtype: torch.dtype) -> None:
    observer = Observer(lambda: 0)
    for name in ("triton_poi_0", "my_kernel"):
        _Kernel(observer, Compiled(name, "in_ptr0"), nondeterministic=False).run(torch.zeros(4, dtype=dtype))
    assert [span.closed for span in observer.spans] == [True, dtype is torch.int32]


@pytest.mark.parametrize(
    ("op", "told"), [("as_strided_copy", None), ("as_strided_scatter", None), ("relu", Bytes(0, 8))]
)
def test_operators_that_look_around_their_operands_use_all_of_the_memory(op: str, told: Bytes | None) -> None:
    observer, x = Observer(lambda: 0), torch.zeros(8, device="meta")[:2]
    more = {"as_strided_copy": ((4,), (2,), 0), "as_strided_scatter": (x, (2,), (1,), 0), "relu": ()}[op]
    with observing(observer, lambda: None):
        getattr(torch.ops.aten, op).default(x, *more)
    assert observer.spans[-1].operands[0].bytes == told


def test_what_an_operator_takes_for_its_result_alone_is_not_read() -> None:
    observer = Observer(lambda: 0)
    x, out = torch.zeros(4, 4, device="meta"), torch.zeros(4, 4, device="meta")
    with observing(observer, lambda: None):
        torch.ops.aten.mm.out(x, x, out=out)
        torch.ops.aten.add_.Tensor(out, x)
    assert [[operand.reads for operand in span.operands] for span in observer.spans] == [
        [True, True, False],
        [True] * 2,
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("native_batch_norm", {"running_mean", "running_var"}),
        ("batch_norm", {"running_mean", "running_var"}),
        ("_batch_norm_impl_index", {"running_mean", "running_var"}),
        ("instance_norm", {"running_mean", "running_var"}),
        ("batch_norm_gather_stats", {"running_mean", "running_var"}),
        ("batch_norm_gather_stats_with_counts", {"running_mean", "running_var"}),
        ("_cudnn_rnn_backward", {"reserve"}),
        ("native_batch_norm_backward", set()),
    ],
)
def test_operators_write_what_their_schemas_do_not_say(name: str, arguments: set[str]) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert {argument.name for argument in schema.arguments if is_written(schema, argument)} == arguments


ELEMENTWISE: dict[str, tuple[Any, bool]] = {
    "an operand": (lambda x, y: torch.sin(x), True),
    "both": (lambda x, y: x * x, True),
    "the second one": (lambda x, y: torch.sub(y, x), True),
    "with a number": (lambda x, y: x + 1, True),
    "another type": (lambda x, y: x > y, False),
    "a transposed one as well": (lambda x, y: x + x.t(), False),
    "a larger result": (lambda x, y: x[0] + y, False),
    "a product": (lambda x, y: torch.mm(x, y), False),
    "a sum": (lambda x, y: x.sum(0, keepdim=True), False),
    "one that is written": (lambda x, y: x.mul_(y), False),
    "no form in place": (lambda x, y: torch.maximum(x, y), False),
}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_results_may_take_the_place_of_operands_that_one_kernel_reads_at_the_same_places(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "_refuse_host", lambda *_: None)
    fn, expected = ELEMENTWISE[name]
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    observer = Observer(count(step=nodes).__next__)
    with observing(observer, fn) as run:
        run(x, y)
    span = next(each for each in reversed(observer.spans) if each.end > each.begin)
    assert (x.data_ptr() in span.in_place) == (expected and nodes == 1)
    capture = Capture()
    capture.input(64, address=x.data_ptr())
    capture.launch(x.data_ptr())
    capture.launch(x.data_ptr(), kind=LaunchKind.MEMCPY)
    same = [replace(span, begin=0, end=2)]
    found = [launch.in_place for launch in with_calls(capture.launches, same, capture.allocations, [])]
    assert found == [{(INPUT, 0)} if expected and nodes == 1 else set(), set()]
