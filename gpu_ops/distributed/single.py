"""Communicator of one rank: the same code runs without a launcher."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.engine import Transfer
from gpu_ops.distributed.transport import DONE

__all__ = ["SingleProcess"]

Array = npt.NDArray[Any]


class SingleProcess(Comm):
    """Group of one rank, which sends nothing: results are copies."""

    _takes_cuda = True

    def __init__(self, name: str = "world", timeout: float = 600.0) -> None:
        super().__init__(0, [0], name, timeout)

    def _split(self, color: int, name: str) -> SingleProcess:
        return SingleProcess(name, self.timeout)

    def abort(self, message: str, status: int = 1) -> None:
        """Print ``message`` and raise SystemExit."""
        self._say(message)
        raise SystemExit(status)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (platform.node(),)

    def _all_to_all(
        self, sent: Array, counts: Sequence[int], found: Array, found_counts: Sequence[int]
    ) -> Transfer:
        np.copyto(found, sent)
        return DONE

    def _all_gather(self, sent: Array, found: Array, counts: Sequence[int]) -> Transfer:
        np.copyto(found, sent)
        return DONE

    def _broadcast(self, data: Array, root: int) -> Transfer:
        return DONE

    def _point_to_point(
        self, sent: Sequence[tuple[Array, int]], found: Sequence[tuple[Array, int]], channel: int
    ) -> Transfer:
        for (source, _), (target, _) in zip(sent, found, strict=True):
            np.copyto(target, source)
        return DONE

    def _check_members(self, transfer: Transfer, call: str) -> None:
        """Do nothing: there are no other members."""

    def _roll_call(self, word: str) -> list[str | None]:
        return [word]
