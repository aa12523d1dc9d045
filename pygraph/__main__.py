"""``python -m pygraph`` is the command ``pygraph``. What it does lives in ``pygraph.cli``."""

from pygraph.cli import main

if __name__ == "__main__":
    main(prog_name="pygraph")
