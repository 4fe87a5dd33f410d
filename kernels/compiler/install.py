"""Command that installs an extra of this package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["install_command"]

_CHECKOUT = Path(__file__).resolve().parents[2]


@cache
def install_command(extra: str) -> str:
    """``pip install`` of an extra, such as ``emulator``: from the running checkout, or its packages by name.

    The package index does not have gpu-ops itself.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]' (in {_CHECKOUT})"
    from importlib import metadata  # loads 30 modules

    rows = [row.partition(";") for row in metadata.requires("gpu-ops") or ()]
    names = [name.strip() for name, _, condition in rows if f'extra == "{extra}"' in condition]
    return f"pip install {' '.join(map(repr, names))}"
