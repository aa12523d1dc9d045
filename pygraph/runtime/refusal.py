"""Why a region, or one of its variants, is not replayed: data with a reason code, never an exception.

The codes are those of CaptureError (raised by a driver) and those that slot discovery, layout and comparison add.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.provenance import Failure
from pygraph.runtime.recording import Launch

__all__ = ["Refusal", "is_out_of_memory"]

_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""What errors say that torch has no class of its own for: of the CUDA runtime, of the CPU's allocator, of libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory was short, which may pass."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A ``reason`` code, what was met (``detail``), and where: the launch's name and the user's line, if known.

    ``nodes`` are the operators of the compiled graph that it may have come from, by name.
    """

    reason: str
    detail: str = ""
    launch: str | None = None
    loc: str | None = None
    nodes: tuple[str, ...] = ()

    @classmethod
    def at(cls, launch: Launch, reason: str, detail: str) -> Refusal:
        """A refusal caused by ``launch``."""
        return cls(reason, detail, launch.name, launch.loc, launch.nodes)

    @classmethod
    def of(cls, error: BaseException, failure: Failure | None = None) -> Refusal:
        """What a failed capture said, and the call that it failed in; only text is kept, so that no traceback keeps a
        tensor alive. No call is to blame for memory that is short (``out-of-memory``)."""
        reason, detail = "capture-raised", f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return cls("out-of-memory", detail.split("\n")[0])
        if isinstance(error, CaptureError):
            reason, detail = error.reason, error.detail
        if failure is None:
            return cls(reason, detail)
        return cls(reason, detail, failure.name, failure.origin.loc, failure.origin.nodes)

    def __str__(self) -> str:
        where = f" [{self.launch}{f' at {self.loc}' if self.loc else ''}]" if self.launch else ""
        return f"{self.reason}: {self.detail}{where}" if self.detail else f"{self.reason}{where}"
