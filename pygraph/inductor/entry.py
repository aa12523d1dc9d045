"""Enters a program that is a single region by the region's replay, past most of what Inductor has around it.

    emitted:  align inputs ─ take args ─ check ─ device guard ─ prepare on the host ─ pick ─ region ─ fetch ─ return
    entry:    take args ─ prepare on the host ─ pick ─ replay ─┬─ fetch ─ return
                                                      declined └─ the program as emitted, with the same args

A replay checks its arguments and their alignment, and finds device and stream by itself. Which programs qualify is read
off their text. What comes before the region is done again where the replay declines, so it may change no argument. It
is not done where no replay is to be expected.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pygraph.runtime.region import Region

_GUARD = "with torch.cuda._DeviceGuard("
_TAKE = re.compile(r"(?P<names>.*) = args")
_PICK = re.compile(r"(?P<list>\w+) = \[(?P<names>[\w, ]*)\]")
_REGION = re.compile(r"(?P<results>.*) = self\.partitions\[0\]\((?P<list>\w+)\)")
_CHECK = re.compile(r"(assert_size_stride|assert_alignment|torch\.cuda\.set_device|\w+ = get_raw_stream)\(.*")
_UPLOAD = re.compile(r"\w+ = torch\.ops\.pygraph\.upload\.default\(.*")
_KERNEL = re.compile(r"(?P<name>cpp_fused\w*)\((?P<operands>[\w, ]*)\)")
_BUFFER = re.compile(r"(?P<name>\w+) = empty_strided_cpu\(.*")
_ALIAS = re.compile(r"(?P<name>\w+) = (?P<of>\w+)")
_PLAIN = re.compile(r"args\.clear\(\)|\w+ = \w+\[\d+\]")
_COPY = re.compile(r"\w+\.copy_\(.*")


def entry_text(source: str) -> str | None:
    """The text of a function to enter a program by; None if its text, ``source``, does more than call one region."""
    tree = ast.parse(source)
    mains = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "call"]
    statements = list(_flat(mains[0].body)) if len(mains) == 1 else []
    texts = [ast.unparse(statement) for statement in statements]
    regions = [(i, found) for i, found in enumerate(map(_REGION.fullmatch, texts)) if found]
    if len(regions) != 1 or not all(map(_is_after, statements[regions[0][0] + 1 :])):
        return None
    ((position, region),) = regions
    before, after = texts[:position], texts[position + 1 :]
    taken = next((_names(found["names"]) for found in map(_TAKE.fullmatch, before) if found), [])
    picked = {found["list"]: _names(found["names"]) for found in map(_PICK.fullmatch, before) if found}
    # A replay checks what it is given. What is read on the host is not given to it.
    read = {name for text in before if _UPLOAD.match(text) or _KERNEL.match(text) for name in _names(text)}
    checked = read.intersection(taken)
    kept = [text for text in before if not _CHECK.fullmatch(text) or checked.intersection(_names(text))]
    given = region["list"]
    if given not in picked or not taken or not _change_no_argument(kept, _written_operands(tree)):
        return None
    held = {name for names in picked.values() for name in names}
    lines: list[str] = []
    late: list[str] = []  # deletions that wait for the replay: of what the region's arguments do not hold
    if any(_UPLOAD.match(text) or _BUFFER.match(text) for text in kept):
        lines += ["if not _ready():", "    return _program(args)"]
    for text in kept:
        deleted = _names(text.removeprefix("del ")) if text.startswith("del ") else []
        lines += [f"del {name}" for name in deleted if name in held] if deleted else [text]
        late += [f"del {name}" for name in deleted if name not in held]
    lines += [
        f"_outputs = _replay({given})",
        "if _outputs is None:",
        f"    [{', '.join(picked[given])}] = {given}",
        f"    args[:] = [{', '.join(taken)}]",
        f"    del {', '.join(dict.fromkeys([*taken, *picked[given], given]))}",
        "    return _program(args)",
        *late,
        f"{region['results']} = _outputs",
        *(text for text in after if not _CHECK.match(text)),
    ]
    return "def call(args):\n" + "\n".join(f"    {line}" for line in lines)


def bind(text: str, namespace: Mapping[str, Any], region: Region, program: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an entry's ``text`` to ``program``. ``namespace`` is that of the emitted module."""
    names = {**namespace, "_replay": region.try_replay, "_ready": region.expects_replay, "_program": program}
    exec(compile(text, "<pygraph entry>", "exec"), names)
    made: Callable[..., Any] = names["call"]
    return made


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with those under a device guard in its place."""
    for statement in body:
        if isinstance(statement, ast.With) and ast.unparse(statement).startswith(_GUARD):
            yield from _flat(statement.body)
        else:
            yield statement


def _names(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _change_no_argument(texts: Sequence[str], kernels: Mapping[str, Sequence[bool]]) -> bool:
    """Whether statements are known to write nothing but what the program has allocated before in them."""
    buffers: set[str] = set()
    for text in texts:
        alias, buffer, kernel = _ALIAS.fullmatch(text), _BUFFER.fullmatch(text), _KERNEL.fullmatch(text)
        if buffer is not None:
            buffers.add(buffer["name"])
        elif alias is not None:
            buffers.update([alias["name"]] if alias["of"] in buffers else ())
        elif kernel is not None:
            operands, written = _names(kernel["operands"]), kernels.get(kernel["name"], ())
            changed = {name for name, one in zip(operands, written, strict=False) if one}
            if len(written) != len(operands) or not changed <= buffers:
                return False
        elif not text.startswith("del ") and not any(
            one.fullmatch(text) for one in (_TAKE, _PICK, _CHECK, _UPLOAD, _PLAIN)
        ):
            return False
    return True


def _is_after(statement: ast.stmt) -> bool:
    """Whether a statement may follow the region: results are fetched to the host, viewed and returned."""
    text = ast.unparse(statement)
    if isinstance(statement, ast.Return):
        items = statement.value.elts if isinstance(statement.value, ast.Tuple) else [ast.Slice()]
        return all(
            isinstance(item, (ast.Name, ast.Constant))
            or (isinstance(item, ast.Call) and ast.unparse(item.func) == "reinterpret_tensor")
            for item in items
        )
    known = (_ALIAS, _BUFFER, _COPY, _CHECK)
    return text.startswith("del ") or any(pattern.fullmatch(text) for pattern in known)


def _written_operands(tree: ast.Module) -> Mapping[str, Sequence[bool]]:
    """For each C++ kernel that a module binds, which of its operands it may write: pointers that are not to const."""
    binding = re.compile(r"(?P<name>\w+) = async_compile\.cpp_pybinding\(\[(?P<types>[^\]]*)\].*", re.DOTALL)
    found = [binding.fullmatch(ast.unparse(node)) for node in tree.body if isinstance(node, ast.Assign)]
    return {
        one["name"]: [
            each.endswith("*") and not each.startswith("const ") for each in re.findall("'(.*?)'", one["types"])
        ]
        for one in found
        if one is not None
    }
