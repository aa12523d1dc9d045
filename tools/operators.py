"""Writes ``pygraph/ir/operators.txt``: torch's operators by signature, for verification of graphs without torch.

    make operators

Operators that write results into an argument (``out``) are left out: AOTAutograd leaves none in a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed._functional_collectives

from pygraph import compat
from pygraph.frontend.names import HOP, SYM, _sym_by_name, resolve_op, signature, words
from pygraph.ir.operators import ANY, Signature

TABLE = Path(__file__).parents[1] / "pygraph" / "ir" / "operators.txt"
NAMESPACES = words(
    "aten prims rngprims inductor inductor_prims _c10d_functional _c10d_functional_autograd quantized_decomposed"
    " symm_mem streams fsdp"
)


def main() -> None:
    """Write the table."""
    lines: dict[str, list[str]] = {}
    for name, found in sorted(operators()):
        lines.setdefault(str(found), []).append(name)
    rows = [f"{text}: {' '.join(names)}" for text, names in sorted(lines.items())]
    TABLE.write_text("\n".join([f"# torch {torch.__version__.partition('+')[0]}", *rows, ""]), encoding="utf-8")


def operators() -> Iterator[tuple[str, Signature]]:
    """Every operator by its name in the IR, with its signature."""
    yield from ((HOP + name, ANY) for name in compat.higher_order_operators)
    yield from ((SYM + name, ANY) for name in _sym_by_name())
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if namespace not in NAMESPACES:
            continue
        op = resolve_op(f"{namespace}.{name}.{overload or 'default'}")
        if not any(argument.is_out for argument in op._schema.arguments):
            yield str(op), replace(signature(op._schema), kind=kind_of(op))


# -- elementwise operators ---------------------------------------------------------------------------------------------


def kind_of(op: Any) -> str:
    """The kind of an elementwise operator, by its behaviour on small tensors, and by its fake kernel; empty if it does
    not broadcast."""
    if torch.Tag.pointwise not in op.tags:
        return ""
    kinds = set()
    dtypes, sizes = (torch.float64, torch.float32), (((4, 3), (4, 3)), ((3,), (4, 3)))
    for dtype, shapes, device in itertools.product(dtypes, sizes, ("cpu", "meta")):
        positional = [argument for argument in op._schema.arguments if not argument.kwarg_only]
        given = [_sample(argument, dtype, shapes, device) for argument in positional]
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        try:
            result = op(*given)
        except Exception:  # noqa: BLE001 - an operator may refuse the sample arguments
            continue
        if not isinstance(result, torch.Tensor) or result.shape != torch.broadcast_shapes(*(t.shape for t in tensors)):
            return ""
        kinds.add("same" if result.dtype == dtype else "bool" if result.dtype == torch.bool else "shape")
    return kinds.pop() if len(kinds) == 1 else "shape" if kinds else ""


def _sample(argument: Any, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], device: str) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return torch.ones(shapes[0 if argument.name in ("self", "input") else 1], dtype=dtype, device=device)
    return {"number": 1, "int": 1, "float": 1.0, "bool": True}.get(kind, argument.default_value)


if __name__ == "__main__":
    main()
