"""Counts in words, for messages, and warnings."""

from __future__ import annotations

import contextlib
import warnings

__all__ = ["several", "warn", "without_stderr"]


def several(count: int, what: str) -> str:
    """``1 block``, ``1,024 blocks``"""
    return f"{count:,} {what}" + "s" * (count != 1)


def warn(message: str, *, stacklevel: int) -> None:
    """Warn, without an error if stderr cannot be written."""
    with without_stderr():
        warnings.warn(message, stacklevel=stacklevel + 1)


def without_stderr() -> contextlib.suppress:
    """Go on without a stderr that is closed (ValueError), full, None or an object that lacks a method."""
    return contextlib.suppress(OSError, ValueError, AttributeError)
