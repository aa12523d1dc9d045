"""Random sequences of calls of real regions, replayed by the host driver, against the same region run uncaptured.

Two worlds with the same bytes: in one the region lives its life, in the other its function runs. After every call all
memory, outputs of earlier calls included, and the random state are equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.compare import observe
from pygraph.runtime.region import Region, RegionOptions
from pygraph.runtime.tensors import extent, span
from tests.runtime.fake import BYTES, EvenDriver
from tests.runtime.programs import KINDS, PROGRAMS, region_calls
from tests.runtime.regions import RegionCall

OFFSETS = (0, 4, 16, 36, 64)
"""Bytes that an argument may lie behind the start of its memory: some aligned to a replay's 16 bytes, some not."""


@dataclass(frozen=True)
class Place:
    """Where an argument lies: in memory ``memory`` from byte ``offset`` on. ``same``: it is that earlier argument."""

    memory: int
    offset: int
    same: int | None = None


@dataclass
class World:
    """Memory, as flat uint8 tensors: of arguments, and of every output returned so far."""

    memories: list[torch.Tensor] = field(default_factory=list)

    def tensor(self, place: Place, like: torch.Tensor) -> torch.Tensor:
        """A tensor with the layout of ``like`` at ``place``."""
        memory = self.memories[place.memory]
        view = torch.empty(0, dtype=like.dtype)
        offset = memory.storage_offset() + place.offset
        assert offset % like.element_size() == 0
        return view.set_(memory.untyped_storage(), offset // like.element_size(), like.size(), like.stride())

    def keep(self, outputs: Sequence[Any]) -> None:
        """Enter the memory of outputs that is not known yet; bytes of it that no output shows become 0."""
        known = {memory.untyped_storage().data_ptr() for memory in self.memories}
        fresh: dict[int, list[torch.Tensor]] = {}
        for out in outputs:
            if isinstance(out, torch.Tensor) and extent(out) and out.untyped_storage().data_ptr() not in known:
                fresh.setdefault(out.untyped_storage().data_ptr(), []).append(out)
        for sharing in fresh.values():
            memory = span(sharing[0], whole=True)
            memory[~_shown(memory.numel(), sharing)] = 0
            self.memories.append(memory)


def _shown(nbytes: int, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which bytes of a storage are elements of ``outputs``."""
    shown = torch.zeros(nbytes, dtype=torch.bool)
    for out in outputs:
        size = out.element_size()
        elements = torch.arange(nbytes // size).as_strided(out.size(), out.stride(), out.storage_offset())
        shown[: nbytes // size * size].view(-1, size)[elements.reshape(-1)] = True
    return shown


class Machine:
    """A region and its reference, called with the same arguments in two worlds."""

    def __init__(self, call: RegionCall, **options: Any) -> None:
        self.fn = call.fn
        self.region = Region(call.fn, EvenDriver(), name="tested", options=RegionOptions(**options))
        self.worlds = (World(), World())
        self.seed = 0

    def add_memory(self, nbytes: int, values: torch.Tensor | None) -> int:
        """New memory in both worlds, with the bytes of ``values`` or new numbers; returns its number."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        numbers = torch.randn(nbytes // 4 + 32, generator=generator)
        for world in self.worlds:
            memory = numbers.clone().view(torch.uint8)
            if values is not None:
                memory[: extent(values)] = span(values)
            world.memories.append(memory)
        return len(self.worlds[0].memories) - 1

    def call(self, template: Sequence[Any], places: Sequence[Place | None]) -> None:
        """Call both with tensors at ``places`` (None: a value of ``template`` itself) and compare everything."""
        lists: list[list[Any]] = []
        for world in self.worlds:
            args: list[Any] = []
            for value, place in zip(template, places, strict=True):
                if place is None:
                    args.append(value)
                else:
                    args.append(world.tensor(place, value) if place.same is None else args[place.same])
            lists.append(args)
        before = torch.get_rng_state()
        expected, error = _run(self.fn, lists[1])
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        outputs, raised = _run(self.region, lists[0])
        assert raised == error
        assert torch.equal(torch.get_rng_state(), after)
        assert observe(outputs, lists[0]) == observe(expected, lists[1])
        for world, results in zip(self.worlds, (outputs, expected), strict=True):
            world.keep(results)
        for mine, reference in zip(self.worlds[0].memories, self.worlds[1].memories, strict=True):
            assert torch.equal(mine, reference)


def _run(fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> tuple[list[Any], str | None]:
    """Outputs of a call, or what it raised (an index out of bounds, say); its list of arguments is emptied."""
    handed = list(args)
    try:
        return list(fn(handed)), None
    except RuntimeError as error:
        return [], str(error)
    finally:
        assert handed == []


def draw_places(data: st.DataObject, machine: Machine, template: Sequence[Any]) -> list[Place | None]:
    """For each tensor: new memory, memory that was used (overlapping anything), or an earlier argument itself."""
    places: list[Place | None] = []
    for position, value in enumerate(template):
        if not isinstance(value, torch.Tensor):
            places.append(None)
            continue
        twins = [p for p in range(position) if _alike(template[p], value)]
        free = value.is_floating_point() and bool(machine.worlds[0].memories)
        how = data.draw(
            st.sampled_from(["new", *["old"] * 2 * free, *["same"] * bool(twins)]), label=f"argument {position}"
        )
        if how == "same":
            twin = data.draw(st.sampled_from(twins))
            origin = places[twin]
            assert origin is not None
            places.append(Place(origin.memory, origin.offset, twin))
        else:
            places.append(_draw_place(data, machine, value, old=how == "old"))
    return places


def _draw_place(data: st.DataObject, machine: Machine, value: torch.Tensor, *, old: bool) -> Place:
    offset = data.draw(st.sampled_from([o for o in OFFSETS if o % value.element_size() == 0]), label="offset")
    memories = machine.worlds[0].memories
    fitting = [i for i, memory in enumerate(memories) if _fits(memory, offset, value)]
    if old and fitting:
        return Place(data.draw(st.sampled_from(fitting), label="memory"), offset)
    exact = None if value.is_floating_point() else value
    offset = offset if exact is None else 0
    return Place(machine.add_memory(offset + extent(value), exact), offset)


def _fits(memory: torch.Tensor, offset: int, value: torch.Tensor) -> bool:
    start = memory.storage_offset() + offset
    return start % value.element_size() == 0 and offset + extent(value) <= memory.numel()


def _alike(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and (a.size(), a.stride(), a.dtype) == (b.size(), b.stride(), b.dtype)


def any_sequence(program: str, data: st.DataObject) -> None:
    for versions in region_calls(program):
        machine = Machine(versions[0], memory_limit=data.draw(st.sampled_from([1, 3])) * BYTES)
        for _ in range(data.draw(st.integers(3, 8), label="calls")):
            version = data.draw(st.sampled_from(versions))
            machine.call(version.args, draw_places(data, machine, version.args))
        assert not {"comparison-failed", "replay-raised", "capture-failed"}.intersection(machine.region.record.refusals)


@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=10, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_calls_equals_uncaptured_runs(program: str, data: st.DataObject) -> None:
    any_sequence(program, data)


@pytest.mark.sweep
@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=200)
@given(data=st.data())
def test_many_sequences_of_calls_equal_uncaptured_runs(program: str, data: st.DataObject) -> None:
    any_sequence(program, data)


@pytest.mark.parametrize("program", [*PROGRAMS, *KINDS])
def test_every_program_is_replayed_in_the_end(program: str) -> None:
    for versions in region_calls(program):
        machine = Machine(versions[0])
        for _ in range(4):
            for version in versions:
                places = [
                    Place(machine.add_memory(extent(v), None if v.is_floating_point() else v), 0)
                    if isinstance(v, torch.Tensor)
                    else None
                    for v in version.args
                ]
                machine.call(version.args, places)
        record = machine.region.record
        assert (record.state, record.refusals) == ("replay", {})
        assert record.uncaptured == 2 * record.captures - record.proven
        assert record.replays == 4 * len(versions) - record.uncaptured
