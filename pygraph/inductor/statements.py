"""What a statement of Inductor's main function does, as far as its text tells; and what a C++ kernel writes.

Only statements of the forms that Inductor emits around a single region are known. What is made of them is ``direct``'s.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from pygraph.ir import UPLOAD

__all__ = ["kind_of", "names_in", "written_operands"]

_PARTITION = "self.partitions[0]"
_UPLOAD = f"torch.ops.{UPLOAD}"
_CHECKS = ("assert_size_stride", "assert_alignment", "torch.cuda.set_device", "get_raw_stream")
"""Calls that a replay needs no more: it checks its arguments, and finds device and stream by itself."""


def kind_of(statement: ast.stmt) -> str:
    """What a statement does:

    - ``take``: unpacks the arguments; ``pick``: lists those of a region; ``region``: calls it
    - ``check``: of arguments, or the choice of a device; ``delete``
    - ``buffer``: allocates memory of fixed size on the host; ``copy``: into such memory
    - ``kernel``: runs a C++ kernel; ``upload``: of host tensors; ``item``: one of a list; ``rename``
    - ``plain``: empties the arguments, or returns variables, constants and views of fixed sizes
    - ``other``
    """
    if isinstance(statement, ast.Delete):
        return "delete"
    if isinstance(statement, ast.Return):
        return "plain" if _is_result(statement.value) else "other"
    if isinstance(statement, ast.Expr):
        return _expression(statement.value)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return "other"
    return _assignment(statement.targets[0], statement.value)


def names_in(statement: ast.stmt) -> list[str]:
    """The variables of a statement in the order of its text, but for ``args``."""
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id != "args"]
    return [name.id for name in sorted(found, key=lambda name: (name.lineno, name.col_offset))]


def written_operands(tree: ast.Module) -> Mapping[str, Sequence[bool]]:
    """For each C++ kernel that a module binds, which of its operands it may write: pointers that are not to const."""
    found: dict[str, Sequence[bool]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        target, call = node.targets[0], node.value
        if not isinstance(target, ast.Name) or not ast.unparse(call.func).endswith(".cpp_pybinding") or not call.args:
            continue
        types = [item.value for item in getattr(call.args[0], "elts", ()) if isinstance(item, ast.Constant)]
        found[target.id] = [each.endswith("*") and not each.startswith("const ") for each in map(str, types)]
    return found


def _expression(value: ast.expr) -> str:
    text = ast.unparse(value)
    if text == "args.clear()":
        return "plain"
    if text.startswith(_CHECKS):
        return "check"
    if _is_copy(value):
        return "copy"
    bare = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.keywords
    return "kernel" if bare and text.startswith("cpp_fused") else "other"


def _assignment(target: ast.expr, value: ast.expr) -> str:
    text = ast.unparse(value)
    if text == "args":
        return "take"
    if isinstance(value, ast.Call) and isinstance(target, ast.Tuple):
        return "region" if text.startswith(_PARTITION) else "other"
    if not isinstance(target, ast.Name):
        return "other"
    if isinstance(value, ast.Call):
        return _made(value, text)
    if isinstance(value, ast.List) and all(isinstance(item, ast.Name) for item in value.elts):
        return "pick"
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and _is_literal(value.slice):
        return "item"
    return "rename" if isinstance(value, ast.Name) else "other"


def _made(value: ast.Call, text: str) -> str:
    """What becomes a variable by a call."""
    if text.startswith(_CHECKS):
        return "check"
    if _is_host_buffer(value):
        return "buffer"
    return "upload" if _is_upload(value) else "other"


def _is_upload(value: ast.Call) -> bool:
    """Whether a call brings variables to a fixed device."""
    if ast.unparse(value.func) != _UPLOAD or value.keywords or len(value.args) != 2:
        return False
    sources, device = value.args
    known = isinstance(device, ast.Call) and ast.unparse(device.func) == "device"
    fixed = known and all(isinstance(word.value, ast.Constant) for word in getattr(device, "keywords", ()))
    return fixed and isinstance(sources, ast.List) and all(isinstance(item, ast.Name) for item in sources.elts)


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
    """Whether a call makes a tensor of fixed size on the CPU."""
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
