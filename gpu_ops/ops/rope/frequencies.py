"""Frequencies of ``rope``, computed from theta, rotary_dim and scaling in the form that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.errors import OptionError
from gpu_ops.formats.rope_scaling import BY_LENGTH, RopeScaling
from gpu_ops.ops.rope.tables import RopeTables

__all__ = ["Frequencies", "RotaryArguments", "Rotation"]

_PLAIN = RopeScaling("default")


@dataclass(frozen=True)
class RotaryArguments:
    """Arguments shared by ``rope`` and ``rope_append_kv``, as the caller passed them."""

    theta: Any
    rotary_dim: Any
    interleaved: Any
    scaling: Any
    seqlen: Any

    def check(self, call: Call, dtype: str) -> Frequencies:
        """Check the arguments, add them to the call's options, and return the frequencies."""
        op = call.op
        interleaved = checks.flag(op, "interleaved", self.interleaved)
        scaling = _scaling_of(op, self.scaling)
        theta = _theta_of(op, self.theta, scaling)
        rotary_dim = _rotary_dim_of(op, self.rotary_dim, call.axes["head_dim"], scaling)
        seqlen = None if self.seqlen is None else checks.integer(op, "seqlen", self.seqlen, low=0)
        rotation = Rotation(scaling, theta, rotary_dim, interleaved)
        frequencies = Frequencies(op, rotation, checks.computing_dtype(dtype), seqlen)
        call.option(**vars(rotation), **({} if frequencies.by_length else frequencies.at(0).options))
        return frequencies


@dataclass(frozen=True)
class Rotation:
    """The checked options of a rotation."""

    scaling: RopeScaling
    theta: float
    rotary_dim: int
    interleaved: bool

    def __str__(self) -> str:
        pairing = "interleaved" if self.interleaved else "half-split"
        return f"rotary_dim {self.rotary_dim} {pairing}, scaling {self.scaling.kind}"


@dataclass(frozen=True)
class _AtLength:
    """Frequencies for sequences of ``seqlen`` tokens."""

    seqlen: int
    options: dict[str, Any]
    """Options of the GPU kernels' programs."""
    tables: RopeTables


class Frequencies:
    """Frequencies of a call. With some scalings they depend on the length that its positions reach.

    ``seqlen``: that length, if the caller passed it.
    """

    def __init__(self, op: str, rotation: Rotation, dtype: np.dtype[Any], seqlen: int | None) -> None:
        self.op, self.rotation = op, rotation
        self.by_length = seqlen is None and rotation.scaling.kind in BY_LENGTH
        self._dtype = dtype  # dtype of the cos and sin tables
        self._last = self._at(seqlen or 0)

    def at(self, last: int) -> _AtLength:
        """Frequencies for positions up to ``last``."""
        current = self._last  # other threads may replace it
        seqlen = (
            self.rotation.scaling.effective_seqlen(max(last + 1, 0)) if self.by_length else current.seqlen
        )
        if current.seqlen != seqlen:
            self._last = current = self._at(seqlen)
        return current

    def lookup(
        self, backend: str, positions: Array, first: int, last: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options and views for positions in host memory with minimum ``first`` and maximum ``last``."""
        entry = self.at(last)
        if backend == "cpu":
            cos, sin, rows = entry.tables(positions, first, last)
            return {}, {"cos": cos, "sin": sin, "rows": rows}
        if backend == "reference":
            return {}, {"rows": positions, "seqlen": entry.seqlen}
        return entry.options if self.by_length else {}, {}

    def _at(self, seqlen: int) -> _AtLength:
        r = self.rotation
        with np.errstate(all="ignore"):
            inv_freq = r.scaling.inv_freq(r.rotary_dim, r.theta, seqlen)
        if not np.isfinite(inv_freq).all():
            raise OptionError(f"{self.op}: theta={r.theta:g} makes frequencies infinite")
        factor = r.scaling.attention_factor_at(seqlen)
        checks.computable(self.op, "attention_factor", factor, self._dtype.name)
        options = {"inv_freq": inv_freq.tobytes(), "attention_factor": factor}
        return _AtLength(seqlen, options, RopeTables(inv_freq, factor, self._dtype))


def _scaling_of(op: str, scaling: Any) -> RopeScaling:
    if scaling is None:
        return _PLAIN
    if not isinstance(scaling, RopeScaling):
        use = (
            "RopeScaling.from_hf(config)"
            if isinstance(scaling, dict)
            else "for example RopeScaling.linear(4.0)"
        )
        raise OptionError(f"{op}: scaling must be a RopeScaling, got {type(scaling).__name__}; use {use}")
    return scaling


def _theta_of(op: str, theta: Any, scaling: RopeScaling) -> float:
    if theta is None:
        return 10000.0 if scaling.theta is None else scaling.theta
    return checks.number(op, "theta", theta, above=0.0)


def _rotary_dim_of(op: str, rotary_dim: Any, head_dim: int, scaling: RopeScaling) -> int:
    origin = "rotary_dim"
    if rotary_dim is None:
        partial = scaling.partial_rotary_factor
        rotary_dim = head_dim if partial is None else int(head_dim * partial)
        origin = "head_dim" if partial is None else f"rotary_dim = int({head_dim} * partial_rotary_factor)"
    size = checks.integer(op, "rotary_dim", rotary_dim)
    if not 2 <= size <= head_dim or size % 2:
        raise OptionError(
            f"{op}: {origin} is {size}; components rotate in pairs: pass rotary_dim=, an even number from 2 "
            f"to head_dim={head_dim}"
        )
    return size
