"""Mutates texts of graphs and launch programs: each text is one that prints and parses back, or a ParseError.

    python tools/fuzz.py --seconds 600 --seed 7

A text that is neither, or that takes longer than a second for each 1,000 characters, is written to ``--out``, and ends
the run with status 1.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from pygraph.errors import ParseError
from pygraph.ir import parse_graph
from pygraph.program import text as program_text
from pygraph.program.text import parse_program, print_program

ROOT = Path(__file__).resolve().parent.parent
PIECES = [*'(){}[]"\\', *"\n!-=,:%\0\ud800é", "%x", "^n7", "@cpu", "#t", "//", "**", "/0", "9" * 40, "e9", "s0", "oo"]
PIECES += ["$(", "f32[", "after(", "None", "floor(", "Mod(", "1e308", "u0"]
_CUT = 40
"""Maximum number of characters that one mutation replaces."""


def graph(text: str) -> None:
    """Parse a graph. Raises ParseError."""
    parsed = parse_graph(text)
    assert parse_graph(str(parsed)) == parsed


def program(text: str) -> None:
    """Parse a launch program. Raises ParseError."""
    printed = print_program(parse_program(text))
    assert print_program(parse_program(printed)) == printed


def seeds() -> list[tuple[Callable[[str], None], str]]:
    """Initial texts, each with its parser."""
    files = (path for folder in ("ir", "filecheck") for path in sorted((ROOT / "tests" / folder).glob("*.pgir")))
    found = [(graph, part) for path in files for part in path.read_text(encoding="utf-8").split("// -----\n")]
    example = (program_text.__doc__ or "").split("\n\n")[1]
    return [*found, (program, "\n".join(line[4:] for line in example.split("\n")))]


def mutated(text: str, others: list[str], draw: random.Random) -> str:
    """``text`` with one to four parts cut, and replaced by pieces, by itself, or by parts of other texts."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(text))
        end = draw.randint(start, min(len(text), start + _CUT))
        other = draw.choice(others)
        place = draw.randint(0, len(other))
        piece = draw.choice(
            [draw.choice(PIECES), "", text[start:end] * 2, other[place : place + draw.randint(0, _CUT)]]
        )
        text = text[:start] + piece + text[end:]
    return text


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", default=60.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("fuzz-failure.pgir"), show_default=True)
def main(seconds: float, seed: int, out: Path) -> None:
    draw, known, count, accepted = random.Random(seed), seeds(), 0, 0
    others = [text for _, text in known]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        reads, text = draw.choice(known)
        text, start = mutated(text, others, draw), time.process_time()
        count += 1
        try:
            reads(text)
            accepted += 1
        except ParseError:
            pass
        except Exception:  # noqa: BLE001 - any other exception is a finding
            fail(out, text, traceback.format_exc())
        if time.process_time() - start > 1 + len(text) / 1000:
            fail(out, text, f"it took {time.process_time() - start:.1f} s")
    click.echo(f"{count} texts, of which {accepted} were read; seed {seed}")


def fail(out: Path, text: str, why: str) -> None:
    """Write ``text`` to ``out``, and end."""
    out.write_text(text, encoding="utf-8", errors="surrogatepass")
    raise click.ClickException(f"{why}\nThe text is in {out}")


if __name__ == "__main__":
    main()
