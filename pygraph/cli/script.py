"""Running a user's script as ``python SCRIPT ARGS`` would, and calling the model that it leaves behind.

What is told of it afterwards is ``explain``'s business.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from pygraph.cli.failures import Failure

__all__ = ["ScriptCommand", "call_model", "running", "told"]

_POLL_SECONDS = 0.5


class ScriptCommand(click.Command):
    """A command that takes a script and its arguments: options that it does not know are refused before '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does. Raises UsageError that says how the script gets an option."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"{error.format_message()} Options of the script go after '--'."
            raise click.UsageError(hint, error.ctx) from error


@contextmanager
def running(path: str, args: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the script as ``__main__`` and yield its globals; it stays ``__main__`` as long as the context lasts.

    Raises Failure when the script does not compile, raises, or exits with another status than 0.
    """
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    saved = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.path[:0], sys.modules["__main__"] = [path, *args], [str(Path(path).resolve().parent)], module
    try:
        with _explained(path):
            exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
        yield module.__dict__
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved


def call_model(path: str, found: Mapping[str, Any]) -> None:
    """Have PyGraph explain the script's ``model`` on its ``inputs``. Raises Failure when there are none or they fail.

    A tuple or list of inputs is the positional arguments, a mapping the keyword arguments, anything else the only one.
    """
    if "model" not in found or "inputs" not in found:
        raise Failure(
            f"{path}: PyGraph compiled nothing. Compile with torch.compile(…, backend='pygraph'), "
            "or leave a 'model' and its 'inputs' at the top level of the script"
        )
    import pygraph

    inputs = found["inputs"]
    with _explained(path):
        if isinstance(inputs, Mapping):
            pygraph.explain(found["model"], **inputs)
        else:
            pygraph.explain(found["model"], *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Show what the user's code raises as Python would, without the frames of this file."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise Failure(f"{path}: the script exited with status {error.code}") from error
    except SyntaxError as error:
        raise Failure("".join(traceback.format_exception_only(error)).rstrip()) from error
    except Exception as error:  # the script is anybody's code: its traceback is what the user needs to see
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        raise Failure("".join(traceback.format_exception(type(error), error, frames)).rstrip()) from error


@contextmanager
def told(step: Callable[[str], None], compiled: Callable[[], Sequence[str]]) -> Iterator[None]:
    """While the context lasts, tell ``step`` of each graph that joins ``compiled``."""
    done = threading.Event()

    def watch() -> None:
        seen = len(compiled())
        while not done.wait(_POLL_SECONDS):
            names = compiled()
            for name in names[seen:]:
                step(f"compiling {name}")
            seen = max(seen, len(names))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
