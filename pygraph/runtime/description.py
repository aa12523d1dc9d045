"""Description of a native region: the region is constructed from it once, and does not change.

    arguments   x: f32[4] in 16 bytes, written                     patches: launch 0, place 1
    owned       memory 0: an output's                              patches: launch 1, place 0
    steps       segment, block of 64 bytes; takes memory 0         patches: launch 0, place 0; launch 1, place 1
                call mylib.op; releases x
    outputs     memory 0, f32[4]

Every source of an address has ``patches``: the places that hold it. Native code reads the fields below, and those of
``recording.Output`` and ``recording.TensorLayout``, by name (``native/region.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from pygraph.program.nested import has_order
from pygraph.program.program import EagerStep, Program, Slot
from pygraph.program.recording import WAIT, AllocationKind, Output, OutputKind, TensorLayout


@dataclass(frozen=True, slots=True)
class Patch:
    """A place that holds an address.

    Args:
        launch: number of the launch, in the driver's list
        place: position in that launch, as numbered by the driver
        delta: bytes from the start of the memory to the address
    """

    launch: int
    place: int
    delta: int


@dataclass(frozen=True, slots=True)
class Argument:
    """Checks and patches of a replay's argument.

    Args:
        captured: captured stand-in, whose sizes, strides and dtype a tensor must have; or captured value
        patches: places that hold its address
        written: a launch may write it
        offset: required storage offset, in elements; -1: any
        nbytes: bytes from its first element to the end of its last one
        alignment: its address must be congruent to the captured one modulo these bytes
        address: captured address
    """

    captured: object
    patches: tuple[Patch, ...] = ()
    written: bool = False
    offset: int = -1
    nbytes: int = 0
    alignment: int = 1
    address: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Memory for intermediates.

    Args:
        nbytes: its size
        died: the last step that uses it
        patches: places that hold addresses in it
    """

    nbytes: int
    died: int
    patches: tuple[Patch, ...] = ()


class OperandKind(Enum):
    """Kinds of tensors that are operands of an eager call."""

    ITSELF = "itself"  # the very argument ``index`` of the region
    ARGUMENT = "argument"  # a view of that
    OWNED = "owned"  # a view of the owned memory ``index``
    CONSTANT = "constant"  # ``constant``
    EMPTY = "empty"  # one without elements


@dataclass(frozen=True, slots=True)
class CallOperand:
    """A tensor operand of an eager call.

    Args:
        kind: kind of the tensor
        layout: its sizes, strides and dtype
        index: index of the argument, or of the owned memory
        offset: bytes from there to its first element
        constant: the tensor itself, if it is a constant
    """

    kind: OperandKind
    layout: TensorLayout
    index: int = 0
    offset: int = 0
    constant: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """A tensor that an eager call returns.

    Args:
        layout: its sizes, strides and dtype
        owned: it has memory of its own
        index: index of that memory, or of the operand of which it is a view; -1: not used
        offset: bytes from the operand's first element to its own
        nbytes: bytes of its own memory
    """

    layout: TensorLayout
    owned: bool
    index: int
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """An eager call.

    Args:
        operator: native OperatorCall, without tensors
        leaves: operand in the place of each of its tensors
        operands: tensors that it takes, each once
        results: tensors that it returns
        alignment: bytes of which results' addresses are multiples
        drawn: amount by which the launches before it advance the generator
        waits: number of steps directly after it that wait for all of its results, and do nothing else
    """

    operator: object
    leaves: tuple[int, ...]
    operands: tuple[CallOperand, ...]
    results: tuple[CallResult, ...] = ()
    alignment: int = 1
    drawn: int = 0
    waits: int = 0


@dataclass(frozen=True, slots=True)
class RegionStep:
    """An eager call, or the next segment of launches.

    Args:
        call: the call; None: a segment
        blocks: memory for intermediates that is allocated before the step
        taken: owned memory that is allocated before the step, with its bytes
        released: owned memory that is released after the step
        dead: arguments that are released after the step
    """

    call: Call | None = None
    blocks: tuple[Block, ...] = ()
    taken: tuple[tuple[int, int], ...] = ()
    released: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionDescription:
    """A native region.

    Args:
        name: name of a replay in profilers
        arguments: checks and patches of each argument
        owned: for each memory with a storage of its own, the places that hold its address
        steps: steps of a replay, in order
        outputs: outputs of a replay; the ``index`` of a FRESH one is that of owned memory
        apart: no written argument may share memory with another argument
    """

    name: str = ""
    arguments: tuple[Argument, ...] = ()
    owned: tuple[tuple[Patch, ...], ...] = ()
    steps: tuple[RegionStep, ...] = ()
    outputs: tuple[Output, ...] = ()
    apart: bool = False


# -- from a program ----------------------------------------------------------------------------------------------------

_INPUT, _POOL = AllocationKind.INPUT, AllocationKind.POOL


def describe_region(
    program: Program, arguments: Sequence[Any], places: Callable[[Slot], Iterable[tuple[int, int, int]]]
) -> RegionDescription:
    """The native region of a program.

    Args:
        program: the verified program
        arguments: the captured stand-ins and values
        places: returns the places that hold the address of a slot, as the number of a launch, the place in it, and
            bytes from the start of the slot's allocation; none for an operand of an eager call
    """
    steps, written = program.steps, program.written
    inputs = {a.index: a for a in program.recording.allocations if a.kind is _INPUT}
    sizes = {a.index: a.nbytes for a in program.recording.allocations if a.kind is _POOL}
    fresh = {output.index for output in program.recording.outputs if output.kind is OutputKind.FRESH}
    owned = sorted(fresh.union(index for step in steps for index in (*step.taken, *step.released)))
    numbers = {index: number for number, index in enumerate(owned)}
    patches: dict[tuple[AllocationKind, int], list[Patch]] = {
        **{(_INPUT, index): [] for index in range(len(arguments))},
        **{(_POOL, index): [] for index in owned},
        **{(_POOL, index): [] for step in steps for block in step.blocks for index in block[2]},
    }
    for slot in program.slots:
        patches[slot.key] += [Patch(*at) for at in places(slot)]

    def block(nbytes: int, died: int, offsets: Mapping[int, int]) -> Block:
        inside = ((patch, offset) for index, offset in offsets.items() for patch in patches[_POOL, index])
        return Block(nbytes, died, tuple(Patch(p.launch, p.place, p.delta + offset) for p, offset in inside))

    def argument(index: int, captured: Any) -> Argument:
        if not isinstance(captured, torch.Tensor):
            return Argument(captured)
        return Argument(
            captured,
            tuple(patches[_INPUT, index]),
            index in written,
            int(captured.storage_offset()) if index in program.recording.offset_sensitive else -1,
            inputs[index].nbytes,
            program.alignment,
            inputs[index].address,
        )

    return RegionDescription(
        program.name,
        tuple(argument(index, value) for index, value in enumerate(arguments)),
        tuple(tuple(patches[_POOL, index]) for index in owned),
        tuple(
            RegionStep(
                _call(program, number, step, numbers) if isinstance(step, EagerStep) else None,
                tuple(block(*each) for each in step.blocks),
                tuple((numbers[index], sizes[index]) for index in step.taken),
                tuple(numbers[index] for index in step.released),
                step.dead,
            )
            for number, step in enumerate(steps)
        ),
        tuple(
            replace(output, index=numbers[output.index]) if output.kind is OutputKind.FRESH else output
            for output in program.recording.outputs
        ),
        apart=has_order(program),
    )


def _call(program: Program, number: int, step: EagerStep, numbers: Mapping[int, int]) -> Call:
    """The eager call of step ``number``. ``numbers``: number of owned memory, by allocation."""
    call, recording = step.call, program.recording
    slots = {slot.word: slot for slot in program.slots if slot.launch == step.begin}
    sizes = {a.index: a.nbytes for a in recording.allocations if a.kind is _POOL}
    operands: list[CallOperand] = []
    for word, operand in enumerate(call.operands):
        slot, layout = slots.get(word), operand.layout
        if operand.like is not None:
            operands.append(CallOperand(OperandKind.CONSTANT, layout, constant=operand.like))
        elif slot is None:
            operands.append(CallOperand(OperandKind.EMPTY, layout))
        elif slot.kind is _INPUT:
            kind = OperandKind.ITSELF if operand.argument == slot.index else OperandKind.ARGUMENT
            operands.append(CallOperand(kind, layout, slot.index, slot.offset))
        else:
            operands.append(CallOperand(OperandKind.OWNED, layout, numbers[slot.index], slot.offset))
    results: list[CallResult] = []
    word = len(call.operands)
    for result in call.results:
        if result.operand >= 0:
            results.append(CallResult(result.layout, False, result.operand, result.offset))
            continue
        slot = slots.get(word)
        word += 1
        index, nbytes = (-1, 0) if slot is None else (numbers[slot.index], sizes[slot.index])
        results.append(CallResult(result.layout, True, index, result.offset, nbytes))
    waits = _waits_behind(program, number)
    return Call(call.call, call.leaves, tuple(operands), tuple(results), recording.alignment, call.drawn, waits)


def _waits_behind(program: Program, number: int) -> int:
    """Number of waits directly after the eager step ``number``, if they wait for all of its results; else 0."""
    step = program.steps[number]
    assert isinstance(step, EagerStep)
    call, behind = step.call, program.steps[number + 1 : number + 1 + len(step.call.results)]
    waits = {each.begin for each in behind if isinstance(each, EagerStep) and each.call.name.startswith(WAIT)}
    if len(waits) < len(call.results):
        return 0
    owned = range(len(call.operands), len(call.operands) + sum(result.operand < 0 for result in call.results))
    words = {*owned, *(result.operand for result in call.results if result.operand >= 0)}
    filled = [slot.key for slot in program.slots if slot.launch == step.begin and slot.word in words]
    waited = {slot.key for slot in program.slots if slot.launch in waits and slot.word == 0}
    return len(waits) if len(filled) == len(words) and set(filled) == waited else 0
