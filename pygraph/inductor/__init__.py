"""From decisions to programs: FX rewritten, Inductor steered, regions wrapped, the emitted text read back."""

from pygraph.inductor import upload  # registers the operator that placement emits

__all__ = ["upload"]
