"""Makes guards false, one at a time, and runs their tests, which must fail (``tests/mutants.toml``).

    python tools/mutants.py pygraph/cache.py

Works on a copy of the checkout's files. Prints each guard that no test misses, and ends with status 1 if there is one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import tomllib

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Guard:
    """A line ``if …:`` of ``file``, and the ``tests`` that fail where its condition is false."""

    file: str
    line: str
    tests: tuple[str, ...]

    def mutated(self, source: str) -> str:
        """``source`` with the condition false. Raises ValueError unless the line occurs exactly once."""
        if source.count(f" {self.line}\n") != 1:
            raise ValueError(f"{self.file} has this line {source.count(self.line)} times, not once: {self.line}")
        return source.replace(f" {self.line}\n", f" if False and ({self.line[3:-1]}):\n")


def guards() -> Iterator[Guard]:
    """All guards of the list."""
    for each in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))["guards"]:
        for line in each["lines"]:
            yield Guard(each["file"], line, tuple(each["tests"]))


def survives(guard: Guard, copy: Path) -> bool:
    """True if the tests pass without the guard."""
    path = copy / guard.file
    source = path.read_text(encoding="utf-8")
    path.write_text(guard.mutated(source), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not sweep"]
        done = subprocess.run(
            [*command, *guard.tests], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    finally:
        path.write_text(source, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise click.ClickException(f"{guard.tests}: no tests ran\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1)
def main(files: Sequence[str]) -> None:
    chosen = [guard for guard in guards() if not files or guard.file in files]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in listed.split("\0"):
            if name and not name.startswith("benchmarks/results/") and (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for guard in chosen:
            alive = survives(guard, copy)
            survivors += alive
            click.echo(f"{'SURVIVES' if alive else 'missed'}  {guard.file}: {guard.line}")
    if survivors or not chosen:
        raise click.ClickException(f"{survivors} of {len(chosen)} guards are missed by no test")


if __name__ == "__main__":
    main()
