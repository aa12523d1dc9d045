"""``pygraph passes``: what passes there are, with their options and stages, and which do not load and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from pygraph.passes import PassInfo, default_registry

__all__ = ["passes"]


@click.command()
def passes() -> None:
    """List the passes that pipelines can name: stages, options with types and defaults, and where they come from."""
    click.echo("\n\n".join("\n    ".join(_lines(info)) for info in default_registry.describe()))


def _lines(info: PassInfo) -> Iterator[str]:
    if info.error is not None:
        yield f"{info.name}  (cannot be used)"
        yield from textwrap.wrap(info.error, 96)
        return
    requires = info.requires.value if info.requires else ""
    yield f"{info.name}  ({requires} → {info.ensures.value if info.ensures else 'as before'})"
    yield from textwrap.wrap(info.summary, 96)
    for name, type_text, default in info.options:
        yield f"{name}: {type_text}" + (", required" if default is None else f" = {default}")
    yield f"from {info.origin}"
