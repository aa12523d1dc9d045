"""Reports: what was captured, what was not and why. ``model`` is the data; the other modules render it."""
