"""Installs wheels beside each release of torch that they have native halves for, where there is no compiler, and
replays a region on the host driver.

    python tools/check_wheels.py --python python3.11 dist

Each pair has an environment of its own, which is removed when it has been checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and sys.path[0] != str(ROOT):
    sys.path.insert(0, str(ROOT))

from tools.wheels import python_of, run  # noqa: E402

PROGRAM = """
import shutil, sys
from pathlib import Path
import torch
import pygraph
from pygraph.runtime.host import build
from pygraph.runtime.native_build import PREBUILT

assert shutil.which("c++") is None
assert Path(pygraph.__file__).is_relative_to(sys.prefix), pygraph.__file__

@torch.compile(backend="pygraph", options={"ledger": False})
def function(x, weight):
    return x @ weight @ weight  # products alone: Inductor compiles no kernel either

weight = torch.randn(8, 8)
for _ in range(4):
    x = torch.randn(8, 8)
    assert torch.equal(function(x, weight), x @ weight @ weight)
assert pygraph.counters() == {"captures": 1, "replays": 2, "uncaptured": 2}, pygraph.reports()
assert Path(build.load().__file__).parent == PREBUILT
print(torch.__version__)
"""


def replayed(python: Path) -> str:
    """The version of torch with which the wheel's host half replayed, in an environment's ``python``. Raises
    ClickException if it did not replay, or if anything was compiled."""
    with tempfile.TemporaryDirectory() as home:
        kept = {"HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor", "PYGRAPH_CACHE_DIR": f"{home}/pygraph"}
        done = subprocess.run(
            [str(python), "-c", PROGRAM],
            env={**kept, "PATH": home},
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"{python}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        if Path(home, "pygraph", "native").exists():
            raise click.ClickException(f"{python} built a native library:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--python", "pythons", multiple=True, required=True, help="A Python, as python3.11.")
@click.argument("dist", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(pythons: Sequence[str], dist: Path) -> None:
    for command in pythons:
        (wheel,) = dist.glob(f"*-{python_of(command).tag}-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            releases = re.findall(r"prebuilt/host-torch([\d.]+)-", "\n".join(opened.namelist()))
        for release in releases:
            with tempfile.TemporaryDirectory() as folder:  # several GB
                run(command, "-m", "venv", folder)
                python = Path(folder, "bin", "python")
                run(python, "-I", "-m", "pip", "install", f"torch=={release}", wheel)
                click.echo(f"{wheel.name}: replays with torch {replayed(python)}")


if __name__ == "__main__":
    main()
