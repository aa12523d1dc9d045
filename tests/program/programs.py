"""Launch programs for tests: captured by the host driver, and made up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from pygraph.program.dependences import in_lanes, order_of
from pygraph.program.loops import LoopPasses
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, Geometry, Origin, Recording
from pygraph.program.steps import with_steps
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.host import HostDriver
from tests.program.layouts import plan
from tests.runtime.captures import Capture, reads, writes
from tests.runtime.programs import region_calls

__all__ = ["CAPTURED", "made_up", "recordings"]

INPUT, POOL, CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT


def calling(args: list[Any]) -> Sequence[Any]:
    """Two eager calls between segments: one draws, the other returns a pair."""
    x, w = args
    args.clear()
    noisy = torch.bernoulli(torch.sigmoid(torch.mm(x, w)))
    hidden = torch.mm(noisy, w)
    values, indices = torch.sort(hidden)
    return [torch.mm(values, w), hidden[1:], indices, x, 3]


def drawing(args: list[Any]) -> Sequence[Any]:
    """Draws in place, and one that is returned."""
    (x,) = args
    args.clear()
    return [torch.relu(x).uniform_() + torch.rand(4, 4), torch.randn(4)]


def mutating(args: list[Any]) -> Sequence[Any]:
    """Writes its arguments, and returns views of them."""
    x, y = args
    args.clear()
    hidden = torch.relu(x[2:])
    y.t().mul_(2.0)
    x[:2].copy_(torch.mm(y, y)[:2])
    return [torch.mm(hidden, y), y, x[1:]]


def iterating(args: list[Any]) -> Sequence[Any]:
    """An iteration of a loop: a state that is written anew, and what ends the loop."""
    state, weight, control = args
    args.clear()
    state.copy_(torch.tanh(torch.mm(state, weight)) + torch.sin(weight))
    control[2:].copy_(state.sum().reshape(1) > 8)
    return [3]


def looping(order: str) -> Callable[[], Program]:
    """A loop over ``iterating``."""

    @functools.cache
    def make() -> Program:
        args = [torch.randn(4, 4), torch.randn(4, 4), torch.tensor([0, 3, 0])]
        found = capture(iterating, HostDriver(), args, None, (), order, LoopPasses(2), name="loop")
        assert isinstance(found, Captured), found
        return found.program

    return make


def of(fn: Any, sizes: Sequence[Sequence[int]], eager: Sequence[str] = (), **options: Any) -> Callable[[], Program]:
    """The program of ``fn`` on arguments of ``sizes``."""

    @functools.cache
    def make() -> Program:
        found = capture(fn, HostDriver(), [torch.randn(*size) for size in sizes], None, eager, **options)
        assert isinstance(found, Captured), found
        return found.program

    return make


def compiled(name: str) -> Callable[[], Program]:
    """The first region of one of the small programs that Inductor compiles for the runtime's tests."""

    def make() -> Program:
        call = region_calls(name)[0][0]
        return of(call.fn, ())() if not call.args else _program(call.fn, tuple(call.args))

    return functools.cache(make)


def _program(fn: Any, args: Sequence[Any]) -> Program:
    found = capture(fn, HostDriver(), list(args), name=fn.__name__, held=frozenset([0]))
    assert isinstance(found, Captured), found
    return found.program


def empty(args: list[Any]) -> Sequence[Any]:
    """Returns views without elements, one of which begins beyond its memory."""
    (x,) = args
    args.clear()
    hidden = torch.relu(x)
    return [torch.as_strided(hidden, (0, 4), (4, 1), 400), hidden[4:], torch.mm(x, x[:, :0]), hidden]


def given(args: list[Any]) -> Sequence[Any]:
    """An eager call that is given the caller's own argument, and returns it."""
    x, w = args
    args.clear()
    return [torch.mm(x.cos_(), w)]


EAGER = ("aten.bernoulli", "aten.sort")
CAPTURED: dict[str, Callable[[], Program]] = {
    "calling": of(calling, [(4, 4), (4, 4)], EAGER, name="net.region0", lent=frozenset([1])),
    "calling in order": of(calling, [(4, 4), (4, 4)], EAGER, order="dependences"),
    "given": of(given, [(4, 4), (4, 4)], ("aten.cos_",)),
    "empty": of(empty, [(4, 4)]),
    "drawing": of(drawing, [(4, 4)]),
    "looping": looping("program"),
    "looping in order": looping("dependences"),
    "mutating": of(mutating, [(4, 4), (4, 4)]),
    **{name: compiled(name) for name in ("mlp", "branches", "planned", "draws", "cache", "train")},
}
"""Programs of the host driver, by what is special about them."""


# -- made up -----------------------------------------------------------------------------------------------------------

USE = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.booleans())
"""An allocation of 8 bytes, where in it, how many bytes, and whether they are written."""


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Recording, list[Slot]]:
    capture = Capture()
    starts = [capture.input(8), capture.pool(8), capture.pool(8), capture.constant(0x5500_0000_0000, 8)]
    keys = [(INPUT, 0), (POOL, 0), (POOL, 1)]
    slots: list[Slot] = []
    for index in range(draw(st.integers(1, 12))):
        used = draw(st.lists(USE, min_size=1, max_size=3))
        words = [starts[owner] + at for owner, at, _, _ in used]
        kind = draw(st.sampled_from(["exact", "exact", "operands", "unknown", "random", "collective"]))
        slots += [Slot(index, w, *keys[use[0]], use[1]) for w, use in enumerate(used) if use[0] < len(keys)]
        exact = [writes(w, n) if written else reads(w, n) for w, (_, _, n, written) in enumerate(used)]
        given = [Access([*keys, (CONSTANT, 0)][o], Bytes(at, at + n), written) for o, at, n, written in used]
        facts: dict[str, Any] = {"random": kind == "random"}
        if kind in ("operands", "collective"):
            facts["operands"] = tuple(given)
        if kind == "collective":
            facts["call"] = "_c10d_functional.all_reduce_.default"
        capture.launch(*words, uses=exact if kind in ("exact", "random") else None, **facts)
    return capture.recording(), slots


texts = st.text(max_size=4)
keys = st.frozensets(st.sampled_from([(INPUT, 0), (POOL, 0), (POOL, 1), (CONSTANT, 0)]), max_size=3)


@st.composite
def made_up(draw: st.DrawFn) -> Program:
    """A program with facts of every kind, of which no driver would record all."""
    recording, slots = draw(recordings())
    count = len(recording.launches)
    launches = [
        replace(
            launch,
            name=draw(texts),
            signature=draw(st.sampled_from("ab")),
            origin=Origin(*(tuple(draw(st.lists(texts, max_size=2))) for _ in range(3))),
            read_only=draw(keys),
            in_place=draw(keys),
            may_access=draw(st.none() | keys),
            group=draw(st.none() | st.integers(0, 3)),
            nondeterministic=draw(st.booleans()),
            geometry=draw(st.none() | st.builds(Geometry, st.just((4, 1, 1)), st.just((32, 2, 1)), st.integers(0, 9))),
        )
        for launch in recording.launches
    ]
    views = [replace(recording.allocations[-1], index=1, address=recording.allocations[-1].address + 4)]
    phases = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    recording = replace(
        recording,
        launches=tuple(launches),
        allocations=(*recording.allocations, *views),
        alignment=draw(st.sampled_from([8, 64])),
        out_of_range_pointers=draw(st.booleans()),
        scratch=draw(st.sampled_from([0, 1 << 40])),
        phases=tuple(accumulate(phases)) if draw(st.booleans()) else (),
        offset_sensitive=frozenset([0]) if draw(st.booleans()) else frozenset(),
    )
    order = draw(st.sampled_from([None, order_of(recording, slots), in_lanes(order_of(recording, slots), 2)]))
    program = Program(recording, tuple(slots), plan(recording, slots, order), name=draw(texts), order=order)
    return with_steps(program) if draw(st.booleans()) else program
