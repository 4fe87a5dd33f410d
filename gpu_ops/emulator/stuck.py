"""The report when no thread can go on: who stands where, waiting for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpu_ops.emulator.errors import SanitizerError

if TYPE_CHECKING:
    from gpu_ops.emulator.machine import Machine

__all__ = ["stuck"]


def stuck(m: Machine, kind: str) -> SanitizerError:
    """``kind``: deadlock or livelock; a deadlock of lanes parked at a barrier is a divergent one."""
    waiting = [(g.pc, g.mask, "a warp instruction whose other lanes never come") for g in m.parked]
    waiting += [(g.pc, g.mask, "polling memory that nobody changes") for g in m.groups]
    waiting += m.barriers.standing()
    lines = []
    for pc, mask, why in waiting:
        lanes = np.flatnonzero(m.full(mask))
        lines.append(
            f"{len(lanes)} threads, first {m.thread(int(lanes[0]))}: {why}\n    at {m.program.where(pc)}"
        )
    parked = [m.program.code[g.pc] for g in m.parked]
    if kind == "deadlock" and any(
        i.opcode in ("bar", "barrier") and i.modifiers[:1] != ("warp",) for i in parked
    ):
        kind = "barrier divergence"
    left = int(m.alive.sum())
    text = f"none of the {left} threads that kernel {m.program.name} has left can go on"
    return SanitizerError(kind, "\n  ".join([text, *lines]))
