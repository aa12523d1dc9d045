"""``pygraph passes``: the available passes, with options and stages, and reasons why passes do not load."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from pygraph.errors import OptionError
from pygraph.passes.base import Pass
from pygraph.passes.pipeline import default_registry, option_texts, path_of


@click.command()
def passes() -> None:
    """List all passes for pipelines, with stages, options, types, defaults and origin."""
    click.echo("\n\n".join("\n    ".join(_lines(name)) for name in default_registry.names()))


def _lines(name: str) -> Iterator[str]:
    try:
        cls = default_registry.lookup(name)
    except OptionError as error:
        yield f"{name}  (cannot be used)"
        yield from textwrap.wrap(str(error), 96)
        return
    stages = "launch programs"
    if issubclass(cls, Pass):
        stages = f"{cls.requires.value} → {cls.ensures.value if cls.ensures else 'as before'}"
    yield f"{name}  ({stages})"
    yield from textwrap.wrap((cls.__doc__ or "").strip().partition("\n")[0], 96)
    for option, type_text, default in option_texts(cls):
        yield f"{option}: {type_text}" + (", required" if default is None else f" = {default}")
    yield f"from {path_of(cls)}"
