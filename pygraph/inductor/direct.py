"""A shortcut past Inductor's main function, for programs that consist of a single region.

The emitted function is kept but for its checks, which a replay makes itself; the region's replay is asked first, and
where it declines, the whole program runs as emitted. Which programs qualify is read off their text: beside calling
the region they may compute values on the host and upload them before it, fetch results to the host after it, and take
views of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from pygraph.inductor.statements import kind_of, names_in, written_operands
from pygraph.inductor.wrap import MAIN, PROGRAM, READY, REPLAY

__all__ = ["shortcut"]

_OUTPUTS = "_pygraph_outputs"


def shortcut(source: str) -> str | None:
    """The text of a function like the main function of a program, whose text is ``source``, with the region's
    replay tried first; ``wrap.bind`` makes it. None when the program does anything beside preparing values on the host,
    uploading them, calling its one region and copying results to the host after it.

    emitted:  take args ─ check ─ prepare ─ pick ─ region ─ fetch ─ return
    becomes:  ready? ─ take args ─ prepare ─ pick ─ replay ─┬─ fetch ─ return
                                                   declined └─ program(args), which prepares again: that changes no
                                                               argument
    """
    tree = ast.parse(source)
    main = _main(tree)
    body = None if main is None else _rewritten(main, written_operands(tree))
    if body is None:
        return None
    parameters = ast.arguments([], [ast.arg("args")], None, [], [], None, [])
    function = ast.parse(f"def {MAIN}(args): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.args, function.body = parameters, body
    return ast.unparse(ast.fix_missing_locations(function))


def _main(tree: ast.Module) -> ast.FunctionDef | None:
    found = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == MAIN]
    return found[0] if len(found) == 1 else None


def _rewritten(main: ast.FunctionDef, kernels: Mapping[str, Sequence[bool]]) -> list[ast.stmt] | None:
    """The statements of the shortcut, or None if there are others than those of a lone region."""
    statements = _flat(main.body)
    rewriting = _Rewriting(statements, kernels)
    if not all(map(rewriting.add, statements)) or not rewriting.complete:
        return None
    asked = ast.parse(f"if not {READY}():\n    return {PROGRAM}(args)").body
    return [*(asked if rewriting.prepares else ()), *rewriting.kept]


def _flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements, with those under a device guard in its place."""
    flat: list[ast.stmt] = []
    for statement in body:
        guarded = isinstance(statement, ast.With) and ast.unparse(statement).startswith("with torch.cuda._DeviceGuard(")
        flat += _flat(statement.body) if guarded and isinstance(statement, ast.With) else [statement]
    return flat


class _Rewriting:
    """The shortcut, statement by statement. ``kernels`` says which operands each C++ kernel writes."""

    def __init__(self, statements: Sequence[ast.stmt], kernels: Mapping[str, Sequence[bool]]) -> None:
        self.kept: list[ast.stmt] = []
        self._kernels = kernels
        self._read = {name for each in statements if kind_of(each) in ("upload", "kernel") for name in names_in(each)}
        self._taken: list[str] = []
        self._picked: dict[str, list[str]] = {}
        self._buffers: set[str] = set()
        self._uploaded: set[str] = set()
        self._late: list[str] = []
        self._called = False

    @property
    def complete(self) -> bool:
        """Whether the region was met, and what it is given is known."""
        return self._called and bool(self._taken)

    @property
    def prepares(self) -> bool:
        """Whether anything but picking arguments comes before the region."""
        return bool(self._buffers or self._uploaded)

    def add(self, statement: ast.stmt) -> bool:
        """Take the next statement; False if it is none of a lone region's."""
        kind = kind_of(statement)
        if kind == "check":
            return self._check(statement)
        allowed = self._after(kind) if self._called else self._before(kind, statement)
        if not allowed:
            return False
        if kind == "delete" and not self._called:
            self.kept += self._deleted(names_in(statement))
        elif kind == "region":
            self.kept += self._region(statement)
        else:
            self.kept.append(statement)
        return True

    def _check(self, statement: ast.stmt) -> bool:
        """A replay checks what it is given; what is read on the host is not given to it."""
        if not self._called and set(names_in(statement)) & self._read.intersection(self._taken):
            self.kept.append(statement)
        return True

    def _after(self, kind: str) -> bool:
        return kind in ("plain", "rename", "delete", "buffer", "copy")

    def _before(self, kind: str, statement: ast.stmt) -> bool:
        """Whether a statement may come before the region, and again if the replay declines: one that changes no
        argument. What it makes is noted."""
        names = names_in(statement)
        if kind == "take":
            self._taken = names
        elif kind == "pick":
            self._picked[names[0]] = names[1:]
        elif kind == "buffer" or (kind == "rename" and names[1] in self._buffers):
            self._buffers.add(names[0])
        elif kind == "upload":
            self._uploaded.add(names[0])
        elif kind == "item":
            return names[1] in self._uploaded
        elif kind == "kernel":
            return self._fills_buffers(statement)
        elif kind == "region":
            return names[-1] in self._picked
        return kind not in ("copy", "other")

    def _fills_buffers(self, statement: ast.stmt) -> bool:
        """Whether a C++ kernel is known to write nothing but what the program has allocated for it."""
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Call)
        written = self._kernels.get(ast.unparse(statement.value.func))
        operands = statement.value.args
        if written is None or len(written) != len(operands):
            return False
        into = [operand for operand, changed in zip(operands, written, strict=True) if changed]
        return all(isinstance(operand, ast.Name) and operand.id in self._buffers for operand in into)

    def _deleted(self, names: Sequence[str]) -> list[ast.stmt]:
        """Let go of what can be had back from the region's arguments; of anything else once the replay is done."""
        held = {name for given in self._picked.values() for name in given}
        self._late += [name for name in names if name not in held]
        return _letting_go(name for name in names if name in held)

    def _region(self, statement: ast.stmt) -> list[ast.stmt]:
        """``outputs = region(picked)``, with what happens when the region declines: every argument is put back.

        They are put into the caller's list, so that nothing here holds what the program lets go of as it runs.
        """
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        self._called = True
        given = ast.unparse(statement.value.args[0])
        picked = self._picked[given]
        held = dict.fromkeys([*self._taken, *picked, given, *sorted(self._buffers | self._uploaded)])
        text = f"""
{_OUTPUTS} = {REPLAY}({given})
if {_OUTPUTS} is None:
    [{", ".join(picked)}] = {given}
    args[:] = [{", ".join(self._taken)}]
    del {", ".join(held)}
    return {PROGRAM}(args)
"""
        statement.value = ast.Name(_OUTPUTS, ast.Load())
        return [*ast.parse(text).body, *_letting_go(self._late), statement]


def _letting_go(names: Iterable[str]) -> list[ast.stmt]:
    return list(ast.parse("\n".join(f"del {name}" for name in names)).body)
