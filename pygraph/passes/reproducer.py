"""Reproducers: one ``.pgir`` file with the graph and, in leading comments, all that is needed to run the pass again.

Writing one never fails the run. Parsing the graph itself is ``pygraph.ir.text.parse``'s business.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pygraph.ir import H200, HOST, DeviceModel, Graph
from pygraph.passes.base import PassContext

__all__ = ["Reproducer", "read_header", "write_reproducer"]

_MODELS = {model.name: model for model in (HOST, H200)}
_HEADER = re.compile(r"//\s*([a-z]+):\s*(.*)")
_log = logging.getLogger("pygraph")


@dataclass(frozen=True, slots=True)
class Reproducer:
    """The pipeline text and the context that a file's leading comments name; None where they do not."""

    pipeline: str | None
    ctx: PassContext | None


def write_reproducer(
    graph: Graph, pipeline: str, ctx: PassContext, name: str, error: str, folder: Path | None
) -> str | None:
    """Write ``graph`` with a header to ``folder``, or to the directory for temporary files, and return the path.

    Returns None, after a warning, where nothing can be written.
    """
    try:
        text = f"{_header(pipeline, ctx, error)}{graph}"
        path = _choose(folder, name)
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except Exception as problem:  # noqa: BLE001 - the graph may be too broken to print; the failure itself must be told
        _log.warning("cannot write a reproducer for %s: %s", name, problem)
        return None
    return str(path)


def read_header(text: str) -> Reproducer:
    """What the leading comment lines of a ``.pgir`` text say. Raises ValueError where a value is malformed."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        match = _HEADER.fullmatch(line.strip())
        if match:
            found[match[1]] = match[2]
    return Reproducer(found.get("pipeline"), _context(found))


def _header(pipeline: str, ctx: PassContext, error: str) -> str:
    values = ", ".join(f"{name}={value}" for name, value in sorted(ctx.values.items()))
    lines = [
        f"// pipeline: {pipeline}",
        f"// device: {ctx.device}",
        f"// model: {_model_text(ctx.model)}",
        *([f"// values: {values}"] if values else []),
        f"// error: {' '.join(error.split())}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _choose(folder: Path | None, name: str) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="pygraph-")) / f"{name}.pgir"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.pgir"


def _context(found: dict[str, str]) -> PassContext | None:
    if "device" not in found:
        return None
    pairs = (item.split("=") for item in found.get("values", "").split(",") if item.strip())
    values = {name.strip(): int(value) for name, value in pairs}
    return PassContext(found["device"], _model(found.get("model", "")), values)


def _model_text(model: DeviceModel) -> str:
    """The name of a built-in model; all figures of any other, since nobody else may have them."""
    return model.name if model in _MODELS.values() else json.dumps(model.as_json())


def _model(text: str) -> DeviceModel:
    return DeviceModel.from_json(json.loads(text)) if text.startswith("{") else _MODELS.get(text, HOST)
