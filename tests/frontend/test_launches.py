"""Recorded launches as a graph: buffers, byte ranges, order; the same order as the runtime derives."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from pygraph.frontend import lift_launches
from pygraph.ir import BufferType, Device, Graph, Location, Stage
from pygraph.ir.order import dependences
from pygraph.runtime import ordering
from pygraph.runtime.driver import Layout, Program, Slot
from pygraph.runtime.host import HostDriver
from pygraph.runtime.layout import plan
from pygraph.runtime.recording import (
    Access,
    Allocation,
    AllocationKind,
    Launch,
    LaunchKind,
    Output,
    OutputKind,
    Recording,
)
from tests.frontend.capture import checked
from tests.runtime.host.replays import make_program
from tests.runtime.regions import compile_regions

INPUT, POOL, CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT
BASES = {INPUT: 0x1000, POOL: 0x100000, CONSTANT: 0x200000}
CPU = Device("cpu")


def address(kind: AllocationKind, index: int) -> int:
    return BASES[kind] + 0x100 * index


def read(word: int, nbytes: int, start: int = 0) -> Access:
    return Access(word, start, nbytes, True, False)


def write(word: int, nbytes: int, start: int = 0) -> Access:
    return Access(word, start, nbytes, False, True)


class Recorder:
    """Writes recordings by hand: a launch is a list of (kind, index, offset) places and their accesses."""

    def __init__(self, sizes: dict[tuple[AllocationKind, int], int]) -> None:
        self.allocations = [Allocation(kind, index, address(kind, index), n) for (kind, index), n in sizes.items()]
        self.launches: list[Launch] = []
        self.slots: list[Slot] = []

    def launch(
        self,
        name: str,
        places: Iterable[tuple[AllocationKind, int, int]],
        accesses: tuple[Access, ...] | None,
        kind: LaunchKind = LaunchKind.KERNEL,
        loc: str | None = None,
        random: bool = False,
        extra: tuple[int, ...] = (),
    ) -> None:
        number = len(self.launches)
        words = []
        for word, (owner, index, offset) in enumerate(places):
            words.append(address(owner, index) + offset)
            self.slots.append(Slot(number, word, owner, index, offset))
        self.launches.append(Launch(number, kind, name, (*words, *extra), None, accesses, loc, random))

    def recording(self, *outputs: Output) -> Recording:
        return Recording(tuple(self.launches), tuple(self.allocations), outputs)

    def lift(self, *outputs: Output, layout: Layout | None = None, disjoint: bool = True) -> Graph:
        recording = self.recording(*outputs)
        return checked(lift_launches(recording, self.slots, layout, disjoint_arguments=disjoint))


def edges(graph: Graph) -> set[tuple[str, str]]:
    return {(a.name, b.name) for a, b in dependences(graph)}


def two_step() -> Recorder:
    """in → intermediate → out, with a constant."""
    recorder = Recorder({(INPUT, 0): 64, (CONSTANT, 0): 16, (POOL, 0): 64, (POOL, 1): 32})
    recorder.launch("cpp_fused_add_0", [(INPUT, 0, 0), (POOL, 0, 0)], (read(0, 64), write(1, 64)), loc="m.py:7")
    recorder.launch(
        "aten.mm.out",
        [(POOL, 0, 16), (CONSTANT, 0, 0), (POOL, 1, 0)],
        (read(0, 32), read(1, 16), write(2, 32)),
        kind=LaunchKind.OPERATOR,
    )
    return recorder


FRESH = Output(OutputKind.FRESH, allocation=1)


def test_allocations_are_buffers() -> None:
    graph = two_step().lift(FRESH)
    assert (graph.kind, graph.stage) == ("launches", Stage.RECORDED)
    assert [(v.name, v.type, v.role, v.static) for v in graph.inputs] == [
        ("arg0", BufferType(64, CPU), "input", False),
        ("constant0", BufferType(16, CPU), "constant", True),
        ("pool0", BufferType(64, CPU), "buffer", False),
        ("pool1", BufferType(32, CPU), "buffer", False),
    ]
    assert graph.outputs == (graph.value("pool1"),)


def test_launches_are_nodes_with_ranges() -> None:
    graph = two_step().lift(FRESH)
    add, mm = graph.nodes
    assert (add.name, add.op, add.loc) == ("launch0", "kernel.cpp_fused_add_0", Location("m.py", 7))
    assert (mm.name, mm.op, mm.loc) == ("launch1", "operator.aten.mm.out", None)
    assert [value.name for value in mm.inputs] == ["pool0", "constant0", "pool1"]
    assert mm.attrs["ranges"] == ((16, 32), (0, 16), (0, 32))
    assert (mm.effects.reads, mm.effects.writes) == ((0, 1), (2,))
    assert (mm.cost.flops, mm.cost.read, mm.cost.written, mm.cost.launches) == (None, 48, 32, 1)
    assert edges(graph) == {("launch0", "launch1")}


def test_a_layout_puts_intermediates_in_a_workspace() -> None:
    layout = Layout(256, {0: 128}, (1,))
    graph = two_step().lift(FRESH, layout=layout)
    assert [value.name for value in graph.inputs] == ["arg0", "constant0", "pool1", "workspace"]
    assert graph.value("workspace").type == BufferType(256, CPU)
    assert graph.nodes[1].attrs["ranges"] == ((128 + 16, 32), (0, 16), (0, 32))


def test_reuse_of_the_workspace_orders_what_data_does_not() -> None:
    recorder = Recorder({(INPUT, 0): 64, (POOL, 0): 64, (POOL, 1): 64, (POOL, 2): 8, (POOL, 3): 8})
    for number in (0, 1):
        recorder.launch("k", [(INPUT, 0, 0), (POOL, number, 0)], (read(0, 64), write(1, 64)))
        recorder.launch("k", [(POOL, number, 0), (POOL, number + 2, 0)], (read(0, 64), write(1, 8)))
    assert edges(recorder.lift()) == {("launch0", "launch1"), ("launch2", "launch3")}
    shared = Layout(64, {0: 0, 1: 0}, (2, 3))
    assert ("launch1", "launch2") in edges(recorder.lift(layout=shared))


def test_disjoint_halves_of_one_buffer_are_independent() -> None:
    recorder = Recorder({(POOL, 0): 64})
    recorder.launch("low", [(POOL, 0, 0)], (write(0, 32),))
    recorder.launch("high", [(POOL, 0, 32)], (write(0, 32),))
    recorder.launch("across", [(POOL, 0, 16)], (read(0, 32),))
    assert edges(recorder.lift()) == {("launch0", "launch2"), ("launch1", "launch2")}


def test_a_word_may_be_read_and_written_in_places() -> None:
    recorder = Recorder({(POOL, 0): 64})
    recorder.launch("k", [(POOL, 0, 0)], (read(0, 32), write(0, 32, 32), Access(0, 0, 0, True, True)))
    node = recorder.lift().nodes[0]
    assert node.attrs["ranges"] == ((0, 32), (32, 32))
    assert (node.effects.reads, node.effects.writes) == ((0,), (1,))


def test_unknown_accesses_are_a_barrier_that_writes_all_it_is_given() -> None:
    recorder = Recorder({(INPUT, 0): 64, (POOL, 0): 64, (POOL, 1): 64})
    recorder.launch("before", [(POOL, 1, 0)], (write(0, 64),))
    recorder.launch("unknown", [(INPUT, 0, 0), (POOL, 0, 8), (POOL, 0, 16)], None)
    recorder.launch("after", [(POOL, 1, 0)], (read(0, 64),))
    graph = recorder.lift()
    unknown = graph.nodes[1]
    assert [value.name for value in unknown.inputs] == ["arg0", "pool0"]
    assert unknown.attrs["ranges"] == (None, None)
    assert (unknown.effects.writes, unknown.effects.barrier) == ((0, 1), True)
    assert (unknown.cost.read, unknown.cost.written) == (None, None)
    assert {("launch0", "launch1"), ("launch1", "launch2")} <= edges(graph)


def test_draws_keep_their_order() -> None:
    recorder = Recorder({(POOL, 0): 8, (POOL, 1): 8})
    for number in (0, 1):
        recorder.launch("rand", [(POOL, number, 0)], (write(0, 8),), random=True)
    graph = recorder.lift()
    assert [node.effects.rng for node in graph.nodes] == ["cpu", "cpu"]
    assert edges(graph) == {("launch0", "launch1")}


def test_copies_and_fills() -> None:
    recorder = Recorder({(POOL, 0): 8, (POOL, 1): 8})
    recorder.launch("memset", [(POOL, 0, 0)], (write(0, 8),), kind=LaunchKind.MEMSET)
    recorder.launch("memcpy", [(POOL, 0, 0), (POOL, 1, 0)], (read(0, 8), write(1, 8)), kind=LaunchKind.MEMCPY)
    assert [node.op for node in recorder.lift().nodes] == ["memset", "memcpy"]


def test_addresses_of_nobody_are_fixed_buffers() -> None:
    recorder = Recorder({(POOL, 0): 8})
    recorder.launch("k", [(POOL, 0, 0)], (write(0, 8), read(1, 16)), extra=(0x900000,))
    recorder.launch("k", [(POOL, 0, 0)], (read(0, 8), write(1, 16)), extra=(0x900008,))
    recorder.launch("k", [(POOL, 0, 0)], (read(0, 8), read(1, 8)), extra=(0xA00000,))
    graph = recorder.lift()
    assert [(v.name, v.type) for v in graph.inputs[1:]] == [
        ("fixed0", BufferType(24, CPU)),
        ("fixed1", BufferType(8, CPU)),
    ]
    assert [node.attrs["ranges"][1] for node in graph.nodes] == [(0, 16), (8, 16), (0, 8)]  # type: ignore[index]
    assert "0x9" not in str(graph)


def test_results_are_buffers_literals_or_none() -> None:
    graph = two_step().lift(
        FRESH,
        Output(OutputKind.ARGUMENT, argument=0),
        Output(OutputKind.VIEW, argument=0),
        Output(OutputKind.SCALAR, value=7),
        Output(OutputKind.SCALAR, value=None),
        Output(OutputKind.CONSTANT_TENSOR, value=object()),
    )
    pool, arg = graph.value("pool1"), graph.value("arg0")
    assert graph.outputs == (pool, arg, arg, 7, None, None)


@pytest.mark.parametrize("loc", [None, "", "nowhere", "m.py:", "m.py:x"])
def test_places_without_a_line_are_no_locations(loc: str | None) -> None:
    recorder = Recorder({(POOL, 0): 8})
    recorder.launch("k", [(POOL, 0, 0)], (write(0, 8),), loc=loc)
    assert recorder.lift().nodes[0].loc is None


def test_another_device() -> None:
    recorder = two_step()
    graph = lift_launches(recorder.recording(FRESH), recorder.slots, device=Device("cuda", 0))
    assert {value.type for value in graph.inputs} >= {BufferType(64, Device("cuda", 0))}


# -- order -------------------------------------------------------------------------------------------------------------


def test_arguments_may_overlap_unless_told_otherwise() -> None:
    recorder = Recorder({(INPUT, 0): 8, (INPUT, 1): 8, (INPUT, 2): 8, (POOL, 0): 8})
    recorder.launch("read", [(INPUT, 0, 0)], (read(0, 8),))
    recorder.launch("write", [(INPUT, 1, 0)], (write(0, 8),))
    recorder.launch("read", [(INPUT, 2, 0)], (read(0, 8),))
    recorder.launch("else", [(POOL, 0, 0)], (write(0, 8),))
    assert edges(recorder.lift(disjoint=True)) == set()
    assert edges(recorder.lift(disjoint=False)) == {("launch0", "launch1"), ("launch1", "launch2")}


PLACES = st.tuples(
    st.sampled_from([(INPUT, 0), (INPUT, 1), (POOL, 0), (POOL, 1), (POOL, 2), (CONSTANT, 0)]),
    st.integers(0, 3),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
STEPS = st.lists(st.tuples(st.lists(PLACES, max_size=3), st.booleans(), st.integers(0, 9)), max_size=8)


def random_recorder(
    steps: list[tuple[list[tuple[tuple[AllocationKind, int], int, int, bool, bool]], bool, int]],
) -> Recorder:
    recorder = Recorder(dict.fromkeys([(INPUT, 0), (INPUT, 1), *((POOL, i) for i in range(3)), (CONSTANT, 0)], 64))
    for touched, random, chance in steps:
        places = [(kind, index, 8 * offset) for (kind, index), offset, *_ in touched]
        accesses = tuple(Access(w, 0, 8 * n, r, wr) for w, (_, _, n, r, wr) in enumerate(touched))
        recorder.launch("k", places, None if chance == 0 else accesses, random=random and chance != 0)
    return recorder


@given(STEPS, st.booleans(), st.sampled_from(["none", "reuse", "apart"]))
@budget(deadline=None, max_examples=200)
def test_the_order_is_the_one_that_the_runtime_derives(
    steps: list[tuple[list[tuple[tuple[AllocationKind, int], int, int, bool, bool]], bool, int]],
    disjoint: bool,
    placing: str,
) -> None:
    recorder = random_recorder(steps)
    recording = recorder.recording(Output(OutputKind.FRESH, allocation=2))
    layout = None if placing == "none" else plan(recording, recorder.slots, reuse=placing == "reuse")
    lifted = lift_launches(recording, recorder.slots, layout, disjoint_arguments=disjoint)
    checked(lifted)
    ours = closure(len(steps), [(int(a[6:]), int(b[6:])) for a, b in edges(lifted)])
    final = layout or Layout(0, {}, (0, 1, 2))
    theirs = ordering.dependences(recording, recorder.slots, final, inputs_may_overlap=not disjoint)
    assert ours == closure(len(steps), theirs)


def closure(count: int, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(pairs)
    return set(networkx.transitive_closure_dag(graph).edges)


def test_a_long_chain_stays_a_chain() -> None:
    recorder = Recorder({(POOL, i): 8 for i in range(101)})
    for number in range(3000):
        source, target = number % 100, number % 100 + 1
        recorder.launch("k", [(POOL, source, 0), (POOL, target, 0)], (read(0, 8), write(1, 8)))
    graph = lift_launches(recorder.recording(), recorder.slots)
    found = edges(graph)
    assert len(graph) == 3000
    assert all((a.name, b.name) in found for a, b in pairwise(graph.nodes[:99]))


# -- what the host driver records --------------------------------------------------------------------------------------


def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(torch.addmm(b, x, w))
    seen.add_(hidden.sum(0))
    return torch.softmax(torch.nn.functional.dropout(hidden, 0.5) @ w.t(), -1)


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.no_grad():
        compiled = compile_regions(step)
        compiled.call(torch.randn(8, 16), torch.randn(16, 4), torch.randn(4), torch.zeros(4))
    call = compiled.regions[0]
    return make_program(HostDriver(), call.fn, call.args)


@pytest.mark.parametrize("disjoint", [True, False])
def test_a_region_of_inductor_is_lifted_with_its_order(program: Program, disjoint: bool) -> None:
    recording = program.recording
    graph = checked(
        lift_launches(recording, program.slots, program.layout, disjoint_arguments=disjoint),
    )
    assert [node.op.split(".", 1)[-1] for node in graph.nodes] == [launch.name for launch in recording.launches]
    ours = closure(len(graph), [(int(a[6:]), int(b[6:])) for a, b in edges(graph)])
    theirs = ordering.dependences(recording, program.slots, program.layout, inputs_may_overlap=not disjoint)
    assert ours == closure(len(graph), theirs)
    assert any(node.effects.writes for node in graph.nodes)
    assert not any(node.effects.barrier for node in graph.nodes)


def test_the_text_of_a_region_holds_no_address(program: Program) -> None:
    text = str(lift_launches(program.recording, program.slots, program.layout))
    words = {word for launch in program.recording.launches for word in launch.words}
    addresses = {word for word in words if word > 1 << 20}
    assert addresses
    assert not any(str(word) in text or f"{word:x}" in text for word in addresses)
