"""Calibrations on disk: one file for each device, driver, torch and PyGraph, and what compilations read of it.

Writing whole files and reading damaged ones is ``pygraph.cache``'s; nothing here measures.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from dataclasses import astuple
from pathlib import Path

import torch

from pygraph import cache
from pygraph.calibration.records import Calibration, Identity
from pygraph.errors import CaptureError
from pygraph.ir import DeviceModel
from pygraph.runtime.cuda import bindings
from pygraph.runtime.identity import cpu_model, kernel_driver
from pygraph.version import __version__

__all__ = ["identity_of", "load", "path_of", "save", "stored_model"]

_FOLDER = "calibration"
_log = logging.getLogger("pygraph")


def identity_of(kind: str, index: int | None = None) -> Identity:
    """What figures measured now, on CUDA device ``index`` (None: the current one) or on the CPU, hold for.

    A CPU's figures hold for one number of threads. Raises CaptureError where the driver's functions are missing.
    """
    if kind == "cuda":
        device = torch.cuda.get_device_name(index)
        driver = kernel_driver() or str(bindings.call(bindings.load().cuDriverGetVersion))
    else:
        device, driver = f"{cpu_model()}, threads: {torch.get_num_threads()}", "host"
    return Identity(kind, device, driver, torch.__version__, __version__)


def path_of(identity: Identity, folder: Path) -> Path:
    """The file of ``identity`` in the cache folder ``folder``: its name is readable, and unique by a hash."""
    digest = hashlib.sha256(json.dumps(astuple(identity)).encode()).hexdigest()[:16]
    readable = "".join(char if char.isalnum() else "-" for char in identity.device.lower())
    return folder / _FOLDER / f"{readable[:40].strip('-')}-{digest}.json"


def save(calibration: Calibration) -> Path | None:
    """Write ``calibration`` where compilations look for it; None, after a warning, where nothing can be written."""
    folder = cache.cache_dir()
    if folder is None:
        _log.warning("the calibration is not kept: there is no folder for it; set %s", cache.VARIABLE)
        return None
    path = path_of(calibration.identity, folder)
    try:
        cache.write_atomically(path, json.dumps(calibration.as_json(), indent=1))
    except OSError as error:
        _log.warning("the calibration is not kept: %s", error)
        return None
    stored_model.cache_clear()
    return path


def load(identity: Identity) -> Calibration | None:
    """The calibration that was saved for ``identity``; None without one.

    A damaged file, or one with a model that is not to be used, is named in one warning.
    """
    folder = cache.cache_dir()
    if folder is None:
        return None
    path = path_of(identity, folder)
    data = cache.read_json(path)
    if data is None:
        return None
    try:
        found = Calibration.from_json(data)
    except ValueError as error:
        cache.warn_once(path, str(error))
        return None
    if unfit := found.unfit():
        cache.warn_once(path, unfit)
        return None
    return found if found.identity == identity else None


@functools.cache
def stored_model(kind: str, index: int | None = None) -> DeviceModel | None:
    """The calibrated model of a device, read once per process; None without one."""
    try:
        found = load(identity_of(kind, index))
    except (CaptureError, RuntimeError, AssertionError) as error:  # torch without CUDA raises either of the last two
        _log.debug("no calibrated model of %s: %s", kind, error)
        return None
    return None if found is None else found.model
