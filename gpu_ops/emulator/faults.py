"""Faults and notes of a launch with ``sanitize="collect"``: each one once, with the number of times."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field

from gpu_ops.emulator.errors import SanitizerError, SanitizerNote


@dataclass(eq=False)
class Faults:
    """Faults by kind and instructions, and notes by instruction, in the order in which they were first found."""

    found: dict[Hashable, SanitizerError] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)

    def repeated(self, key: Hashable) -> bool:
        """Whether a fault is already known; if so, count it."""
        known = self.found.get(key)
        if known is not None:
            known.count += 1
        return known is not None

    def finish(self, title: str) -> None:
        """Raise the faults, with the notes below; without faults, warn of the notes."""
        if not self.found:
            for note in self.notes.values():
                warnings.warn(note, SanitizerNote, stacklevel=4)
            return
        faults = tuple(self.found.values())
        lines = [
            f"{len(faults)} faults in kernel {title}" if len(faults) > 1 else f"1 fault in kernel {title}"
        ]
        for i, fault in enumerate(faults, 1):
            times = f" ({fault.count} times; the first:)" if fault.count > 1 else ""
            lines.append(f"{i}.{times} {fault}")
        lines += self.notes.values()
        raise SanitizerError(faults[0].kind, "\n".join(lines), faults)
