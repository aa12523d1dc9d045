"""Random programs with collectives in random regions: ranks capture, vote, evict, fail, raise and close at random
calls.

Run as ``python -m tests.distributed.episodes RANK SIZE STORE COUNT SEED DEVICE``. An episode is one program, which all
ranks draw from the episode's seed, and some calls of it. When a rank captures, how many captures it keeps, which
operators fail in its captures, the sizes of its own work, whether it measures captured collectives no slower: these
each rank draws for itself. In every other episode ranks do alike what NCCL wants of them: sizes are those of all ranks,
and none evicts or closes. On GPUs all are such. Values are small whole numbers, and each call is compared bit for bit
with an eager one. Prints what differed, by seed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import distributed

from pygraph.runtime import contest, votes
from pygraph.runtime.contest import DEPENDENCES, PROGRAM, Decision, JointContest
from pygraph.runtime.contract import make_driver
from pygraph.runtime.cuda.driver import CudaDriver
from pygraph.runtime.events import counts
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region, RegionOptions
from tests.distributed.processes import Rank
from tests.runtime.fake import BYTES, EvenDriver

WIDTH = 4
SECONDS = 60.0
"""What an episode may take."""

LOCAL = ("relu", "modulo", "subtract", "write", "noise", "product", "view", "suspect", "opaque")
COLLECTIVES = ("all_reduce", "all_gather", "scatter", "exchange", "reduce_here")

broken: set[str] = set()
"""Operators that fail in this rank's captures: ``suspect`` while it is in here, ``opaque`` as an eager call, too."""
raises = [False]
"""Whether ``opaque`` raises."""

_library = torch.library.Library("pygraph_episodes", "DEF")


def _fake(name: str) -> Any:
    def fake(x: torch.Tensor) -> torch.Tensor:
        if name in broken:
            raise RuntimeError("not while capturing")
        return torch.empty_like(x)

    return fake


def _opaque(x: torch.Tensor) -> torch.Tensor:
    if raises[0]:
        raise ValueError("as asked")
    return x % 3 + 1


for _name, _run in (("suspect", lambda x: x % 5), ("opaque", _opaque)):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _fake(_name), "Meta")


@dataclass(frozen=True)
class Line:
    """An operator, the values that it takes, the process group that it is sent by, and how many lines later what it
    fills is waited for."""

    op: str
    a: int
    b: int
    group: int
    beside: int


def draw(source: random.Random) -> tuple[Line, ...]:
    """A program of some lines; all ranks draw the same."""
    local = source.choice((LOCAL, LOCAL[:-2]))
    ops = [*source.choices((*local, *COLLECTIVES, *COLLECTIVES), k=source.randint(3, 8)), "all_reduce"]
    source.shuffle(ops)
    groups = source.choice((1, 2))  # what is sent by one can be captured
    return tuple(
        Line(op, source.randrange(12), source.randrange(12), source.randrange(groups), source.randrange(4))
        for op in ops
    )


class Program:
    """A function that runs ``lines`` on the list of its arguments: x, cache, the tensor to exchange, the sizes of the
    parts sent to each rank …, the sizes of the parts received from each rank …."""

    def __init__(self, lines: Sequence[Line], groups: Sequence[Any], rank: Rank) -> None:
        self._lines, self._rank = lines, rank
        self._groups = [group.group_name for group in groups]

    def __call__(self, args: list[Any]) -> Sequence[torch.Tensor]:
        x, cache, sent, *splits = args
        args.clear()
        values: list[torch.Tensor] = [x, cache]
        waiting: list[tuple[int, torch.Tensor]] = []
        for at, line in enumerate(self._lines):
            waiting = self._wait(waiting, values, at)
            a, b = values[line.a % len(values)], values[line.b % len(values)]
            if line.op in COLLECTIVES:
                waiting.append((at + line.beside, self._issue(line, a, sent, splits)))
            else:
                self._local(line.op, a, b, cache, values)
        self._wait(waiting, values, len(self._lines) + 9)
        return [values[-1], values[len(values) // 2] + 0, sum(value.sum(0) for value in values[-4:]) % 11]

    def _wait(
        self, waiting: list[tuple[int, torch.Tensor]], values: list[torch.Tensor], at: int
    ) -> list[tuple[int, torch.Tensor]]:
        for until, result in waiting:
            if until <= at:
                done = torch.ops._c10d_functional.wait_tensor(result)
                values.append(values[0] + done.view(-1, WIDTH).sum(0) % 7)
        return [each for each in waiting if each[0] > at]

    def _issue(self, line: Line, a: torch.Tensor, sent: torch.Tensor, splits: list[int]) -> torch.Tensor:
        ops, name, size = torch.ops._c10d_functional, self._groups[line.group], self._rank.size
        row = a.sum(0) % 7  # of a size that ranks agree on
        match line.op:
            case "all_reduce":
                return ops.all_reduce(row, "sum", name)
            case "reduce_here":
                return ops.all_reduce_(row, "max", name)
            case "all_gather":
                return ops.all_gather_into_tensor(row, size, name)
            case "scatter":
                return ops.reduce_scatter_tensor(row.repeat(size), "sum", size, name)
        return ops.all_to_all_single(sent + row % 2, splits[size:], splits[:size], name)

    def _local(
        self, op: str, a: torch.Tensor, b: torch.Tensor, cache: torch.Tensor, values: list[torch.Tensor]
    ) -> None:
        match op:
            case "relu":
                values.append(torch.relu(a - 2) + 1)
            case "modulo":
                values.append(a % 5)
            case "subtract":
                values.append((a * 2 - b) % 7)
            case "write":
                cache.add_(a % 3)
            case "noise":
                values.append(a + torch.floor(torch.rand_like(a) * 3))
            case "product":
                values.append(torch.mm(a % 3, torch.ones(WIDTH, WIDTH, device=a.device)) % 7)
            case "view":
                values.append(a[:, :])
            case name:
                values.append(getattr(torch.ops.pygraph_episodes, name)(a))


def arguments(rank: Rank, shared: random.Random, own: random.Random, sizes: random.Random) -> list[Any]:
    """Of one call: rows drawn from ``sizes``, and splits that all ranks know."""
    size, rows = rank.size, sizes.choice((*[3] * 9, 5))
    step = shared.choice((*[0] * 9, 1))
    sent = [[1 + (a + b * step) % 2 for b in range(size)] for a in range(size)]
    mine, theirs = sent[rank.number], [row[rank.number] for row in sent]

    def whole(rows: int) -> torch.Tensor:
        values = [[float(own.randint(0, 6)) for _ in range(WIDTH)] for _ in range(rows)]
        return torch.tensor(values, device=rank.device)

    return [whole(rows), whole(rows), whole(sum(mine)), *mine, *theirs]


def call(run: Any, args: list[Any], seed: int, groups: Sequence[Any]) -> tuple[Any, ...]:
    """All that one call does."""
    given = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    tensors = [arg for arg in given if isinstance(arg, torch.Tensor)]
    torch.manual_seed(seed)
    before, raised, outputs = [g._get_sequence_number_for_group() for g in groups], None, []
    try:
        outputs = run(given)
    except ValueError as error:
        raised = str(error)
    sent = [group._get_sequence_number_for_group() - n for group, n in zip(groups, before, strict=True)]
    state = torch.get_rng_state() if args[0].device.type == "cpu" else torch.cuda.get_rng_state()
    drawn = state[:64].tolist() if raised is None else None
    return [t.tolist() for t in (*outputs, *tensors)], raised, sent, given, drawn


class Drawn(JointContest):
    """Takes four turns, in an order that all ranks know, and finds anything."""

    TURNS = 4
    source: random.Random

    def _judge(self) -> Decision:
        return self._rounds.decide(self.source.choice((DEPENDENCES, DEPENDENCES, DEPENDENCES, PROGRAM)))


class Clock:
    """Times nothing, and is always done."""

    def stop(self) -> None:
        pass

    def seconds(self) -> float:
        return 1.0

    def since(self, _earlier: Clock) -> float:
        return 0.0


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Times are drawn, and nobody is waited for long."""
    timer: Any = lambda *_: Clock()  # noqa: E731
    with (
        mock.patch.multiple(HostDriver, timer=timer, no_collectives=lambda _: None),
        mock.patch.object(CudaDriver, "timer", timer),
        mock.patch.multiple(votes, JointContest=Drawn, SECONDS=3.0),
        mock.patch.object(contest, "_PLAN", (DEPENDENCES, PROGRAM) * 2),
    ):
        yield


def episode(seed: int, rank: Rank, groups: Sequence[Any], happened: Counter[str]) -> None:
    shared, own = random.Random(seed), random.Random(seed * 64 + rank.number + 1)
    alike = rank.device != "cpu" or seed % 2 == 0
    lines = draw(shared)
    last = max((at for at, line in enumerate(lines) if line.op in COLLECTIVES), default=-1)
    first = next((at for at, line in enumerate(lines) if line.op == "opaque"), -1)
    alone = first > last  # a rank that raises before a collective leaves the others waiting, uncaptured, too
    program = Program(lines, groups, rank)
    always = not alike and own.random() < 0.1
    options = RegionOptions(
        (shared if alike else own).randint(2, 4),
        None if alike else own.choice((1, 1, 2, 64)) * BYTES,
        verify_every=int(always),
        order=shared.choice(("program", "measured")),
        collectives="measured",
    )
    driver = EvenDriver() if rank.device == "cpu" else make_driver(rank.device)
    assert driver is not None
    region = Region(lambda args: program(args), driver, name=f"episode{seed}", options=options)
    Drawn.source = own
    broken.clear()
    broken.update(name for name in ("suspect", "opaque") if own.random() < 0.1)
    ours: Any = program if not alike and own.random() < 0.1 else region
    closes = own.randint(2, 12) if not alike and own.random() < 0.15 else None
    for number in range(shared.randint(6, 24)):
        raises[0] = (own if alone else shared).random() < 0.15
        if broken and own.random() < 0.2:
            broken.clear()
        if number == closes:
            region.close()
        args = arguments(rank, shared, own, shared if alike else own)
        expected = call(program, args, seed + number, groups)
        found = call(ours, args, seed + number, groups)
        names = ("results", "what was raised", "collectives", "arguments that are held", "draws")
        voted = found[2] == [2 * count for count in expected[2]]  # all ranks have replayed, and run uncaptured
        happened["votes"] += voted
        if voted or rank.device != "cpu":  # a group does not count what is sent by a replay on a GPU
            found = (*found[:2], expected[2], *found[3:])
        for what, one, other in zip(names, found, expected, strict=True):
            assert one == other, f"call {number}: {what}: {one} instead of {other}; {options} {lines} {region.record}"
        happened["raised"] += found[1] is not None
    happened["evicting"] += region.record.events["evicted"] > 0
    happened["not captured"] += region.record.captures == 0
    happened.update(f"refused {reason}" for reason in region.record.refusals)
    happened.update(note.partition(":")[0] for note in region.record.notes)
    region.close()
    happened.update(counts)
    counts.clear()  # votes compare them: a rank that has run a program without a region has others


def main(number: int, size: int, store: str, count: int, seed: int, device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.set_device(number)
    rank = Rank(number, size, store, device)
    rank.begin("episodes", SECONDS)
    groups = [distributed.group.WORLD, distributed.new_group(list(range(size)))]
    happened: Counter[str] = Counter()
    differed = 0
    for current in range(seed, seed + count):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        if current % 100 == 0:
            rank.say(reached=current)
        print(f"episode {current}", file=sys.stderr)
        try:
            with torch.no_grad(), drawing():
                episode(current, rank, groups, happened)
        except AssertionError:
            differed += 1
            rank.say(seed=current, error=traceback.format_exc())
    rank.say(episodes=count, first=seed, differed=differed, happened=happened)
    rank.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
