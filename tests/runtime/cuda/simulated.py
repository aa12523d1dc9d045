"""The module ``simulated``: how it is built."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pygraph.runtime.cuda import build
from pygraph.runtime.native_build import NativeLibrary, Target

_HERE, _DRIVER = Path(__file__).resolve().parent, Path(build.__file__).parent


class Simulated(NativeLibrary):
    """The module ``simulated``, which is kept as the drivers' libraries are: it takes as long to build."""

    def _flags(self, target: Target) -> list[str]:
        sources = [*sorted(_DRIVER.glob("*.h")), _DRIVER / "native.cpp"]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        flags = ["-O0", "-fvisibility=default", "-Wno-attributes", "-Wl,-soname,libcuda.so.1,-Bsymbolic,-z,lazy"]
        return [*super()._flags(target), *flags, f"-DSOURCES={digest}"]  # flags are part of what a library is kept by


def simulated() -> NativeLibrary:
    """The native half of the CUDA driver over simulated CUDA libraries."""
    libraries = ("c10", "torch_cpu", "torch_python")
    return Simulated("simulated", _HERE / "simulated.cpp", libraries, lambda: (*build._headers(), _DRIVER, _HERE))
