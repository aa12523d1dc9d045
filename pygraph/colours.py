"""Colours of regions, equal in every view: pictures, tables, notebooks, timelines, terminals."""

from __future__ import annotations

import colorsys

HUES = 12
"""Number of hues that regions take in turn."""


def hue(region: int) -> int:
    """The hue of a region in degrees. None is near red, which marks operators that are not captured."""
    return 85 + region % HUES * 97 % 235


def colour(region: int, *, soft: bool = False) -> str:
    """The colour of a region as ``#rrggbb``; ``soft``: a background for dark text."""
    lightness, saturation = (0.86, 0.72) if soft else (0.45, 0.45)
    channels = colorsys.hls_to_rgb(hue(region) / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
