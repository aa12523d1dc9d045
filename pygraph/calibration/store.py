"""Device models on disk: one file for each device, driver, torch and PyGraph, and the look-up for compilations."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from pygraph import cache
from pygraph.errors import CaptureError
from pygraph.ir import DeviceModel
from pygraph.runtime.cuda import bindings
from pygraph.runtime.identity import cpu_model, kernel_driver
from pygraph.version import __version__

FORMAT = 5
"""Version in file names, increased when figures are measured in another way, or change their meaning."""
_log = logging.getLogger("pygraph")


class Identity(NamedTuple):
    """The machine for which figures hold. ``kind`` is cpu or cuda, ``driver`` its driver's version (CPU: ``host``)."""

    kind: str
    device: str
    driver: str
    torch: str
    pygraph: str


def identity_of(kind: str, index: int | None = None) -> Identity:
    """The identity of figures measured now, on CUDA device ``index`` (None: the current one) or on the CPU.

    A CPU's figures hold for one number of threads. Raises CaptureError if functions of the driver are missing.
    """
    if kind == "cuda":
        device = torch.cuda.get_device_name(index)
        driver = kernel_driver() or str(bindings.call(bindings.load().cuDriverGetVersion))
    else:
        device, driver = f"{cpu_model()}, threads: {torch.get_num_threads()}", "host"
    return Identity(kind, device, driver, torch.__version__, __version__)


def path_of(identity: Identity) -> Path | None:
    """The file of ``identity``: its name is readable, and unique by a hash. None if there is no cache folder."""
    folder = cache.cache_dir()
    digest = hashlib.sha256(json.dumps([FORMAT, *identity]).encode()).hexdigest()[:16]
    readable = "".join(char if char.isalnum() else "-" for char in identity.device.lower())
    return None if folder is None else folder / "calibration" / f"{readable[:40].strip('-')}-{digest}.json"


def save(identity: Identity, model: DeviceModel) -> Path | None:
    """Write ``model`` for compilations. Returns the path, or None, after a warning, if it cannot be written."""
    path = path_of(identity)
    try:
        if path is None:
            raise OSError(f"there is no folder for it; set {cache.VARIABLE}")
        cache.store_json(path, {"identity": identity._asdict(), "model": asdict(model)})
    except OSError as error:
        _log.warning("the calibration is not kept: %s", error)
        return None
    stored_model.cache_clear()
    return path


def load(identity: Identity) -> DeviceModel | None:
    """The saved model for ``identity``; None if there is none. A damaged file causes one warning with its path."""
    path = path_of(identity)
    data = None if path is None else cache.load_json(path)
    if path is None or data is None:
        return None
    try:
        return DeviceModel.from_json(data["model"])
    except (TypeError, KeyError, ValueError) as error:
        cache.warn_once(path, f"not a calibration: {error}")
        return None


@functools.cache
def stored_model(kind: str, index: int | None = None) -> DeviceModel | None:
    """The calibrated model of a device, read once per process; None if there is none."""
    try:
        return load(identity_of(kind, index))
    except (CaptureError, RuntimeError, AssertionError) as error:  # torch without CUDA raises either of the last two
        _log.debug("no calibrated model of %s: %s", kind, error)
        return None
