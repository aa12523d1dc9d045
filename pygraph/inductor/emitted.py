"""The program that Inductor emitted: its steps as scheduled, and its text, read back and commented.

The steps are noted while Inductor schedules and kept with its compiled graph, so that a program from its cache brings
them along. The text is what runs, also when it comes from a cache; nothing is assumed that it does not show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "EmittedProgram",
    "EmittedRegion",
    "PatternNode",
    "ProgramRecord",
    "RecordedMaps",
    "Step",
    "annotate",
    "kernel_calls",
    "program_record",
    "read_program",
]

# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PatternNode:
    """An FX node that Inductor's own passes made, so that no decision names it: its operator, and the nodes of the
    decision that it was made from. Without any, nobody knows. ``reason`` says why it has to be outside, if it has."""

    name: str
    op: str
    sources: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled (fused) node: its buffers, the FX nodes that it computes, and why it is outside, if it is.

    ``made`` describes those of them that Inductor made.
    """

    buffers: tuple[str, ...]
    origins: tuple[str, ...]
    launches: bool
    reason: str | None
    made: tuple[PatternNode, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """The program as cut: runs of steps in order. Run ``i`` is a region when ``inside[i]``."""

    runs: tuple[tuple[Step, ...], ...]
    inside: tuple[bool, ...]

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

    def __reduce__(self) -> tuple[object, ...]:
        return (RecordedMaps, (list(self), self.record))


def program_record(compiled: Any) -> ProgramRecord | None:
    """What was noted while ``compiled`` was made, also when it came from a cache; None when it was not cut."""
    maps = getattr(compiled, "partition_maps", None)  # a graph without operators becomes a plain function
    return getattr(maps, "record", None)


# -- text --------------------------------------------------------------------------------------------------------------

_PREFIX = "partition_"
_MAIN = "call"


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
    """Read the emitted ``source``. Raises SyntaxError when it is no Python."""
    tree = ast.parse(source)
    functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    named = sorted((int(name[len(_PREFIX) :]), f) for name, f in functions.items() if _is_region(name))
    regions = tuple(EmittedRegion(i, f.lineno, _arguments(f), tuple(kernel_calls(f))) for i, f in named)
    main = functions.get(_MAIN)
    return EmittedProgram(regions, tuple(kernel_calls(main)) if main is not None else ())


def _is_region(name: str) -> bool:
    return name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit()


def _arguments(function: ast.FunctionDef) -> tuple[str, ...]:
    for statement in function.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
            names = [node for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)]
            return tuple(name.id for name in sorted(names, key=lambda name: (name.lineno, name.col_offset)))
    return ()


def kernel_calls(code: ast.AST) -> Iterator[str]:
    """The kernels and operators that ``code`` calls, by name, in the order of its text."""
    calls = [n for n in ast.walk(code) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset)):
        name = _kernel_name(ast.unparse(call.func))
        if name:
            yield name


def _kernel_name(called: str) -> str | None:
    """The kernel behind a called expression; None for allocations, views and asserts."""
    root, _, rest = called.partition(".")
    if root.startswith(("cpp_", "triton_")) or rest == "run":
        return root
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
    program = read_program(source)
    for region in sorted(program.regions, key=lambda r: -r.line):
        notes = [f"# {note}" for note in above.get(region.index, ())]
        lines[region.line - 1 : region.line - 1] = notes
    return "\n".join([*(f"# {note}" for note in header), *lines, ""])
