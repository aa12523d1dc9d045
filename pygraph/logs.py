"""The ``pygraph`` logger: ``PYGRAPH_LOGS`` sets its level and gives it a handler on stderr.

Everything in the package logs to it; an application that configures logging itself needs nothing of this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from pygraph.errors import OptionError

__all__ = ["VARIABLE", "configure"]

VARIABLE = "PYGRAPH_LOGS"
"""The environment variable that sets the level."""
_LEVELS = ("debug", "info", "warning", "error")
_HANDLER = "pygraph-stderr"


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Set the logger up as the environment says, if it says anything. Raises OptionError for an unknown level."""
    level = (os.environ if environ is None else environ).get(VARIABLE, "").lower()
    if not level:
        return
    if level not in _LEVELS:
        raise OptionError(f"{VARIABLE} must be one of {', '.join(_LEVELS)}, not '{level}'")
    logger = logging.getLogger("pygraph")
    logger.setLevel(level.upper())
    if all(handler.get_name() != _HANDLER for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.set_name(_HANDLER)
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
