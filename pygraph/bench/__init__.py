"""``pygraph bench``: sides of the same program next to each other, timed in turns, with results compared first."""
