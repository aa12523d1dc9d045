"""Runs PTX of the few instructions that the package's own kernels use, thread by thread, on bytes that are watched.

Every access has to be aligned to its size. The text is not checked any further than that it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Memory", "run"]

SIZES = {"u8": 1, "u32": 4, "u64": 8, "b64": 8}
_TEXT = re.compile(r"(?://[^\n]*)")
_STATEMENT = re.compile(r"^(?:@(?P<guard>%\w+)\s+)?(?P<name>[\w.]+)(?:\s+(?P<operands>.*))?$", re.DOTALL)

Code = list[tuple[str | None, str, list[str]]]


class Memory:
    """Bytes by address. ``written`` counts how often each was."""

    def __init__(self, **pieces: tuple[int, bytes]) -> None:
        self.bytes = {start + i: value for start, data in pieces.values() for i, value in enumerate(data)}
        self.written: dict[int, int] = {}

    def load(self, address: int, nbytes: int) -> int:
        """Raises KeyError for bytes that are not there."""
        return int.from_bytes(bytes(self.bytes[address + i] for i in range(nbytes)), "little")

    def store(self, address: int, nbytes: int, value: int) -> None:
        """As ``load``."""
        for i, byte in enumerate(value.to_bytes(nbytes, "little")):
            if address + i not in self.bytes:
                raise KeyError(address + i)
            self.bytes[address + i] = byte
            self.written[address + i] = self.written.get(address + i, 0) + 1


def run(text: str, memory: Memory, blocks: int, threads: int, **params: int) -> None:
    """Run the kernel of ``text`` in a grid of one dimension, one thread after the other."""
    code, labels = _parsed(text)
    for block in range(blocks):
        for thread in range(threads):
            special = {"%ctaid.x": block, "%tid.x": thread, "%ntid.x": threads, "%nctaid.x": blocks}
            _Thread(code, labels, memory, special, params).run()


def _parsed(text: str) -> tuple[Code, dict[str, int]]:
    """The statements of the only kernel, and which of them each label stands before."""
    body = _TEXT.sub("", text).split("\n{", 1)[1].rsplit("}", 1)[0]
    code: Code = []
    labels: dict[str, int] = {}
    for part in body.split(";"):
        *names, statement = re.split(r"\b(\w+):", part)
        for label in names[1::2]:
            labels[label] = len(code)
        found = _STATEMENT.match(statement.strip())
        if found is None or found["name"].startswith("."):
            continue
        operands = re.findall(r"\{[^}]*\}|[^,\s][^,]*", found["operands"] or "")
        code.append((found["guard"], found["name"], [operand.strip() for operand in operands]))
    return code, labels


class _Thread:
    def __init__(
        self,
        code: Code,
        labels: Mapping[str, int],
        memory: Memory,
        special: Mapping[str, int],
        params: Mapping[str, int],
    ) -> None:
        self._code, self._labels, self._memory, self._params = code, labels, memory, params
        self._registers = dict(special)

    def run(self) -> None:
        at = 0
        while True:
            guard, name, operands = self._code[at]
            at += 1
            if guard is not None and not self._registers[guard]:
                continue
            if name == "ret":
                return
            if name == "bra":
                at = self._labels[operands[0]]
            else:
                self._one(name, operands)

    def _one(self, name: str, operands: Sequence[str]) -> None:
        kind, *rest = name.split(".")
        if kind in ("ld", "st"):
            self._access(kind, rest, operands)
            return
        values = [self._value(operand) for operand in operands[1:]]
        if kind == "setp":
            self._registers[operands[0]] = int({"ge": int.__ge__, "eq": int.__eq__}[rest[0]](*values))
            return
        simple: dict[str, Callable[..., int]] = {
            "mov": lambda a: a,
            "cvt": lambda a: a,
            "cvta": lambda a: a,
            "add": lambda a, b: a + b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "shl": lambda a, b: a << b,
            "mul": lambda a, b: a * b,
        }
        width = 4 if rest[-1] == "u32" and "wide" not in rest and kind != "cvt" else 8
        self._registers[operands[0]] = simple[kind](*values) % (1 << 8 * width)

    def _value(self, operand: str) -> int:
        return self._registers[operand] if operand.startswith("%") else int(operand) % (1 << 64)

    def _access(self, kind: str, rest: Sequence[str], operands: Sequence[str]) -> None:
        if rest[0] == "param":
            self._registers[operands[0]] = self._params[operands[1].strip("[]")]
            return
        registers, place = operands if kind == "ld" else reversed(operands)
        names = [each.strip() for each in registers.strip("{}").split(",")]
        size, address = SIZES[rest[-1]], self._value(place.strip("[]"))
        assert rest[1:-1] == ([f"v{len(names)}"] if len(names) > 1 else [])
        assert address % (size * len(names)) == 0, f"{kind} of {size * len(names)} bytes at {address:#x}"
        for i, register in enumerate(names):
            if kind == "ld":
                self._registers[register] = self._memory.load(address + i * size, size)
            else:
                self._memory.store(address + i * size, size, self._registers[register] % (1 << 8 * size))
