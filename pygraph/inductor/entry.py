"""Enters a program of a single region directly at the region's replay, past most of the code around it.

    emitted:  align inputs ─ take args ─ check ─ device guard ─ prepare on the host ─ pick ─ region ─ fetch ─ return
    entry:    take args ─ prepare on the host ─ pick ─ replay ─┬─ fetch ─ return
                                                      declined └─ the program as emitted, with the same args

A replay checks its arguments and their alignment, and finds device and stream by itself. A program qualifies if all
statements of its syntax tree are of known kinds. The statements before the region run again if the replay declines, so
they must not change arguments. They are skipped if no replay is to be expected.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from pygraph.runtime.region import Region


class _Kind(Enum):
    """Kinds of statements, each by an example."""

    TAKE = "arg0_1, arg1_1 = args"
    CLEAR = "args.clear()"
    CHECK = "assert_size_stride(arg0_1, (4,), (1,))"
    ALIAS = "buf1 = buf0"
    ITEM = "buf3 = buf2[0]"
    BUFFER = "buf0 = empty_strided_cpu((4,), (1,), torch.float32)"
    KERNEL = "cpp_fused_0(arg0_1, buf0, 4)"
    UPLOAD = "buf2 = torch.ops.pygraph.upload.default([buf1], device)"
    DELETE = "del buf2"
    PICK = "partition0_args = [arg1_1, buf3]"
    REGION = "(buf5, buf6) = self.partitions[0](partition0_args)"
    COPY = "buf7.copy_(buf6, False)"
    RETURN = "return (reinterpret_tensor(buf5, (2, 2), (2, 1), 0), buf7, None)"
    OTHER = ""


_READING = (_Kind.KERNEL, _Kind.UPLOAD)
"""Kinds that read tensors on the host."""

_HARMLESS = (_Kind.TAKE, _Kind.CLEAR, _Kind.CHECK, _Kind.ITEM, _Kind.UPLOAD, _Kind.DELETE, _Kind.PICK)
"""Kinds that write no tensor and create no alias."""

_AFTER = (_Kind.ALIAS, _Kind.BUFFER, _Kind.CHECK, _Kind.DELETE, _Kind.COPY, _Kind.RETURN)
"""Kinds that may follow the region: results are fetched to the host, viewed and returned."""


_CALLS = {
    "args.clear": _Kind.CLEAR,
    "assert_alignment": _Kind.CHECK,
    "assert_size_stride": _Kind.CHECK,
    "empty_strided_cpu": _Kind.BUFFER,
    "get_raw_stream": _Kind.CHECK,
    "torch.cuda.set_device": _Kind.CHECK,
    "torch.ops.pygraph.upload.default": _Kind.UPLOAD,
}


def entry_text(source: str) -> str | None:
    """The text of the entry function for a program with text ``source``; None if the program does not qualify."""
    tree = ast.parse(source)
    mains = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "call"]
    statements = [(_kind(s), s) for s in _flat(mains[0].body)] if len(mains) == 1 else []
    regions = [position for position, (kind, _) in enumerate(statements) if kind is _Kind.REGION]
    if len(regions) != 1:
        return None
    (position,) = regions
    before, (_, region), after = statements[:position], statements[position], statements[position + 1 :]
    if not all(kind in _AFTER for kind, _ in after) or not _change_no_argument(before, _written_operands(tree)):
        return None
    given, _ = _names(region, ast.Load)  # ``self`` is deeper
    taken = [name for kind, s in before if kind is _Kind.TAKE for name in _names(s, ast.Store)]
    picked = {_names(s, ast.Store)[0]: _names(s, ast.Load) for kind, s in before if kind is _Kind.PICK}
    if given not in picked or not taken:
        return None
    # A replay checks its own arguments. Tensors that are read on the host are not among them.
    checked = {name for kind, s in before if kind in _READING for name in _names(s, ast.Load)}.intersection(taken)
    kept = [(kind, s) for kind, s in before if kind is not _Kind.CHECK or checked.intersection(_names(s, ast.Load))]
    held = {name for names in picked.values() for name in names}
    lines: list[str] = []
    late: list[str] = []  # deletions of names that are no arguments of the region: they wait for the replay
    if any(kind in (_Kind.UPLOAD, _Kind.BUFFER) for kind, _ in kept):
        lines += ["if not _ready():", "    return _program(args)"]
    for kind, statement in kept:
        if kind is not _Kind.DELETE:
            lines.append(ast.unparse(statement))
            continue
        for name in _names(statement, ast.Del):
            (lines if name in held else late).append(f"del {name}")
    lines += [
        f"_outputs = _replay({given})",
        "if _outputs is None:",
        f"    [{', '.join(picked[given])}] = {given}",
        f"    args[:] = [{', '.join(taken)}]",
        f"    del {', '.join(dict.fromkeys([*taken, *picked[given], given]))}",
        "    return _program(args)",
        *late,
        f"[{', '.join(_names(region, ast.Store))}] = _outputs",
        *(ast.unparse(statement) for kind, statement in after if kind is not _Kind.CHECK),
    ]
    return "def call(args):\n" + "\n".join(f"    {line}" for line in lines)


def bind(text: str, namespace: Mapping[str, Any], region: Region, program: Callable[..., Any]) -> Callable[..., Any]:
    """The entry function with this ``text`` for ``program``. ``namespace``: the globals of the emitted module."""
    names = {**namespace, "_replay": region.try_replay, "_ready": region.expects_replay, "_program": program}
    exec(compile(text, "<pygraph entry>", "exec"), names)
    made: Callable[..., Any] = names["call"]
    return made


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with each device guard replaced by its body."""
    for statement in body:
        match statement:
            case ast.With([ast.withitem(ast.Call(guard))]) if ast.unparse(guard) == "torch.cuda._DeviceGuard":
                yield from _flat(statement.body)
            case _:
                yield statement


def _kind(statement: ast.stmt) -> _Kind:
    match statement:
        case ast.Assign([ast.Name()], ast.Name() | ast.Constant()):
            return _Kind.ALIAS
        case ast.Assign([ast.Name()], ast.Subscript(ast.Name(), ast.Constant(int()))):
            return _Kind.ITEM
        case ast.Assign([ast.Name()], ast.List(items)) if _are_names(items):
            return _Kind.PICK
        case ast.Assign([ast.Tuple(items)], ast.Name("args")) if _are_names(items):
            return _Kind.TAKE
        case ast.Assign([ast.Tuple(items)], ast.Call(called, [ast.Name()], [])) if _are_names(items):
            return _Kind.REGION if ast.unparse(called) == "self.partitions[0]" else _Kind.OTHER
        case ast.Expr(ast.Call(ast.Name(name), operands, [])) if name.startswith("cpp_fused"):
            known = all(isinstance(operand, (ast.Name, ast.Constant)) for operand in operands)
            return _Kind.KERNEL if known else _Kind.OTHER
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(), "copy_"))):
            return _Kind.COPY
        case ast.Expr(ast.Call(called)) | ast.Assign([ast.Name()], ast.Call(called)):
            return _CALLS.get(ast.unparse(called), _Kind.OTHER)
        case ast.Delete(items) if _are_names(items):
            return _Kind.DELETE
        case ast.Return(ast.Tuple(items)) if all(map(_is_result, items)):
            return _Kind.RETURN
    return _Kind.OTHER


def _is_result(item: ast.expr) -> bool:
    """True if a returned expression computes nothing: a name, a constant, or a view."""
    match item:
        case ast.Name() | ast.Constant() | ast.Call(ast.Name("reinterpret_tensor")):
            return True
    return False


def _are_names(expressions: Sequence[ast.expr]) -> bool:
    return all(isinstance(expression, ast.Name) for expression in expressions)


def _names(statement: ast.stmt, use: type[ast.expr_context]) -> list[str]:
    """The names that a statement loads, stores or deletes: by depth, then from left to right."""
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, use)]


def _change_no_argument(statements: Sequence[tuple[_Kind, ast.stmt]], kernels: Mapping[str, Sequence[bool]]) -> bool:
    """True if ``statements`` are known to write only buffers that they allocate. ``kernels``: the result of
    ``_written_operands``."""
    buffers: set[str] = set()
    for kind, statement in statements:
        match statement:
            case ast.Assign([ast.Name(name)]) if kind is _Kind.BUFFER:
                buffers.add(name)
            case ast.Assign([ast.Name(name)], value) if kind is _Kind.ALIAS:
                buffers.update([name] if isinstance(value, ast.Name) and value.id in buffers else ())
            case ast.Expr(ast.Call(ast.Name(name), operands)) if kind is _Kind.KERNEL:
                written = kernels.get(name, ())
                if len(written) != len(operands):
                    return False
                changed = [operand for operand, one in zip(operands, written, strict=True) if one]
                if not all(isinstance(operand, ast.Name) and operand.id in buffers for operand in changed):
                    return False
            case _ if kind not in _HARMLESS:
                return False
    return True


def _written_operands(tree: ast.Module) -> Mapping[str, Sequence[bool]]:
    """For each C++ kernel that a module binds, a flag per operand: True for a non-const pointer, which it may write."""
    found: dict[str, Sequence[bool]] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(function, [ast.List(types), *_])):
                declared = [each.value for each in types if isinstance(each, ast.Constant)]
                if ast.unparse(function) == "async_compile.cpp_pybinding":
                    found[name] = [str(t).endswith("*") and not str(t).startswith("const ") for t in declared]
    return found
