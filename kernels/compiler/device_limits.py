"""Properties of a GPU that decide the partition of a problem. Pure Python, needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REGISTERS_PER_SM", "RESERVED", "DeviceLimits"]

REGISTERS_PER_SM = 65536
RESERVED = 1024  # bytes of shared memory per block that the driver keeps, from compute capability 8.0 on


@dataclass(frozen=True)
class DeviceLimits:
    """Limits that differ between cards."""

    sms: int
    smem_per_block_optin: int
