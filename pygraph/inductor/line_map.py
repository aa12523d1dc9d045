"""Which operators each line of an emitted region runs: Inductor's steps matched with the statements that launch.

What the text shows is matched exactly: a buffer is first launched into by its own step. Where it shows nothing (work in
place, several steps in one kernel), every step that may be meant is named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pygraph.inductor.decision import Decision
from pygraph.inductor.emitted import EmittedRegion, Step, kernel_calls
from pygraph.runtime.provenance import Origin

__all__ = ["line_origins"]

_FUSED = ("cpp_", "triton_")
"""How the names of kernels that hold several steps begin."""


@dataclass(slots=True)
class _Statement:
    """A statement that launches: its lines, what it calls, what it mentions, and the steps that it may run."""

    first: int
    last: int
    called: tuple[str, ...]
    names: frozenset[str]
    steps: list[int] = field(default_factory=list)

    @property
    def fused(self) -> bool:
        return any(name.startswith(_FUSED) for name in self.called)


def line_origins(
    source: str, regions: Sequence[EmittedRegion], steps: Sequence[Sequence[Step]], decision: Decision
) -> list[Mapping[int, Origin]]:
    """For each of ``regions``, whose ``steps`` Inductor scheduled: line ▸ the operators that it runs.

    Lines count from the first one of the region's function, which is 0.
    """
    functions = {f.lineno: f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)}
    return [
        _origins(functions[region.line], run, _Facts(decision, run)) for region, run in zip(regions, steps, strict=True)
    ]


def _origins(function: ast.FunctionDef, run: Sequence[Step], facts: _Facts) -> Mapping[int, Origin]:
    steps = [step for step in run if step.launches]
    statements = list(_statements(function.body))
    _match(statements, steps, facts)
    found: dict[int, Origin] = {}
    for statement in statements:
        origin = facts.origin([steps[i] for i in statement.steps], statement.called)
        for line in range(statement.first, statement.last + 1):
            found[line - function.lineno] = origin
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[_Statement]:
    """Those that launch, in order; of compound statements, what is in them."""
    for statement in body:
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, ())]
        if inner:
            yield from _statements(inner)
            continue
        called = tuple(kernel_calls(statement))
        if called:
            names = frozenset(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
            yield _Statement(statement.lineno, statement.end_lineno or statement.lineno, called, names)


# -- statements and steps ------------------------------------------------------------------------------------------


def _match(statements: Sequence[_Statement], steps: Sequence[Step], facts: _Facts) -> None:
    """Fill in the steps of each statement: those whose buffers it is the first to mention, then what is left over."""
    maker = {name: i for i, step in enumerate(steps) for name in step.buffers}
    seen: set[int] = set()
    reached = -1
    for statement in statements:
        new = sorted({maker[name] for name in statement.names if name in maker} - seen)
        statement.steps = [i for i in new if i > reached]
        seen.update(new)
        reached = max([reached, *statement.steps])
    start = 0
    for position in range(len(statements) + 1):
        if position == len(statements) or statements[position].steps:
            _fill(statements[start:position], statements, (start, position), steps, facts)
            start = position + 1


def _fill(
    gap: Sequence[_Statement],
    statements: Sequence[_Statement],
    bounds: tuple[int, int],
    steps: Sequence[Step],
    facts: _Facts,
) -> None:
    """The statements between two that are matched, or before the first, or after the last."""
    before = statements[bounds[0] - 1] if bounds[0] else None
    after = statements[bounds[1]] if bounds[1] < len(statements) else None
    low = max(before.steps) if before else -1
    high = min(after.steps) if after else len(steps)
    open_steps = list(range(low + 1, high))
    if _paired(gap, open_steps, steps, facts):
        return
    neighbours = [statement for statement in (before, after) if statement is not None]
    around = [i for statement in neighbours for i in statement.steps]
    for statement in gap:
        named = [i for i in open_steps if facts.runs(steps[i], statement.called)]
        statement.steps = named or sorted({*open_steps, *around})
    for statement in neighbours:
        if statement.fused:
            statement.steps = sorted({*statement.steps, *open_steps})


def _paired(gap: Sequence[_Statement], open_steps: Sequence[int], steps: Sequence[Step], facts: _Facts) -> bool:
    """One step for each statement, in order, where every one calls the operator that its step computes."""
    fits = len(gap) == len(open_steps) and all(
        facts.runs(steps[i], statement.called) for statement, i in zip(gap, open_steps, strict=True)
    )
    if fits:
        for statement, i in zip(gap, open_steps, strict=True):
            statement.steps = [i]
    return fits


# -- steps and operators -------------------------------------------------------------------------------------------


class _Facts:
    """Operator and user line of every node that the steps of a region compute."""

    def __init__(self, decision: Decision, run: Sequence[Step]) -> None:
        self._ops: dict[str, str] = {name: placed.op for name, placed in decision.nodes.items()}
        self._locs: dict[str, tuple[str | None, ...]] = {name: (placed.loc,) for name, placed in decision.nodes.items()}
        for made in (made for step in run for made in step.made):
            self._ops[made.name] = made.op
            self._locs[made.name] = tuple(decision.nodes[name].loc for name in made.sources if name in decision.nodes)

    def runs(self, step: Step, called: Sequence[str]) -> bool:
        """Whether one of the operators of ``step`` is called by name."""
        return bool(self._named(step, called))

    def origin(self, steps: Sequence[Step], called: Sequence[str]) -> Origin:
        """What ``steps`` compute; of a step, only the operators that are called by name, if there are any."""
        found = [name for step in steps for name in self._named(step, called) or self._nodes(step)]
        nodes = tuple(dict.fromkeys(found))
        locs = dict.fromkeys(loc for name in nodes for loc in self._locs[name] if loc is not None)
        return Origin(nodes, tuple(locs))

    def _nodes(self, step: Step) -> list[str]:
        return [name for name in step.origins if name in self._ops]

    def _named(self, step: Step, called: Sequence[str]) -> list[str]:
        return [name for name in self._nodes(step) if self._ops[name] in called]
