"""A shortcut past Inductor's main function, for programs that consist of a single region.

The emitted function is kept but for its checks, which a replay makes itself; the region's replay is asked first, and
where it declines, the whole program runs as emitted. Which programs qualify is read off their text: beside calling
the region they may fetch results to the host and take views of them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["shortcut"]

_MAIN = "call"
_PARTITION = "self.partitions[0]"
_DROPPED = ("assert_size_stride", "assert_alignment", "torch.cuda.set_device", "get_raw_stream")
"""Calls that a replay needs no more: it checks its arguments, and finds device and stream by itself."""

_REPLAY, _PROGRAM, _OUTPUTS = "_pygraph_replay", "_pygraph_program", "_pygraph_outputs"

Boxed = Callable[[list[Any]], Any]


def shortcut(
    source: str, namespace: Mapping[str, Any], replay: Callable[[list[Any]], Sequence[Any] | None], program: Boxed
) -> Boxed | None:
    """A function like ``program``, whose text is ``source``, that tries ``replay`` on the region's arguments first.

    ``replay`` returns None, with the list as it was, when it declines. ``namespace`` is that of the emitted module.
    None when the program does anything beside calling its one region and copying results to the host after it.

    emitted:  take args ─ check ─ pick ─ region ─ return      becomes:  take args ─ pick ─ replay ─┬─ return
                                                                                           declined └─ program(args)
    """
    main = _main(source)
    body = None if main is None else _rewritten(main)
    if main is None or body is None:
        return None
    parameters = ast.arguments([], [ast.arg("args")], None, [], [], None, [])
    function = ast.parse("def call(args): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.args, function.body = parameters, body
    module = ast.fix_missing_locations(ast.Module([function], []))
    names = {**namespace, _REPLAY: replay, _PROGRAM: program}
    exec(compile(module, "<pygraph shortcut>", "exec"), names)
    made: Boxed = names[_MAIN]
    return made


def _main(source: str) -> ast.FunctionDef | None:
    found = [f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef) and f.name == _MAIN]
    return found[0] if len(found) == 1 else None


def _rewritten(main: ast.FunctionDef) -> list[ast.stmt] | None:
    """The statements of the shortcut, or None if there are others than those of a lone region."""
    kept: list[ast.stmt] = []
    taken: list[str] = []
    picked: dict[str, list[str]] = {}
    called = False
    for statement in _flat(main.body):
        kind = _kind(statement)
        if kind == "dropped":
            continue
        if kind == "other" or (kind == "region" and called) or (kind == "fetch" and not called):
            return None
        if isinstance(statement, ast.Delete) and not called and not _are_picked(statement, picked):
            return None
        if kind == "take":
            taken = _names(statement)
        if kind == "pick":
            picked[_names(statement)[0]] = _names(statement)[1:]
        if kind != "region":
            kept.append(statement)
            continue
        called = True
        kept += _tried(statement, taken, picked)
    return kept if called and taken else None


def _flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements, with those under a device guard in its place."""
    flat: list[ast.stmt] = []
    for statement in body:
        guarded = isinstance(statement, ast.With) and ast.unparse(statement).startswith("with torch.cuda._DeviceGuard(")
        flat += _flat(statement.body) if guarded and isinstance(statement, ast.With) else [statement]
    return flat


def _kind(statement: ast.stmt) -> str:
    """What a statement of the main function does: take, pick, region, fetch, dropped, plain, or other."""
    if isinstance(statement, ast.Delete):
        return "plain"
    if isinstance(statement, ast.Return):
        return "plain" if _is_result(statement.value) else "other"
    if isinstance(statement, ast.Expr):
        text = ast.unparse(statement)
        known = "plain" if text == "args.clear()" else "dropped" if text.startswith(_DROPPED) else "other"
        return "fetch" if _is_copy(statement.value) else known
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return "other"
    return _assignment(statement.targets[0], statement.value)


def _assignment(target: ast.expr, value: ast.expr) -> str:
    text = ast.unparse(value)
    if text == "args":
        return "take"
    if isinstance(value, ast.Call) and text.startswith(_PARTITION) and isinstance(target, ast.Tuple):
        return "region"
    if isinstance(value, ast.Call) and text.startswith(_DROPPED):
        return "dropped"
    if isinstance(value, ast.Call) and isinstance(target, ast.Name) and _is_host_buffer(value):
        return "fetch"
    if isinstance(value, ast.List) and all(isinstance(item, ast.Name) for item in value.elts):
        return "pick"
    return "plain" if isinstance(value, ast.Name) and isinstance(target, ast.Name) else "other"


def _is_result(value: ast.expr | None) -> bool:
    """Whether an expression is a tuple of variables, constants and views of variables in fixed sizes."""
    return isinstance(value, ast.Tuple) and all(map(_is_plain, value.elts))


def _is_plain(item: ast.expr) -> bool:
    if isinstance(item, (ast.Name, ast.Constant)):
        return True
    if not isinstance(item, ast.Call) or ast.unparse(item.func) != "reinterpret_tensor" or item.keywords:
        return False
    return isinstance(item.args[0], ast.Name) and all(_is_literal(argument) for argument in item.args[1:])


def _is_host_buffer(value: ast.Call) -> bool:
    """Whether a call makes a tensor of fixed size on the CPU, as results that are fetched get."""
    if ast.unparse(value.func) != "empty_strided_cpu" or value.keywords or len(value.args) != 3:
        return False
    *sizes, dtype = value.args
    return all(map(_is_literal, sizes)) and ast.unparse(dtype).startswith("torch.")


def _is_copy(value: ast.expr) -> bool:
    """Whether an expression copies a variable, or a view of one in fixed sizes, into another variable."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.keywords:
        return False
    into, flags = value.func.value, value.args[1:]
    if value.func.attr != "copy_" or not isinstance(into, ast.Name) or not value.args:
        return False
    source = value.args[0]
    return not isinstance(source, ast.Constant) and _is_plain(source) and all(map(_is_literal, flags))


def _is_literal(value: ast.expr) -> bool:
    return all(isinstance(node, (ast.Tuple, ast.Constant, ast.Load)) for node in ast.walk(value))


def _names(statement: ast.stmt) -> list[str]:
    """The variables of a statement in the order of its text, but for ``args``."""
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id != "args"]
    return [name.id for name in sorted(found, key=lambda name: (name.lineno, name.col_offset))]


def _are_picked(deleted: ast.Delete, picked: Mapping[str, Sequence[str]]) -> bool:
    """Whether what is let go of before the region is called can be had back from the region's arguments."""
    held = {name for names in picked.values() for name in names}
    return held.issuperset(_names(deleted))


def _tried(region: ast.stmt, taken: Sequence[str], picked: Mapping[str, Sequence[str]]) -> list[ast.stmt]:
    """``outputs = region(picked)``, with what happens when the region declines: every argument is put back.

    They are put into the caller's list, so that nothing here holds what the program lets go of as it runs.
    """
    assert isinstance(region, ast.Assign)
    assert isinstance(region.value, ast.Call)
    given = ast.unparse(region.value.args[0])
    held = ", ".join(dict.fromkeys([*taken, *picked[given], given]))
    text = f"""
{_OUTPUTS} = {_REPLAY}({given})
if {_OUTPUTS} is None:
    [{", ".join(picked[given])}] = {given}
    args[:] = [{", ".join(taken)}]
    del {held}
    return {_PROGRAM}(args)
"""
    region.value = ast.Name(_OUTPUTS, ast.Load())
    return [*ast.parse(text).body, region]
