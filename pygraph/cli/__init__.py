"""The command line: ``pygraph bench``, ``calibrate``, ``explain``, ``opt``, ``passes``. One module per command.

Nothing here imports torch before a command needs it: ``opt`` and ``passes`` work on text and start fast.
"""

from __future__ import annotations

import click

from pygraph import __version__
from pygraph.cli.bench import bench
from pygraph.cli.calibrate import calibrate
from pygraph.cli.explain import explain
from pygraph.cli.failures import Failure, failing
from pygraph.cli.opt import opt
from pygraph.cli.passes import passes
from pygraph.logs import configure

__all__ = ["Failure", "main"]

_CODES = """
\b
Exit status:
  0  done
  1  a file, a graph, a pipeline or the script is at fault; stderr says where
  2  the command line is wrong
  3  'explain --strict': something could not be captured
"""


@click.group(epilog=_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pygraph", message="%(prog)s %(version)s")
def main() -> None:
    """Look at what PyGraph captures of a program, and run its passes on graphs in files."""
    with failing():
        configure()


main.add_command(bench)
main.add_command(calibrate)
main.add_command(explain)
main.add_command(opt)
main.add_command(passes)
