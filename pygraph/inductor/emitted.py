"""The program that Inductor emitted: its steps as scheduled, and its text, read back and commented.

The steps are recorded while Inductor schedules, and stored with its compiled graph, so that a program from its cache
has them. The text is the program that runs, also from a cache; nothing is assumed that the text does not show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pygraph.program.recording import Origin
from pygraph.runtime.control import MODULE

if TYPE_CHECKING:  # a restored program needs none
    from pygraph.inductor.decision import Decision, Placed

# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PatternNode:
    """An FX node made by Inductor's own passes, which no decision names.
    ``sources``: the nodes of the decision from which it was made; empty if unknown. ``reason``: why it has to stay
    outside of regions, if so. ``eager``: why a region calls it between two segments, if so."""

    name: str
    op: str
    sources: tuple[str, ...]
    reason: str | None = None
    eager: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled (fused) node: its buffers, the FX nodes that it computes, and the reason why it is outside, if any.

    ``made`` describes the FX nodes among them that Inductor made.
    """

    buffers: tuple[str, ...]
    origins: tuple[str, ...]
    launches: bool
    reason: str | None
    made: tuple[PatternNode, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """The program as cut: runs of steps in order. Run ``i`` is a region if ``inside[i]``.

    Under an exact decision, ``planned[i]`` is the decision's region for run ``i``, and ``differences`` say where
    Inductor could not follow the decision.
    """

    runs: tuple[tuple[Step, ...], ...]
    inside: tuple[bool, ...]
    planned: tuple[int | None, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def regions(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each region, in the order of Inductor's partition functions."""
        return tuple(run for run, inside in zip(self.runs, self.inside, strict=True) if inside)

    @property
    def outside(self) -> tuple[Step, ...]:
        """The steps that stay outside."""
        return tuple(s for run, inside in zip(self.runs, self.inside, strict=True) if not inside for s in run)


class RecordedMaps(list[object]):
    """Inductor's list of partition maps, carrying the record through its caches."""

    def __init__(self, maps: Iterable[object], record: ProgramRecord) -> None:
        super().__init__(maps)
        self.record = record


def program_record(compiled: Any) -> ProgramRecord | None:
    """The record of the partition of ``compiled``, also from a cache; None if it was not partitioned."""
    maps = getattr(compiled, "partition_maps", None)  # a graph without operators becomes a plain function
    return getattr(maps, "record", None)


# -- text --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmittedRegion:
    """One ``partition_i`` function: its arguments and the kernels that it calls, in order."""

    index: int
    line: int
    arguments: tuple[str, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EmittedProgram:
    """The region functions in order, and the kernels and operators that the main function calls itself."""

    regions: tuple[EmittedRegion, ...]
    outside: tuple[str, ...]


def read_program(source: str) -> EmittedProgram:
    """Read the emitted ``source``. Raises SyntaxError if it is not Python."""
    tree = ast.parse(source)
    functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    numbered = ((name.removeprefix("partition_"), f) for name, f in functions.items() if name.startswith("partition_"))
    named = sorted((int(number), f) for number, f in numbered if number.isdigit())
    regions = tuple(EmittedRegion(i, f.lineno, _arguments(f), tuple(_kernels(f, functions))) for i, f in named)
    return EmittedProgram(regions, tuple(_kernels(functions["call"], functions)) if "call" in functions else ())


def _arguments(function: ast.FunctionDef) -> tuple[str, ...]:
    for statement in function.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
            return tuple(node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name))
    return ()


def _kernels(code: ast.AST, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """``_kernel_calls``, with a branch or loop replaced by the calls of its bodies, which are among ``functions``."""
    for call, name in _named_calls(code):
        if not name.startswith("hop."):
            yield name
            continue
        for body in (each.id for each in call.args if isinstance(each, ast.Name) and each.id in functions):
            yield from _kernels(functions[body], functions)


def _kernel_calls(code: ast.AST) -> Iterator[str]:
    """The kernels and operators that ``code`` calls, by name, in the order of its text."""
    return (name for _, name in _named_calls(code))


def _named_calls(code: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    calls = [n for n in ast.walk(code) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset)):
        name = _kernel_name(ast.unparse(call.func))
        if name:
            yield call, name


def _kernel_name(called: str) -> str | None:
    """The kernel behind a called expression; None for allocations, views and asserts."""
    root, _, rest = called.partition(".")
    if root.startswith(("cpp_", "triton_")) or rest == "run":
        return root
    if root == MODULE:
        return f"hop.{rest}"
    if root == "extern_kernels":
        return called
    if called.startswith(("aten.", "torch.ops.", "inductor_ops.", "_quantized.")):
        return None if rest.endswith("._alloc_from_pool") else called.removeprefix("torch.ops.")
    if called.endswith(".item"):
        return "item"
    if called.endswith((".copy_", ".fill_", ".zero_")):
        return called.rpartition(".")[2]
    return None


def annotate(source: str, above: Mapping[int, Sequence[str]], header: Sequence[str]) -> str:
    """``source`` with comment lines above each region function (``above`` maps its index) and at the top."""
    lines = source.splitlines()
    for region in sorted(read_program(source).regions, key=lambda r: -r.line):
        lines[region.line - 1 : region.line - 1] = [f"# {note}" for note in above.get(region.index, ())]
    return "\n".join([*(f"# {note}" for note in header), *lines, ""])


# -- operators of each line of a region --------------------------------------------------------------------------------


def line_origins(
    source: str, regions: Sequence[EmittedRegion], steps: Sequence[Sequence[Step]], decision: Decision
) -> list[Mapping[int, Origin]]:
    """For each of ``regions``, whose ``steps`` Inductor scheduled: line ▸ the operators that it runs.

    Line 0 is the first line of the region's function. Steps that the text identifies are matched exactly: the first
    launch that mentions a buffer belongs to the buffer's own step. If the text does not identify a step (work in place,
    several steps in one kernel), the line gets every step that is possible there.
    """
    functions = {f.lineno: f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)}
    pairs = zip(regions, steps, strict=True)
    return [_LineMap(functions[region.line], run, decision).origins() for region, run in pairs]


@dataclass(slots=True)
class _Statement:
    """A statement that launches: its lines, its calls, the names that it mentions, and the steps that it may run."""

    lines: range
    called: tuple[str, ...]
    names: frozenset[str]
    steps: list[int] = field(default_factory=list)


def _statements(body: Sequence[ast.stmt], start: int) -> Iterator[_Statement]:
    """Statements that launch, in order; compound statements are replaced by their bodies."""
    for statement in body:
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, ())]
        called = () if inner else tuple(_kernel_calls(statement))
        if called:
            lines = range(statement.lineno - start, (statement.end_lineno or statement.lineno) - start + 1)
            yield _Statement(lines, called, frozenset(n.id for n in ast.walk(statement) if isinstance(n, ast.Name)))
        yield from _statements(inner, start)


class _LineMap:
    """The statements of a region's function, and the steps that it runs."""

    def __init__(self, function: ast.FunctionDef, run: Sequence[Step], decision: Decision) -> None:
        self.statements = list(_statements(function.body, function.lineno))
        self.steps = [step for step in run if step.launches]
        self.decision = decision
        self.made = {made.name: made for step in run for made in step.made}

    def origins(self) -> Mapping[int, Origin]:
        self._match()
        found: dict[int, Origin] = {}
        for statement in self.statements:
            steps = [self.steps[i] for i in statement.steps]
            # If the statement calls operators of a step by name, only those count.
            nodes = [n for step in steps for n in self._named(step, statement) or filter(self._op, step.origins)]
            sources = [source for node in nodes for source in self._sources(node)]
            locs = dict.fromkeys(source.loc for source in sources if source.loc is not None)
            modules = dict.fromkeys(source.module for source in sources if source.module)
            origin = Origin(tuple(dict.fromkeys(nodes)), tuple(locs), tuple(modules))
            found.update(dict.fromkeys(statement.lines, origin))
        return found

    def _match(self) -> None:
        """Fill in the steps of each statement: those whose buffers it is the first to mention, then the others."""
        maker = {name: i for i, step in enumerate(self.steps) for name in step.buffers}
        seen: set[int] = set()
        reached = -1
        for statement in self.statements:
            new = sorted({maker[name] for name in statement.names if name in maker} - seen)
            statement.steps = [i for i in new if i > reached]
            seen.update(new)
            reached = max([reached, *statement.steps])
        gap: list[_Statement] = []
        before: list[_Statement] = []
        for statement in self.statements:
            if statement.steps:
                self._fill(gap, before, [statement])
                gap, before = [], [statement]
            else:
                gap.append(statement)
        self._fill(gap, before, [])

    def _fill(self, gap: list[_Statement], before: list[_Statement], after: list[_Statement]) -> None:
        """Assign the steps that are open around ``gap`` to its statements, and to those right before and after it.

        Each statement gets one step, in order, if each of them calls the operator of its step.
        """
        low, high = (max(s.steps) + 1 for s in before), (min(s.steps) for s in after)
        open_steps = list(range(next(low, 0), next(high, len(self.steps))))
        pairs = list(zip(gap, open_steps, strict=False))
        if len(gap) == len(open_steps) and all(self._named(self.steps[i], statement) for statement, i in pairs):
            for statement, i in pairs:
                statement.steps = [i]
            return
        around = [i for statement in (*before, *after) for i in statement.steps]
        for statement in gap:
            named = [i for i in open_steps if self._named(self.steps[i], statement)]
            statement.steps = named or sorted({*open_steps, *around})
        for statement in (*before, *after):
            if any(name.startswith(("cpp_", "triton_")) for name in statement.called):  # may hold several steps
                statement.steps = sorted({*statement.steps, *open_steps})

    def _named(self, step: Step, statement: _Statement) -> list[str]:
        """The nodes of ``step`` whose operators the statement calls by name."""
        return [name for name in step.origins if self._op(name) in statement.called]

    def _op(self, name: str) -> str | None:
        node = self.made.get(name) or self.decision.nodes.get(name)
        return None if node is None else node.op

    def _sources(self, name: str) -> list[Placed]:
        sources = self.made[name].sources if name in self.made else (name,)
        return [self.decision.nodes[source] for source in sources if source in self.decision.nodes]
