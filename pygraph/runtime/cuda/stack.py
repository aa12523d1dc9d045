"""Clears the stack below the caller, so that parameters left uninitialised hold zeros instead of earlier addresses.

Kernels of torch take structs by value of which parts are never set; what lies there is whatever the stack held
before: addresses of other tensors, different from one capture to the next.
"""

from __future__ import annotations

import ctypes

__all__ = ["wipe_stack"]

_DEPTH = 1 << 16
"""Bytes that are cleared (64 KiB): launching an operator takes less."""


class _Zeros(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _DEPTH),)


_callee = ctypes.PyDLL(None).getpid
_callee.argtypes = [_Zeros]
_zeros = _Zeros()


def wipe_stack() -> None:
    """Overwrite the stack that the next call is going to use.

    A struct passed by value is copied onto the stack, below the frame of the caller. The callee takes no notice of
    arguments.
    """
    _callee(_zeros)
