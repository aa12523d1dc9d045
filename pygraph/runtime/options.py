"""The options of a region, checked once. Which of them users see, and under what names, is the backend's business."""

from __future__ import annotations

from dataclasses import dataclass

from pygraph.errors import OptionError

__all__ = ["RegionOptions"]


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """How a region lives.

    ``capture_after``: the occurrence of a key and variant at which it is captured (at least 2: once uncaptured).
    ``max_captures``: executables that one region holds; the least recently used goes. ``max_tracked``: variants
    whose occurrences are remembered while they are not captured. ``max_refusals``: captures that fail before a
    region without any executable is left off for good (one, where no scalar tells calls apart).
    ``comparison_budget``: bytes that copies of arguments may take while a replay is compared, by default what the
    driver can spare. ``reuse_workspace``:
    whether intermediates that are never alive together share bytes. ``alignment``: bytes that an argument's address
    stays congruent by. ``verify_always``: compare every replay with an uncaptured run. ``measure``: have real calls try
    whether a replay pays, unless every replay is compared. ``cache_dir``: the directory that what they decide is
    kept in for other processes; nothing is kept when None. Raises OptionError when a value is out of range.
    """

    capture_after: int = 2
    max_captures: int = 64
    max_tracked: int = 256
    max_refusals: int = 2
    comparison_budget: int | None = None
    reuse_workspace: bool = True
    alignment: int = 16
    verify_always: bool = False
    measure: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        least = {"capture_after": 2, "max_captures": 1, "max_tracked": 1, "max_refusals": 1}
        if self.comparison_budget is not None:
            least["comparison_budget"] = 0
        for name, minimum in least.items():
            value = getattr(self, name)
            if value < minimum:
                raise OptionError(f"{name} is {value}; it must be at least {minimum}")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise OptionError(f"alignment is {self.alignment}; it must be a power of two")
