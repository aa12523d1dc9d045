"""One of several processes: ``python -m tests.distributed RANK SIZE STORE NAMES DEVICE`` runs the checks NAMES, and
prints the error of each. DEVICE is cpu or cuda."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

from tests.distributed.processes import Rank

SECONDS = 180.0
"""The longest that a check takes, which compiles from empty caches, beside other work."""


def main(number: int, size: int, store: str, names: str, device: str = "cpu") -> None:
    import torch

    from tests.distributed import hazards, programs, steps, votes
    from tests.distributed.checks import CHECKS, forget

    assert all((hazards, programs, steps, votes))  # they add checks
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(number)
    rank = Rank(number, size, store, device)
    kept = Path(os.environ["PYGRAPH_CACHE_DIR"])
    for name in names.split(","):
        own = kept / f"{name}-{number}"  # what one check has proven is none of the next one's
        own.mkdir(exist_ok=True)
        (own / "native").symlink_to(kept / "native")
        os.environ["PYGRAPH_CACHE_DIR"] = str(own)
        rank.begin(name, SECONDS)
        error = None
        try:
            CHECKS[name](rank)
        except Exception:  # noqa: BLE001 - whatever it is, the parent tells
            error = traceback.format_exc()
        rank.say(name=name, error=error)
        forget()
    rank.end()


main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
