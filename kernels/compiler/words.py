"""Counts in words, for messages."""

from __future__ import annotations

__all__ = ["several"]


def several(count: int, what: str) -> str:
    """``1 block``, ``1,024 blocks``"""
    return f"{count:,} {what}" + "s" * (count != 1)
