"""Why a region, or one of its variants, is not replayed: data with a reason code, never an exception.

The codes are those of CaptureError (raised by a driver) and those that slot discovery, layout and comparison add.
"""

from __future__ import annotations

from dataclasses import dataclass

from pygraph.errors import CaptureError
from pygraph.runtime.recording import Launch

__all__ = ["Refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A ``reason`` code, what was met (``detail``), and where: the launch's name and the user's line, if known."""

    reason: str
    detail: str = ""
    launch: str | None = None
    loc: str | None = None

    @classmethod
    def at(cls, launch: Launch, reason: str, detail: str) -> Refusal:
        """A refusal caused by ``launch``."""
        return cls(reason, detail, launch.name, launch.loc)

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """What a failed capture said; only text is kept, so that no traceback keeps a tensor alive."""
        if isinstance(error, CaptureError):
            return cls(error.reason, error.detail)
        return cls("capture-raised", f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        where = f" [{self.launch}{f' at {self.loc}' if self.loc else ''}]" if self.launch else ""
        return f"{self.reason}: {self.detail}{where}" if self.detail else f"{self.reason}{where}"
