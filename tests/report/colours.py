"""How far apart two colours look, to common and to other colour vision."""

from __future__ import annotations

import math

import numpy as np

# What dichromats see of linear RGB. Source: Machado, Oliveira and Fernandes 2009, severity 1.0.
VISIONS = {
    "common": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])

Lab = tuple[float, float, float]


def difference(one: str, other: str, vision: str) -> float:
    """CIEDE2000 between two colours like #1a2b3c; about 1 is just seen side by side, above 10 is seen at a glance."""
    return ciede2000(_lab(one, vision), _lab(other, vision))


def contrast(one: str, other: str) -> float:
    """Of luminance, from 1 to 21, as the Web Content Accessibility Guidelines count it."""
    low, high = sorted(float((_XYZ @ _linear(colour))[1]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def ciede2000(one: Lab, other: Lab) -> float:
    """Source: Sharma, Wu and Dalal 2005, with its names."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 1.5 - 0.5 * math.sqrt(mean**7 / (mean**7 + 25**7))
    c1, c2 = math.hypot(g * a1, b1), math.hypot(g * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, g * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    c, light = (c1 + c2) / 2, ((l1 + l2) / 2 - 50) ** 2
    t = 1 + sum(
        weight * math.cos(math.radians(times * hue + shift))
        for weight, times, shift in ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.2, 4, -63))
    )
    rotation = -2 * math.sqrt(c**7 / (c**7 + 25**7)) * math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    dl = (l2 - l1) / (1 + 0.015 * light / math.sqrt(20 + light))
    dc = (c2 - c1) / (1 + 0.045 * c)
    dh = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * c * t)
    return math.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


def _linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _lab(colour: str, vision: str) -> Lab:
    xyz = _XYZ @ np.clip(VISIONS[vision] @ _linear(colour), 0, 1) / _WHITE
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return float(116 * y - 16), float(500 * (x - y)), float(200 * (y - z))
