"""The native half of the CUDA driver, compiled against simulated CUDA libraries: allocations, launches, and locks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import forked
from tests.runtime.cuda.simulated import simulated

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="tests/gpu runs the real one")

PRELUDE = """
import faulthandler, gc, importlib.util, os, sys
sys.setdlopenflags(os.RTLD_LAZY)  # what is never called here is not simulated
import torch
from dataclasses import replace
from pygraph.program.recording import Output, OutputKind, TensorLayout
from pygraph.runtime.description import (
    Argument, Block, Call, CallOperand, CallResult, OperandKind, Patch, RegionDescription, RegionStep)
spec = importlib.util.spec_from_file_location("simulated", sys.argv[1])
cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda)
faulthandler.dump_traceback_later(60, exit=True)  # a deadlock fails

LOOPLESS = {"advancing": (0, 0), "advances": False}


def capture(run, arena=1 << 40):
    session = cuda.Session(0, 0, arena, 2 * arena, 512, print)
    session.begin()
    try:
        return run()
    finally:
        session.end()


BYTES = TensorLayout((8,), (1,), torch.uint8)


def bytes_of(owned):
    return Output(OutputKind.FRESH, owned, 0, (8,), (1,), torch.uint8)
"""


@pytest.fixture(scope="module")
def library() -> Path:
    """The module, compiled."""
    return simulated().build()


def run(library: Path, code: str) -> list[str]:
    """The lines that ``code`` prints in a process of its own where ``cuda`` is the simulated module."""
    done = forked.run(f"{PRELUDE}\n{code}\nsys.stdout.flush()\nos._exit(0)", library)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


# -- progress of a capture ---------------------------------------------------------------------------------------------


def test_nodes_are_counted_while_a_capture_is_intact(library: Path) -> None:
    code = """
session, graph = cuda.Session(0, 0, 1 << 40, 1 << 41, 512, print), cuda.graph()
print(session.nodes())
cuda.capturing(graph, False)
print(session.nodes())
cuda.add_fill(graph, 1 << 40, 7, 8)
print(session.nodes())
cuda.capturing(graph, True)
print(session.nodes())
"""
    assert run(library, code) == ["None", "0", "1", "None"]


def test_the_stack_is_cleared_below_the_next_call(library: Path) -> None:
    code = """
cuda.mark_stack()
print(cuda.marks() > 30000)
cuda.wipe_stack()
print(cuda.marks() < 300)  # what lies above what is cleared
"""
    assert run(library, code) == ["True", "True"]


# -- memory while capturing -------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_raw_memory_kept_beyond_captures_leaves_others_working_until_the_ordinary_allocator_returns(
    library: Path,
) -> None:
    code = """
kept = [capture(lambda: cuda.raw_alloc(64), arena) for arena in (1 << 40, 1 << 41)]
print(kept[0] >= 1 << 40, kept[1] >= 1 << 41)
ordinary = cuda.raw_alloc(8)
print(cuda.alive())
cuda.raw_delete(ordinary)
for address in kept:
    print(cuda.installed(), cuda.alive())
    cuda.raw_delete(address)
print(cuda.installed(), cuda.alive())
capture(lambda: cuda.raw_delete(cuda.raw_alloc(64)))
print(cuda.installed())
"""
    assert run(library, code) == ["True True", "1", "True 0", "True 0", "False 0", "False"]


def test_what_a_broken_capture_has_begun_is_ended_where_torch_has_not_done_so(library: Path) -> None:
    code = """
cuda.break_capture((0, 3))
cuda.break_capture((0, 4))
print(cuda.pools())
cuda.end_broken_capture(0, (0, 3))
print(cuda.pools())
cuda.end_broken_capture(0, (0, 3))
print(cuda.pools())
"""
    assert run(library, code) == ["8", "4", "4"]


# -- replays -----------------------------------------------------------------------------------------------------------

TWO_SEGMENTS = """
def region(in_first=False, random=False, dead=(), stop=None):
    '''Fills argument 0 with sevens, and copies argument 1 to the output by way of an intermediate: in two segments, or
    in the first of them.'''
    captured = [cuda.tensor(8, False).data_ptr() for _ in range(4)]
    graph, later, segment = cuda.Graph(True), cuda.graph(), 0 if in_first else 1
    fill = cuda.add_fill(graph.raw(), captured[0], 7, 8)
    target = graph.raw() if in_first else later
    copies = [cuda.add_copy(target, captured[3], captured[1], 8), cuda.add_copy(target, captured[2], captured[3], 8)]
    nodes = [cuda.FillNode(fill, 0), *(cuda.CopyNode(copy, segment) for copy in copies)]
    written, read = (Patch(0, 0, 0),), (Patch(1, 1, 0),)
    between, fresh = (Patch(1, 0, 0), Patch(2, 1, 0)), (Patch(2, 0, 0),)
    steps = [RegionStep(dead=dead), RegionStep()]
    steps[segment] = replace(steps[segment], blocks=(Block(8, segment, between),), taken=((0, 8),))
    first, second = (cuda.tensor(8, False) for _ in range(2))
    arguments = (Argument(first, written, written=True, nbytes=8), Argument(second, read, nbytes=8))
    described = RegionDescription("", arguments, (fresh,), tuple(steps), (bytes_of(0),))
    segments = [(0, 0), (later, cuda.instance(later))]
    facts = {"random": random, "offset": 0, "segments": segments, "nodes": nodes, **LOOPLESS, "stop": stop}
    return cuda.CudaRegion(described, graph=graph, device=0, **facts)


def filled(value, mapped=False):
    tensor = cuda.tensor(8, mapped)
    cuda.write(tensor, value)
    return tensor


def call(made, value, mapped=False):
    '''What a call does to argument 0, and what it returns, as numbers; None where it is declined.'''
    target = filled(1)
    returned = made.replay([target, filled(value, mapped)])
    return cuda.read(target)[0], None if returned is None else cuda.read(returned[0])[0]


"""


def test_a_later_copy_that_refuses_an_address_does_not_stop_a_replay_half_way(library: Path) -> None:
    code = """
made = region()
for value, mapped in ((2, False), (3, True), (4, True), (5, False)):
    print(*call(made, value, mapped))
"""
    assert run(library, TWO_SEGMENTS + code) == ["7 2", "7 3", "7 4", "7 5"]


def test_a_first_copy_that_refuses_an_address_declines_that_call_alone(library: Path) -> None:
    code = """
made = region(in_first=True)
for value, mapped in ((2, False), (3, True), (4, False)):
    print(*call(made, value, mapped))
"""
    assert run(library, TWO_SEGMENTS + code) == ["7 2", "1 None", "7 4"]


def test_an_allocation_that_fails_between_segments_raises_and_later_calls_are_right(
    library: Path,
) -> None:
    code = """
made = region()
print(*call(made, 2))
args = [filled(1), filled(3)]
cuda.refuse_after(0)
try:
    made.replay(args)
except torch.OutOfMemoryError as error:
    print(type(error).__name__)
for value in (4, 5):
    print(*call(made, value))
"""
    assert run(library, TWO_SEGMENTS + code) == ["7 2", "OutOfMemoryError", "7 4", "7 5"]


def test_what_is_freed_between_segments_may_call_another_region_that_draws(library: Path) -> None:
    code = """
import weakref
outer, inner, seen = region(random=True, dead=(0,)), region(random=True), []
args = [filled(1), filled(2)]
weakref.finalize(args[0], lambda: seen.append(call(inner, 3)))
returned = outer.replay(args)
print(seen, cuda.read(returned[0])[0])
print(*call(inner, 4), *call(outer, 5))
"""
    assert run(library, TWO_SEGMENTS + code) == ["[(1, None)] 2", "7 4 7 5"]


STOPS = """
import ctypes, signal, threading


def word(stop):
    return ctypes.c_uint32.from_address(stop.address).value


def interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


stops = [cuda.Stop() for _ in range(3)]
regions = [region(stop=stop) for stop in stops]
"""


def test_ctrl_c_ends_loops_of_the_main_thread(library: Path) -> None:
    code = """
print(interrupted(), *map(word, stops))  # nothing was launched, and nobody listens
print(call(regions[0], 4))
thread = threading.Thread(target=call, args=(regions[1], 4))
thread.start()
thread.join()
print(interrupted(), *map(word, stops))
waits = cuda.waits()
print(call(regions[0], 5), cuda.waits() - waits, *map(word, stops))
print(call(regions[1], 5), cuda.waits() - waits, *map(word, stops))
"""
    lines = ["True 2 2 2", "(7, 4)", "True 1 2 2", "(7, 5) 1 0 2 2", "(7, 5) 1 0 2 2"]
    assert run(library, TWO_SEGMENTS + STOPS + code) == lines


def test_a_handler_that_does_not_raise_ends_no_loop(library: Path) -> None:
    code = """
handled = []
call(regions[0], 4)
signal.signal(signal.SIGINT, lambda *_: handled.append(1))
print(interrupted(), handled, word(stops[0]))
call(regions[0], 4)
print(interrupted(), handled, word(stops[0]))
signal.signal(signal.SIGINT, signal.default_int_handler)
call(regions[0], 4)
print(interrupted(), handled, word(stops[0]))
"""
    lines = ["False [1] 0", "False [1, 1] 0", "True [1, 1] 1"]
    assert run(library, TWO_SEGMENTS + STOPS + code) == lines


def test_a_word_is_used_again_once_its_loop_has_ended(library: Path) -> None:
    code = """
cuda.ended(False)
address = stops[0].address
stops[0] = regions[0] = None
gc.collect()
print(cuda.Stop().address == address)
cuda.ended(True)
print(cuda.Stop().address == address)
many = [cuda.Stop() for _ in range(2000)]
print(len({each.address for each in many}), len({each.address for each in many[1500:]}))
"""
    assert run(library, TWO_SEGMENTS + STOPS + code) == ["False", "True", "1022 1"]


def test_a_capture_turns_away_replays_that_draw_and_other_captures(library: Path) -> None:
    code = """
import threading
drawing, other = region(random=True), region()
with cuda.RandomTurn(0, 0) as mine:
    with cuda.RandomTurn(0, 0) as second:
        print(mine, second)
    elsewhere = threading.Thread(target=lambda: print(*call(drawing, 2), *call(other, 3)))
    elsewhere.start()
    elsewhere.join()
print(*call(drawing, 4))
"""
    assert run(library, TWO_SEGMENTS + code) == ["True False", "1 None 7 3", "7 4"]


# -- eager calls -------------------------------------------------------------------------------------------------------

CALLING = """
library = torch.library.Library("simulated", "DEF")
runs, answers = [], []


def twice(x):
    runs.append(cuda.read(x)[0])
    if cuda.read(x)[0] == 99:
        raise ValueError("ninety-nine")
    y = cuda.tensor(8, False)
    cuda.write(y, 2 * cuda.read(x)[0])
    return y


def overwrite(x):
    cuda.write(x, cuda.read(x)[0] + 1)


for schema, kernel in (("twice(Tensor x) -> Tensor", twice), ("overwrite(Tensor(a!) x) -> ()", overwrite)):
    library.define(schema)
    library.impl(schema.partition("(")[0], kernel, "CUDA")


def calling():
    '''Copies the argument to an intermediate, calls an operator with that, copies its result to another one, has it
    overwritten, and copies it to the output.'''
    captured = [cuda.tensor(8, False) for _ in range(5)]
    places = [each.data_ptr() for each in captured]
    first, later, last = cuda.Graph(True), cuda.graph(), cuda.graph()
    copies = [cuda.add_copy(graph, places[to], places[to - 1], 8)
              for graph, to in ((first.raw(), 1), (later, 3), (last, 4))]
    nodes = [cuda.CopyNode(copy, segment) for segment, copy in enumerate(copies)]
    calls = [cuda.OperatorCall(f"simulated::{name}", "", (torch.empty(1),), {}) for name in ("twice", "overwrite")]
    twice, overwrite = (
        Call(call, (0,), (CallOperand(OperandKind.OWNED, BYTES, owned),), results)
        for call, owned, results in zip(calls, (0, 2), ((CallResult(BYTES, True, 1, nbytes=8),), ()))
    )
    # what eager calls are given and return, what is copied from that, and the output
    owned = ((Patch(0, 0, 0),), (Patch(1, 1, 0),), (Patch(1, 0, 0), Patch(2, 1, 0)), (Patch(2, 0, 0),))
    steps = (
        RegionStep(taken=((0, 8),), dead=(0,)),
        RegionStep(twice, released=(0,)),
        RegionStep(taken=((2, 8),), released=(1,)),
        RegionStep(overwrite),
        RegionStep(taken=((3, 8),), released=(2,)),
    )
    argument = Argument(captured[0], (Patch(0, 1, 0),), nbytes=8)
    described = RegionDescription("", (argument,), owned, steps, (bytes_of(3),))
    segments = [(0, 0), (later, cuda.instance(later)), (last, cuda.instance(last))]
    facts = {"random": False, "offset": 0, "segments": segments, "nodes": nodes, **LOOPLESS, "stop": None}
    return cuda.CudaRegion(described, graph=first, device=0, **facts)


def filled(value):
    tensor = cuda.tensor(8, False)
    cuda.write(tensor, value)
    return tensor


made = calling()
"""


def test_an_operator_is_called_between_segments_with_memory_that_is_let_go_of(library: Path) -> None:
    code = """
before = cuda.alive()
for value in (3, 4, 5):
    (output,) = made.replay([filled(value)])
    print(cuda.read(output)[0], runs, cuda.alive() - before)
    del output
"""
    assert run(library, CALLING + code) == ["7 [3] 1", "9 [3, 4] 1", "11 [3, 4, 5] 1"]


def test_an_operator_that_raises_ends_the_call_and_not_the_region(library: Path) -> None:
    code = """
before = cuda.alive()
for value in (3, 99, 4):
    try:
        said = cuda.read(made.replay([filled(value)])[0])[0]
    except ValueError as error:
        said = str(error)
    print(said, cuda.alive() - before)
"""
    assert run(library, CALLING + code) == ["7 0", "ninety-nine 0", "9 0"]


def test_an_eager_call_is_answered_in_the_operators_place(library: Path) -> None:
    code = """
given, results = [], [[filled(20)], []]


def answer(tensors):
    given.append([cuda.read(tensor)[0] for tensor in tensors])
    return results.pop(0)


(output,) = made.replay_answered([filled(3)], answer)
print(cuda.read(output)[0], given, runs)
"""
    assert run(library, CALLING + code) == ["20 [[3], [20]] []"]
