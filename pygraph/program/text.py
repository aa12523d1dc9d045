"""Launch programs as text: each prints to it deterministically, and it parses back to a program that prints the same.

    program @net.region0 : cuda {argument_alignment = 16, pool_alignment = 512, workspace = 32768 B} {
      %arg0 : argument 16384 B
      %arg1 : argument 2097152 B {held}
      %buf0 : pool 32768 B @ 0
      %buf1 : pool 16384 B {fresh}
      l0 = kernel "nvjet_tst_64x8" (%arg0 reads, %arg1 reads, %buf0 writes, 64)
        {signature = 0, grid = [4, 8, 1], block = [384, 1, 1], loc = ["net.py:12"], op = ["mm"]}
      l1 = kernel "triton_relu" (%buf0 reads[0:16384], %buf1 writes) {signature = 1, loc = ["net.py:13"], op = ["relu"]}
      return (fresh %buf1 : float32[64, 64]{64, 1})
      order {
        l1 after [l0]
      }
      steps {
        segment [0:2] {
          block 32768 B until 0 : [%buf0 @ 0]
          takes [%buf1]
        }
      }
    }

An allocation belongs to an argument (``%arg``), the region (``%buf``), or the compiled module (``%const``). A word of a
launch is a number or an address: ``%buf0+512 reads[512:576]`` points 512 bytes into ``%buf0``, and the launch reads 64
bytes there. A range counts bytes of the allocation, by default all of them; one with gaps is
``[begin:end:period:width]``. A launch has ``unknown_uses`` if at most the ``operands`` of its call are known. A loop or
branch is followed by its bodies, each ``body`` and a program.

Addresses and handles of the process are left out: signatures are numbers, equal for equal ones, and Python objects are
their types. Data of drivers (``payload``), and data only for discovery, are left out, too. A parsed program can be
verified and processed by passes, but no driver replays it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from pygraph.program.order import Order
from pygraph.program.program import EagerStep, GraphSegment, Layout, NonPointerWord, Program, Slot, Step
from pygraph.program.recording import (
    PREFIXES,
    Access,
    Allocation,
    AllocationKind,
    Bytes,
    EagerCall,
    EagerOperand,
    EagerResult,
    Geometry,
    Launch,
    LaunchKind,
    Origin,
    Output,
    OutputKind,
    Recording,
    TensorLayout,
    UnownedAddress,
    UnownedMemory,
    Use,
    name_of,
)
from pygraph.text.reader import MAX_DEPTH, Lexeme, Reader, tokens
from pygraph.text.words import NAME, QUOTED, WORD, quote, symbol_text, unquote

_Key = tuple[AllocationKind, int]

_KINDS = {prefix: kind for kind, prefix in PREFIXES.items()}
_WORDS = {AllocationKind.INPUT: "argument", AllocationKind.POOL: "pool", AllocationKind.CONSTANT: "constant"}
_ACCESSES = {(True, False): "reads", (False, True): "writes", (True, True): "updates"}
_USES = {word: flags for flags, word in _ACCESSES.items()}
_LAUNCHES = {kind.value: kind for kind in LaunchKind}
_OUTPUTS = {kind.value: kind for kind in OutputKind}

_BASE, _CONSTANTS = 1 << 70, 1 << 80
"""Start of the memory of a parsed program, and of its constants: larger than any number in a word."""

_GAP, _APART = 4096, 1 << 60
"""Bytes between two allocations of a parsed program; distance of two constants, around which others may lie."""


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Placeholder for an object without a text form, or for a torch.dtype."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def itemsize(self) -> int:
        """Bytes of an element, for a dtype."""
        bits = re.search(r"\d+", self.text)
        return max(1, int(bits[0]) // 8) if bits else 1


# -- printing ----------------------------------------------------------------------------------------------------------


def print_program(program: Program) -> str:
    """``program`` as text, ending in a newline."""
    return "\n".join(_Printer(program).lines()) + "\n"


class _Printer:
    """Prints a program, with the meaning of each of its words."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = {allocation.key: allocation.nbytes for allocation in program.recording.allocations}
        self.constants = _Constants(program.recording.allocations)
        self.slots = {(slot.launch, slot.word): slot for slot in reversed(program.slots)}
        self.inert = {(each.launch, each.word): each for each in program.non_pointers}
        self.signatures: dict[object, int] = {}

    def lines(self) -> Iterator[str]:
        program, recording = self.program, self.program.recording
        facts = [f"argument_alignment = {program.alignment}", f"pool_alignment = {recording.alignment}"]
        facts += [f"workspace = {program.layout.nbytes} B"]
        facts += ["scratch"] * bool(recording.scratch) + ["out_of_range_pointers"] * recording.out_of_range_pointers
        yield f"program @{symbol_text(program.name)} : {recording.device} {{{', '.join(facts)}}} {{"
        yield from (f"  {self.allocation(each)}" for each in recording.allocations)
        yield from (f"  {self.launch(each)}" for each in recording.launches)
        outputs = ",\n".join(f"    {_output(each)}" for each in recording.outputs)
        yield f"  return (\n{outputs}\n  )" if outputs else "  return ()"
        yield from _order(program.order)
        if program.steps:
            yield "  steps {"
            yield from (f"    {line}" for step in program.steps for line in _step(step))
            yield "  }"
        yield "}"

    def allocation(self, allocation: Allocation) -> str:
        program, index = self.program, allocation.index
        text = f"{name_of(allocation.key)} : {_WORDS[allocation.kind]} {allocation.nbytes} B"
        facts = [f"born = {allocation.born}"] if allocation.born else []
        if allocation.kind is AllocationKind.INPUT:
            sets = {"held": program.held, "lent": program.lent, "offset": program.recording.offset_sensitive}
            facts += [word for word, members in sets.items() if index in members]
        elif allocation.kind is AllocationKind.POOL:
            text += f" @ {program.layout.offsets[index]}" if index in program.layout.offsets else ""
            facts += ["fresh"] * (index in program.layout.fresh)
        else:
            text += self.constants.within(allocation)
        return text + _braces(facts)

    def launch(self, launch: Launch) -> str:
        words = ", ".join(self.word(launch, word) for word in range(len(launch.words)))
        number = self.signatures.setdefault(launch.signature, len(self.signatures))
        facts = [f"signature = {number}"]
        if launch.geometry is not None:
            facts += [f"grid = {_list(launch.geometry.grid)}", f"block = {_list(launch.geometry.block)}"]
            facts += [f"shared = {launch.geometry.shared} B"] * bool(launch.geometry.shared)
        facts += ["unknown_uses"] * (launch.uses is None)
        if launch.operands is not None:
            facts.append(f"operands = {_list(map(self.operand, launch.operands))}")
        facts += [f"read_only = {_names(launch.read_only)}"] * bool(launch.read_only)
        facts += [f"in_place = {_names(launch.in_place)}"] * bool(launch.in_place)
        facts += [] if launch.may_access is None else [f"may_access = {_names(launch.may_access)}"]
        facts += [flag for flag in ("random", "nondeterministic") if getattr(launch, flag)]
        facts += [] if launch.call is None else [f"call = {quote(launch.call)}"]
        facts += [] if launch.group is None else [f"group = {launch.group}"]
        phases = self.program.recording.phases
        facts += ["beside"] * (0 < launch.index < len(phases) and phases[launch.index] == phases[launch.index - 1])
        origin = launch.origin
        facts += [
            f"{key} = {_list(map(quote, texts))}"
            for key, texts in (("loc", origin.locs), ("op", origin.nodes), ("in", origin.modules))
            if texts
        ]
        eager = "" if launch.eager is None else f" {_eager(launch.eager)}"
        text = f"l{launch.index} = {launch.kind.value} {quote(launch.name)} ({words}){eager}{_braces(facts)}"
        bodies = ("\n".join(_Printer(body).lines()) for body in launch.bodies)
        return "".join([text, *(f"\nbody {body}" for body in bodies)]).replace("\n", "\n    ")

    def word(self, launch: Launch, word: int) -> str:
        """Word ``word`` with its uses."""
        place, value = (launch.index, word), launch.words[word]
        slot, inert, constant = self.slots.get(place), self.inert.get(place), self.constants.at(value)
        start, whole = 0, -1
        if slot is not None:
            text, start, whole = _place(slot.key, slot.offset), slot.offset, self.sizes.get(slot.key, -1)
        elif inert is not None:
            text = "scratch" if inert.scratch else "inert"
        elif constant is not None:
            start, whole = value - constant.address, constant.nbytes
            text = _place(constant.key, start)
        else:
            text = "foreign" if launch.unowned_at(word) else str(value)
        uses = [use for use in launch.uses or () if use.word == word and (use.reads or use.writes)]
        ranges = ((u, Bytes(start + u.start, start + u.start + u.nbytes)) for u in uses)
        return " ".join([text, *(f"{_ACCESSES[u.reads, u.writes]}{_range(there, whole)}" for u, there in ranges)])

    def operand(self, access: Access) -> str:
        there = _range(access.bytes, self.sizes.get(access.key, -1))
        return f"{name_of(access.key)} {_ACCESSES[access.reads, access.writes]}{there}"


class _Constants:
    """Constants of a program, by address. Some may be views of others."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        found = [a for a in allocations if a.kind is AllocationKind.CONSTANT and a.address]
        self.sorted = sorted(found, key=lambda each: each.address)
        self.starts = [each.address for each in self.sorted]
        self.ends = list(accumulate((each.address + max(each.nbytes, 1) for each in self.sorted), max))
        self.anchors: dict[_Key, Allocation] = {}
        """For each constant, the first one, in program order, that shares bytes with it, directly or through others."""
        place = {each.key: number for number, each in enumerate(found)}
        borders = [0, *(i for i, end in enumerate(self.ends[:-1], 1) if self.starts[i] >= end), len(self.sorted)]
        for begin, end in pairwise(borders):
            together = self.sorted[begin:end]
            first = min(together, key=lambda each: place[each.key], default=None)
            self.anchors.update({each.key: first for each in together if first is not None})

    def at(self, address: int) -> Allocation | None:
        """A constant that contains ``address``, or None."""
        at = bisect_right(self.starts, address) - 1
        while at >= 0 and address < self.ends[at]:
            if self.sorted[at].covers(address):
                return self.sorted[at]
            at -= 1
        return None

    def within(self, constant: Allocation) -> str:
        """Text for the place of ``constant`` relative to an earlier one that shares bytes, if there is one."""
        anchor = self.anchors.get(constant.key, constant)
        return "" if anchor is constant else f" @ {name_of(anchor.key)}{constant.address - anchor.address:+}"


def _place(key: _Key, offset: int) -> str:
    return name_of(key) + (f"{offset:+}" if offset else "")


def _range(there: Bytes, whole: int) -> str:
    """Text for bytes of an allocation of ``whole`` bytes; empty for all of them."""
    if there == Bytes(0, whole):
        return ""
    return f"[{there.start}:{there.end}" + (f":{there.period}:{there.width}" if there.period else "") + "]"


def _list(items: Iterable[object]) -> str:
    return f"[{', '.join(map(str, items))}]"


def _names(keys: Iterable[_Key]) -> str:
    return _list(map(name_of, sorted(keys, key=lambda key: (key[0].value, key[1]))))


def _braces(facts: Sequence[str]) -> str:
    return f" {{{', '.join(facts)}}}" if facts else ""


def _layout(layout: TensorLayout | Output) -> str:
    """``float32[8, 16]{16, 1}``."""
    return f"{str(layout.dtype).rpartition('.')[2]}{_list(layout.size)}{{{_list(layout.stride)[1:-1]}}}"


def _eager(call: EagerCall) -> str:
    """Format the operands, results and facts of ``call``: word i of the launch is operand i."""
    operands = [
        _layout(each.layout)
        + (f" argument {each.argument}" if each.argument >= 0 else "")
        + (" constant" if each.like is not None else "")
        for each in call.operands
    ]
    results = [
        _layout(each.layout)
        + (f" of {each.operand}{each.offset:+}" if each.operand >= 0 else "")
        + (" itself" if each.itself else "")
        for each in call.results
    ]
    facts = [f"leaves = {_list(call.leaves)}"]
    facts += [] if call.returned is None else [f"returns = {_nested(call.returned)}"]
    facts += [f"drawn = {call.drawn}"] * bool(call.drawn)
    facts += [] if call.group is None else [f"process_group = {quote(call.group)}"]
    return f"takes {_list(operands)} gives {_list(results)}{_braces(facts)}"


def _nested(places: Any) -> str:
    return _list(map(_nested, places)) if isinstance(places, (list, tuple)) else str(places)


def _output(output: Output) -> str:
    kind = output.kind
    if kind is OutputKind.OBJECT:
        scalar = isinstance(output.value, (bool, int, float, complex, str, type(None), _Placeholder))
        return f"object {quote(str(output.value) if scalar else type(output.value).__name__)}"
    if kind is OutputKind.SAME:
        return f"same {output.index}"
    owner = AllocationKind.POOL if kind is OutputKind.FRESH else AllocationKind.INPUT
    text = f"{kind.value} {name_of((owner, output.index))}"
    if output == Output(kind, output.index):
        return text
    return f"{text} : {_layout(output)}" + (f" + {output.offset}" if output.offset else "")


def _order(order: Order | None) -> Iterator[str]:
    if order is None:
        return
    yield "  order {"
    for launch, waited in enumerate(order.edges):
        lane = f" lane {order.lanes[launch]}" if order.lanes else ""
        after = f" after {_list(f'l{each}' for each in waited)}" if waited else ""
        if lane or after:
            yield f"    l{launch}{lane}{after}"
    yield "  }"


def _step(step: Step) -> Iterator[str]:
    word = "call" if isinstance(step, EagerStep) else "segment"
    yield f"{word} [{step.begin}:{step.end}] {{"
    for nbytes, died, offsets in step.blocks:
        inside = sorted(offsets.items(), key=lambda item: item[::-1])
        places = _list(f"{name_of((AllocationKind.POOL, index))} @ {offset}" for index, offset in inside)
        yield f"  block {nbytes} B until {died} : {places}"
    for word, kind, indices in (
        ("takes", AllocationKind.POOL, step.taken),
        ("releases", AllocationKind.POOL, step.released),
        ("drops", AllocationKind.INPUT, step.dead),
    ):
        if indices:
            yield f"  {word} {_list(name_of((kind, index)) for index in indices)}"
    yield "}"


# -- parsing -----------------------------------------------------------------------------------------------------------

_TOKENS = tokens(
    rf"(?P<int>[0-9]{{1,400}})|(?P<word>{WORD.pattern})|(?P<value>%(?:{NAME.pattern}))"
    rf"|(?P<symbol>@(?:[A-Za-z0-9_.]+|{QUOTED}))|(?P<mark>[(){{}}\[\],:=+\-@])"
)


def parse_program(text: str, source: str = "<text>") -> Program:
    """The program written in ``text``. ``source`` names it in errors. Raises ParseError."""
    parser = _Parser(text, source)
    program = parser.program()
    return program if parser.next.kind == "end" else parser.refuse("the end of the text")


class _Parser(Reader):
    """Each method reads the element that it is named after. Allocations and words get addresses as they are read."""

    pattern = _TOKENS
    names: ClassVar = {"int": "a number", "value": "'%name'", "symbol": "'@name'"}

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text, source)
        self.allocations: dict[_Key, Allocation] = {}
        self.launches: list[Launch] = []
        self.slots: list[Slot] = []
        self.inert: list[NonPointerWord] = []
        self.offsets: dict[int, int] = {}
        self.flags: dict[str, list[int]] = {word: [] for word in ("held", "lent", "offset", "fresh")}
        self.phases: list[int] = []
        self.foreign: list[UnownedAddress] = []
        self.free = _BASE

    # -- words and numbers ---------------------------------------------------------------------------------------------

    def size(self) -> int:
        count = self.integer()
        self.expect("B")
        return count

    def many(self, item: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(self.items(item, "[]"))

    def facts(self, known: Mapping[str, Callable[[], Any] | None], what: str) -> dict[str, Any]:
        """Facts in braces, if any: ``{name = value, flag}``. ``known`` has a reader for each name, None for a flag."""
        found: dict[str, Any] = {}

        def fact() -> None:
            lexeme = self.kind("word")
            if lexeme.text not in known or lexeme.text in found:
                reason = "is given twice" if lexeme.text in found else f"is no fact of {what}"
                raise self.error(f"'{lexeme.text}' {reason}: use each of {', '.join(known)} once", lexeme)
            read = known[lexeme.text]
            if read is not None:
                self.expect("=")
            found[lexeme.text] = True if read is None else read()

        if self.next.text == "{":
            self.items(fact, "{}")
        return found

    def key(self) -> _Key:
        """Key of a declared allocation."""
        lexeme = self.kind("value")
        key = self.key_of(lexeme)
        if key not in self.allocations:
            raise self.error(f"'{lexeme.text}' is no allocation of this program", lexeme)
        return key

    def key_of(self, lexeme: Lexeme) -> _Key:
        match = re.fullmatch(r"%(arg|buf|const)([0-9]{1,9})", lexeme.text)
        if match is None:
            raise self.error("an allocation is called '%arg', '%buf' or '%const' and a number", lexeme)
        return _KINDS[match[1]], int(match[2])

    def index(self, kind: AllocationKind) -> int:
        """The number of a declared allocation of one kind."""
        lexeme = self.next
        key = self.key()
        if key[0] is not kind:
            raise self.error(f"expected '%{PREFIXES[kind]}' and a number", lexeme)
        return key[1]

    def offset(self) -> int:
        """``+ number`` or ``- number``, if there is any."""
        if self.accept("+"):
            return self.integer()
        return self.integer() if self.next.text == "-" else 0

    def byte_range(self, whole: Bytes | None) -> Bytes:
        """``[begin:end]`` or ``[begin:end:period:width]``; by default ``whole``."""
        if whole is not None and self.next.text != "[":
            return whole
        self.expect("[")
        numbers = [self.integer()]
        while self.accept(":"):
            numbers.append(self.integer())
        if len(numbers) not in (2, 4):
            self.refuse("'begin:end' or 'begin:end:period:width'")
        self.expect("]")
        return Bytes(*numbers)

    # -- the program ---------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        self.expect("program")
        name = self.kind("symbol").text[1:]
        self.expect(":")
        device = self.kind("word").text
        known = {"argument_alignment": self.integer, "pool_alignment": self.integer, "workspace": self.size}
        facts = self.facts({**known, "scratch": None, "out_of_range_pointers": None}, "programs")
        self.expect("{")
        while self.next.kind == "value":
            self.allocation()
        while self.next.text != "return":
            self.launch()
        self.expect("return")
        outputs = tuple(self.items(self.output, "()"))
        order = self.order() if self.accept("order") else None
        steps = tuple(self.items(self.step, "{}", separator="")) if self.accept("steps") else ()
        self.expect("}")
        recording = Recording(
            tuple(self.launches),
            tuple(self.allocations.values()),
            outputs,
            offset_sensitive=frozenset(self.flags["offset"]),
            alignment=facts.get("pool_alignment", 64),
            out_of_range_pointers="out_of_range_pointers" in facts,
            scratch=_BASE - _GAP if "scratch" in facts else 0,
            phases=tuple(self.phases) if len(set(self.phases)) < len(self.phases) else (),
            device=device,
        )
        return Program(
            recording,
            tuple(self.slots),
            Layout(facts.get("workspace", 0), self.offsets, tuple(self.flags["fresh"])),
            tuple(self.inert),
            held=frozenset(self.flags["held"]),
            lent=frozenset(self.flags["lent"]),
            name=unquote(name) if name.startswith('"') else name,
            alignment=facts.get("argument_alignment", 16),
            steps=steps,
            order=order,
        )

    def allocation(self) -> None:
        lexeme = self.kind("value")
        kind, index = key = self.key_of(lexeme)
        if key in self.allocations:
            raise self.error(f"'{lexeme.text}' is declared twice", lexeme)
        self.expect(":")
        self.expect(_WORDS[kind])
        nbytes = self.size()
        address = self.free if kind is not AllocationKind.CONSTANT else _CONSTANTS + index * _APART
        if kind is AllocationKind.POOL and self.accept("@"):
            self.offsets[index] = self.integer()
        elif kind is AllocationKind.CONSTANT and self.accept("@"):
            address = self.allocations[self.key()].address + self.offset()
        flags = {AllocationKind.INPUT: ("held", "lent", "offset"), AllocationKind.POOL: ("fresh",)}.get(kind, ())
        facts = self.facts({"born": self.integer, **dict.fromkeys(flags)}, f"{_WORDS[kind]} allocations")
        self.allocations[key] = Allocation(kind, index, address, nbytes, facts.pop("born", 0))
        for flag in facts:
            self.flags[flag].append(index)
        self.free += nbytes + _GAP

    # -- launches ------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        self.expect(f"l{len(self.launches)}")
        self.expect("=")
        kind, name = self.one_of(_LAUNCHES, "kind of launch"), self.string()
        words: list[int] = []
        uses: list[Use] = []
        first, self.foreign = len(self.inert), []
        self.items(lambda: self.word(words, uses), "()")
        eager = self.eager(name) if kind is LaunchKind.EAGER else None
        strings, keys = (lambda: self.many(self.string)), (lambda: frozenset(self.many(self.key)))
        numbers = lambda: self.many(self.integer)  # noqa: E731 - one of four readers
        facts = self.facts(
            {
                "signature": self.integer,
                "grid": numbers,
                "block": numbers,
                "shared": self.size,
                "unknown_uses": None,
                "operands": lambda: self.many(self.operand),
                "read_only": keys,
                "in_place": keys,
                "may_access": keys,
                "random": None,
                "nondeterministic": None,
                "call": self.string,
                "group": self.integer,
                "beside": None,
                **dict.fromkeys(("loc", "op", "in"), strings),
            },
            "launches",
        )
        bodies: list[Program] = []
        while self.accept("body"):
            bodies.append(self.body())
        self.inert[first:] = [replace(each, call=facts.get("call", "")) for each in self.inert[first:]]
        self.phases.append((self.phases[-1] + ("beside" not in facts)) if self.phases else 0)
        geometry = Geometry(facts["grid"], facts.get("block", ()), facts.get("shared", 0)) if "grid" in facts else None
        if uses and "unknown_uses" in facts:
            raise self.error("a launch with unknown uses says what it reads or writes", self.next)
        self.launches.append(
            Launch(
                len(self.launches),
                kind,
                name,
                tuple(words),
                _Placeholder(str(facts.get("signature", -1))),
                None if "unknown_uses" in facts else tuple(uses),
                Origin(facts.get("op", ()), facts.get("loc", ()), facts.get("in", ())),
                random="random" in facts,
                read_only=facts.get("read_only", frozenset()),
                call=facts.get("call"),
                group=facts.get("group"),
                may_access=facts.get("may_access"),
                nondeterministic="nondeterministic" in facts,
                unowned=tuple(self.foreign),
                eager=eager,
                operands=facts.get("operands"),
                geometry=geometry,
                bodies=tuple(bodies),
                in_place=facts.get("in_place", frozenset()),
            )
        )

    def body(self) -> Program:
        """A program within this one, parsed independently."""
        inner = _Parser(self.text, self.source)
        inner.depth, inner.next = self.depth + 1, self.next
        if inner.depth > MAX_DEPTH:
            raise self.error("bodies within bodies are too deep", self.next)
        program = inner.program()
        self.next = inner.next
        return program

    def word(self, words: list[int], uses: list[Use]) -> None:
        launch, number, start = len(self.launches), len(words), 0
        whole: Bytes | None = None
        if self.next.kind == "value":
            key = self.key()
            allocation, start = self.allocations[key], self.offset()
            whole = Bytes(0, allocation.nbytes)
            words.append(allocation.address + start)
            if allocation.kind is not AllocationKind.CONSTANT:
                self.slots.append(Slot(launch, number, *key, start))
        elif self.next.text in ("inert", "scratch"):
            self.inert.append(NonPointerWord(launch, number, self.take().text == "scratch"))
            words.append(0)
        elif self.accept("foreign"):
            self.foreign.append(UnownedAddress(number, UnownedMemory.OTHER, ""))
            words.append(0)
        else:
            words.append(self.integer())
        while self.next.text in _USES:
            reads, writes = _USES[self.take().text]
            there = self.byte_range(whole)
            uses.append(Use(number, there.start - start, there.end - there.start, reads, writes))

    def operand(self) -> Access:
        key = self.key()
        reads, writes = self.one_of(_USES, "access")
        return Access(key, self.byte_range(Bytes(0, self.allocations[key].nbytes)), writes, reads)

    def layout(self) -> TensorLayout:
        lexeme = self.kind("word")
        dtype, size, stride = lexeme.text, self.many(self.integer), tuple(self.items(self.integer, "{}"))
        if len(size) != len(stride):
            raise self.error(f"{len(size)} sizes, and {len(stride)} strides", lexeme)
        return TensorLayout(size, stride, None if dtype == "None" else _Placeholder(dtype))

    def eager(self, name: str) -> EagerCall:
        self.expect("takes")
        operands = self.many(self.eager_operand)
        self.expect("gives")
        results = self.many(self.eager_result)
        known = {"leaves": lambda: self.many(self.integer), "returns": self.nested, "drawn": self.integer}
        facts = self.facts({**known, "process_group": self.string}, "eager calls")
        leaves, returned = facts.get("leaves", ()), facts.get("returns")
        group = facts.get("process_group")
        return EagerCall(name, None, leaves, operands, results, returned, facts.get("drawn", 0), group)

    def eager_operand(self) -> EagerOperand:
        layout = self.layout()
        argument = self.integer() if self.accept("argument") else -1
        return EagerOperand(layout, argument, _Placeholder("constant") if self.accept("constant") else None)

    def eager_result(self) -> EagerResult:
        layout = self.layout()
        operand, offset = (self.integer(), self.offset()) if self.accept("of") else (-1, 0)
        return EagerResult(layout, operand, offset, self.accept("itself") is not None)

    def nested(self) -> Any:
        if self.next.text == "[":
            return self.items(self.nested, "[]")
        return None if self.accept("None") else self.integer()

    # -- outputs, order, steps -----------------------------------------------------------------------------------------

    def output(self) -> Output:
        kind = self.one_of(_OUTPUTS, "kind of output")
        if kind is OutputKind.OBJECT:
            return Output(kind, value=_Placeholder(self.string()))
        if kind is OutputKind.SAME:
            return Output(kind, self.integer())
        index = self.index(AllocationKind.POOL if kind is OutputKind.FRESH else AllocationKind.INPUT)
        if not self.accept(":"):
            return Output(kind, index)
        layout = self.layout()
        return Output(kind, index, self.offset(), layout.size, layout.stride, layout.dtype)

    def order(self) -> Order:
        waits: list[set[int]] = [set() for _ in self.launches]
        lanes: dict[int, int] = {}

        def line() -> None:
            launch = self.number_of_launch(len(waits))
            if self.accept("lane"):
                lanes[launch] = self.integer()
            if self.accept("after"):
                waits[launch].update(self.many(lambda: self.number_of_launch(launch)))

        lexeme = self.next
        self.items(line, "{}", separator="")
        if lanes and len(lanes) < len(waits):
            raise self.error("either each launch has a lane, or none", lexeme)
        return Order.of(waits, [lanes[launch] for launch in range(len(lanes))])

    def number_of_launch(self, below: int) -> int:
        lexeme = self.kind("word")
        match = re.fullmatch(r"l([0-9]{1,9})", lexeme.text)
        if match is None or int(match[1]) >= below:
            raise self.error(f"expected one of the {below} launches before, 'l' and a number", lexeme)
        return int(match[1])

    def step(self) -> Step:
        kind = self.kind("word")
        if kind.text not in ("segment", "call"):
            raise self.error("a step is a 'segment' or a 'call'", kind)
        bounds = self.byte_range(None)
        blocks: list[tuple[int, int, Mapping[int, int]]] = []
        lists: dict[str, tuple[int, ...]] = {"takes": (), "releases": (), "drops": ()}

        def fact() -> None:
            lexeme = self.kind("word")
            if lexeme.text == "block":
                blocks.append(self.block())
            elif lexeme.text in lists:
                owner = AllocationKind.INPUT if lexeme.text == "drops" else AllocationKind.POOL
                lists[lexeme.text] = self.many(lambda: self.index(owner))
            else:
                raise self.error(f"a step has {', '.join(['block', *lists])}", lexeme)

        self.items(fact, "{}", separator="")
        memory = (tuple(blocks), lists["takes"], lists["releases"], lists["drops"])
        if kind.text == "segment":
            return GraphSegment(bounds.start, bounds.end, *memory)
        called = self.launches[bounds.start] if bounds.start in range(len(self.launches)) else None
        if called is None or called.eager is None:
            raise self.error(f"l{bounds.start} is no eager call", kind)
        return EagerStep(bounds.start, bounds.end, *memory, call=called.eager, origin=called.origin)

    def block(self) -> tuple[int, int, Mapping[int, int]]:
        nbytes = self.size()
        self.expect("until")
        died = self.integer()
        self.expect(":")
        return nbytes, died, dict(self.many(self.placed))

    def placed(self) -> tuple[int, int]:
        index = self.index(AllocationKind.POOL)
        self.expect("@")
        return index, self.integer()
