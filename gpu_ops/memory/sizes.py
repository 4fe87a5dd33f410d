"""Sizes of memory as text, such as ``8 GB``."""

from __future__ import annotations

import math
import re
from typing import Any

from gpu_ops.core.checks import integer
from gpu_ops.errors import OptionError

__all__ = ["MOST_SEQUENCES", "MOST_TOKENS", "read_size"]

# Limits of an estimate: the tables of its plan have 32 bytes per sequence, and on the CPU 280 per position.
MOST_SEQUENCES, MOST_TOKENS = 1 << 24, 1 << 24

_UNITS = {"B": 1} | {
    f"{letter}{middle}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for middle, base in (("", 1000), ("i", 1024))
}
_BY_NAME = {unit.upper(): nbytes for unit, nbytes in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", re.ASCII)


def read_size(op: str, name: str, value: Any) -> int:
    """Read a size in bytes: an integer, or a number and a unit. GB is 1e9 bytes, GiB 2^30.

    >>> read_size("memory", "limit", "8 GB"), read_size("memory", "limit", "1.5KiB"), read_size("memory", "limit", 7)
    (8000000000, 1536, 7)
    """
    if not isinstance(value, str):
        return integer(op, name, value, low=0)
    match = _SIZE.fullmatch(value)
    unit = _BY_NAME.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise OptionError(
            f"{op}: {name}={value!r} is no size; pass bytes as an integer, or a number and a unit such as '8 GB' or "
            f"'512 MiB'; units: {', '.join(_UNITS)}"
        )
    size = float(match[1]) * unit
    if not math.isfinite(size):
        raise OptionError(f"{op}: {name} is larger than any memory")
    return int(size)
