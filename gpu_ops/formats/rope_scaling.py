"""RopeScaling: scaled rotary frequencies for longer contexts, from parameters or a model's config."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.call_key import PLAIN
from gpu_ops.core.checks import flag, integer, number, one_of
from gpu_ops.errors import OptionError
from gpu_ops.formats.rope_scaling_hf import KINDS, Entries, rope_entries
from gpu_ops.reference.rope import rope_scaling as maths

__all__ = ["BY_LENGTH", "RopeScaling"]

BY_LENGTH = ("dynamic", "longrope")  # kinds whose frequencies depend on the length of the sequence

_WHO = "RopeScaling"
_NEEDS_ORIGINAL = ("dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the frequencies of :func:`gpu_ops.rope`. Create it with one of the constructors below.

    =========================  ==============================================================================
    ``linear(factor)``         all frequencies divided by ``factor`` (position interpolation)
    ``ntk(factor)``            a larger base: low frequencies shrink by ``factor``, high ones stay
    ``dynamic(factor, n)``     ``ntk`` that grows with the sequence, from length ``n`` on
    ``yarn(factor, n)``        ``NTK by parts``, and an attention factor on cos and sin
    ``longrope(short, long)``  one divisor per frequency, another set beyond the original length
    ``llama3(factor, n)``      long wavelengths divided by ``factor``, short ones kept, a blend between
    ``from_hf(config)``        the scaling of a Hugging Face config
    =========================  ==============================================================================

    ``theta`` and ``partial_rotary_factor`` are set by ``from_hf`` if a config has them, else None; ``rope`` uses
    them when its own ``theta`` and ``rotary_dim`` are not given. The object is immutable and hashable.

    Parameters
    ----------
    factor : float
        New context length divided by the trained one; at least 1, except for ``linear``.
    original_max_position : int
        Context length that the model was trained with.
    attention_factor, long_attention_factor : float, optional
        Factor of cos and sin. ``longrope`` uses the second one beyond ``original_max_position``.
    beta_fast, beta_slow : float
        ``yarn``: frequencies with more than ``beta_fast`` turns in the original length stay, those with fewer than
        ``beta_slow`` are divided by ``factor``, and a ramp blends those in between. ``truncate`` (bool) rounds the
        ends of the ramp to whole dimensions.
    low_freq_factor, high_freq_factor : float
        ``llama3``: wavelengths beyond ``original_max_position / low_freq_factor`` are divided by ``factor``, those
        below ``original_max_position / high_freq_factor`` stay, and a ramp blends those in between.
    short_factor, long_factor : iterable of float
        ``longrope``: one divisor for each of the ``rotary_dim / 2`` frequencies.

    Raises
    ------
    OptionError
        A number is out of range, or one that the kind needs is missing.

    Examples
    --------
    >>> from gpu_ops import RopeScaling
    >>> scaling = RopeScaling.llama3(8.0, 8192)
    >>> scaling.inv_freq(128, theta=500000.0)[[0, -1]]
    array([1.00000000e+00, 3.06892599e-07])
    >>> RopeScaling.yarn(4.0, 4096).attention_factor_at(16384)
    1.138629436111989
    """

    kind: str
    factor: float = 1.0
    original_max_position: int | None = None
    attention_factor: float = 1.0
    long_attention_factor: float | None = None  # longrope: beyond original_max_position, if it differs
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    theta: float | None = None
    partial_rotary_factor: float | None = None

    def __post_init__(self) -> None:
        who = f"{_WHO}.{one_of(_WHO, 'kind', self.kind, KINDS)}"
        self._set("factor", number(who, "factor", self.factor, above=0.0))
        self._set("attention_factor", number(who, "attention_factor", self.attention_factor, above=0.0))
        if self.long_attention_factor is not None:
            long = number(who, "long_attention_factor", self.long_attention_factor, above=0.0)
            self._set("long_attention_factor", long)
        if self.kind in _NEEDS_ORIGINAL:
            if self.original_max_position is None:
                raise OptionError(
                    f"{who}: original_max_position is missing: the context length the model was trained with "
                    "(original_max_position_embeddings, else max_position_embeddings, in a config)"
                )
            low = 2 if self.kind == "longrope" else 1  # its attention factor divides by ln(original)
            original = integer(who, "original_max_position", self.original_max_position, low=low)
            self._set("original_max_position", original)
        if self.kind in ("dynamic", "yarn", "ntk", "llama3") and self.factor < 1.0:
            raise OptionError(f"{who}: factor must be >= 1 (new length / old length), got {self.factor:g}")
        self._set("truncate", flag(who, "truncate", self.truncate))
        self._ordered(who, "beta_slow", "beta_fast")
        self._ordered(who, "low_freq_factor", "high_freq_factor")
        for name in ("short_factor", "long_factor"):
            self._set(name, _divisors(who, name, getattr(self, name), empty=self.kind != "longrope"))
        if len(self.short_factor) != len(self.long_factor):
            raise OptionError(
                f"{who}: short_factor has {len(self.short_factor)} entries, long_factor "
                f"{len(self.long_factor)}; both need rotary_dim / 2"
            )
        if self.theta is not None:
            self._set("theta", number(who, "theta", self.theta, above=0.0))
        if self.partial_rotary_factor is not None:
            partial = number(who, "partial_rotary_factor", self.partial_rotary_factor, above=0.0)
            if partial > 1.0:
                raise OptionError(f"{who}: partial_rotary_factor must lie in (0, 1], got {partial:g}")
            self._set("partial_rotary_factor", partial)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _ordered(self, who: str, small: str, large: str) -> None:
        a = number(who, small, getattr(self, small), above=0.0)
        b = number(who, large, getattr(self, large), above=0.0)
        if a >= b:
            raise OptionError(f"{who}: {small} must be smaller than {large}, got {a:g} and {b:g}")
        self._set(small, a)
        self._set(large, b)

    @classmethod
    def linear(cls, factor: float) -> RopeScaling:
        """Position interpolation (arXiv 2306.15595): ``inv_freq / factor``."""
        return cls("linear", factor)

    @classmethod
    def ntk(cls, factor: float) -> RopeScaling:
        """NTK-aware, static: ``theta * factor ** (R / (R - 2))`` for rotary dimension R."""
        return cls("ntk", factor)

    @classmethod
    def dynamic(cls, factor: float, original_max_position: int) -> RopeScaling:
        """NTK with ``factor * L / original_max_position - (factor - 1)`` where
        ``L = max(seqlen, original_max_position)``."""
        return cls("dynamic", factor, original_max_position)

    @classmethod
    def yarn(
        cls,
        factor: float,
        original_max_position: int,
        *,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
    ) -> RopeScaling:
        """YaRN (arXiv 2309.00071): frequencies by parts, and an attention factor on cos and sin.

        ``attention_factor`` None: ``0.1 ln(factor) + 1``; when ``mscale`` and ``mscale_all_dim`` (DeepSeek)
        are both given and not 0, ``(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)``.
        ``truncate=False`` leaves the ends of the ramp fractional (gpt-oss).
        """
        who = f"{_WHO}.yarn"
        factor = number(who, "factor", factor, above=0.0)
        m = None if mscale is None else number(who, "mscale", mscale, low=0.0)
        m_all = None if mscale_all_dim is None else number(who, "mscale_all_dim", mscale_all_dim, low=0.0)
        if attention_factor is None:
            attention_factor = maths.yarn_attention_factor(factor, m, m_all)
        return cls(
            "yarn",
            factor,
            original_max_position,
            attention_factor,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
        )

    @classmethod
    def longrope(
        cls,
        short_factor: Iterable[float],
        long_factor: Iterable[float],
        original_max_position: int,
        *,
        factor: float = 1.0,
        attention_factor: float | None = None,
        long_attention_factor: float | None = None,
    ) -> RopeScaling:
        """LongRoPE (arXiv 2402.13753), as in Phi-3: one divisor per frequency, two sets of ``rotary_dim / 2``.

        ``long_factor`` is used when the sequence is longer than ``original_max_position``. ``factor`` (new
        length / original length) only determines the attention factor when that is None:
        ``sqrt(1 + ln(factor) / ln(original_max_position))``.
        """
        factor = number(f"{_WHO}.longrope", "factor", factor, above=0.0)
        if attention_factor is None:
            original = integer(f"{_WHO}.longrope", "original_max_position", original_max_position, low=2)
            attention_factor = maths.longrope_attention_factor(factor, original)
        return cls(
            "longrope",
            factor,
            original_max_position,
            attention_factor,
            long_attention_factor,
            short_factor=_divisors(f"{_WHO}.longrope", "short_factor", short_factor),
            long_factor=_divisors(f"{_WHO}.longrope", "long_factor", long_factor),
        )

    @classmethod
    def llama3(
        cls,
        factor: float = 8.0,
        original_max_position: int = 8192,
        *,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
    ) -> RopeScaling:
        """Scaling of Llama 3.1 (factor 8) and 3.2 (factor 32)."""
        return cls(
            "llama3",
            factor,
            original_max_position,
            low_freq_factor=low_freq_factor,
            high_freq_factor=high_freq_factor,
        )

    @classmethod
    def from_hf(cls, config: Any, *, layer_type: str | None = None) -> RopeScaling:
        """Read the scaling of a Hugging Face transformers config.

        ``config`` is the whole config as a dict (with ``rope_parameters`` or ``rope_scaling``), or only that
        part. If it has both, ``rope_scaling`` counts, as in transformers. ``rope_theta`` becomes ``theta``,
        ``partial_rotary_factor`` keeps its name. Models with one set per layer type (Gemma 3) need ``layer_type``,
        for example ``"full_attention"``.

        Raises
        ------
        OptionError
            An unknown rope type (the message lists those that exist), a missing or ill-formed entry.

        Examples
        --------
        >>> from gpu_ops import RopeScaling
        >>> scaling = RopeScaling.from_hf({
        ...     "rope_theta": 500000.0, "max_position_embeddings": 131072,
        ...     "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        ...                      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})
        >>> scaling.kind, scaling.factor, scaling.original_max_position, scaling.theta
        ('llama3', 8.0, 8192, 500000.0)
        """
        entries = rope_entries(config, layer_type)
        scaling = _read(cls, entries)
        return replace(scaling, theta=entries.theta, partial_rotary_factor=entries.partial_rotary_factor)

    def inv_freq(
        self, rotary_dim: int, theta: float | None = None, seqlen: int = 0
    ) -> npt.NDArray[np.float64]:
        """Return the ``rotary_dim / 2`` frequencies in float64, for a sequence of ``seqlen`` tokens.

        ``theta`` None: the scaling's own, else 10000. Only dynamic and longrope depend on ``seqlen``.
        """
        rotary_dim = integer(_WHO, "rotary_dim", rotary_dim, low=2)
        if rotary_dim % 2:
            raise OptionError(f"{_WHO}: rotary_dim must be even, got {rotary_dim}")
        default = 10000.0 if self.theta is None else self.theta
        theta = number(_WHO, "theta", default if theta is None else theta, above=0.0)
        longest = self.effective_seqlen(integer(_WHO, "seqlen", seqlen, low=0))
        try:
            return _inv_freq(self, rotary_dim, theta, longest)
        except OptionError:
            raise
        except (ArithmeticError, ValueError) as error:  # from log and power
            raise OptionError(f"{_WHO}: frequencies of {self} overflow at theta={theta:g}") from error

    def attention_factor_at(self, seqlen: int) -> float:
        """Return the factor of cos and sin for a sequence of ``seqlen`` tokens."""
        long = self.long_attention_factor
        return self.attention_factor if long is None or not self._is_long(seqlen) else long

    def effective_seqlen(self, seqlen: int) -> int:
        """Return the representative of all lengths with the frequencies and attention factor of ``seqlen``."""
        original = self.original_max_position or 0
        if self.kind == "dynamic":
            return max(seqlen, original)
        return original + 1 if self.kind == "longrope" and seqlen > original else 0

    def _is_long(self, seqlen: int) -> bool:
        return self.original_max_position is not None and seqlen > self.original_max_position


PLAIN.add(RopeScaling)

# Function that computes the frequencies of each kind, and the fields that it reads.
_INV_FREQ: dict[str, tuple[Callable[..., npt.NDArray[np.float64]], tuple[str, ...]]] = {
    "default": (maths.default_inv_freq, ()),
    "linear": (maths.linear_inv_freq, ("factor",)),
    "ntk": (maths.ntk_inv_freq, ("factor",)),
    "dynamic": (maths.dynamic_inv_freq, ("factor", "original_max_position")),
    "yarn": (
        maths.yarn_inv_freq,
        ("factor", "original_max_position", "beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": (maths.longrope_inv_freq, ("short_factor", "long_factor", "original_max_position")),
    "llama3": (
        maths.llama3_inv_freq,
        ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    ),
}


def _read(new: type[RopeScaling], entries: Entries) -> RopeScaling:
    rope_type = entries.kind
    if rope_type == "linear":
        return new.linear(entries.need("factor"))
    if rope_type == "ntk":
        return new.ntk(entries.need("factor"))
    if rope_type == "dynamic":
        # transformers scales beyond max_position_embeddings here, even if a config has an original length
        return new.dynamic(
            entries.need("factor"),
            entries.length("max_position_embeddings", "original_max_position_embeddings"),
        )
    if rope_type == "yarn":
        return new.yarn(
            entries.stretch(),
            entries.original(),
            attention_factor=entries.number("attention_factor"),
            mscale=entries.number("mscale"),
            mscale_all_dim=entries.number("mscale_all_dim"),
            beta_fast=entries.number("beta_fast") or 32.0,
            beta_slow=entries.number("beta_slow") or 1.0,
            truncate=entries.flag("truncate", True),
        )
    if rope_type == "longrope":
        return _longrope(new, entries)
    if rope_type == "llama3":
        return new.llama3(
            entries.need("factor"),
            entries.original(),
            low_freq_factor=entries.need("low_freq_factor"),
            high_freq_factor=entries.need("high_freq_factor"),
        )
    return new("default")


def _longrope(new: type[RopeScaling], entries: Entries) -> RopeScaling:
    short, long = entries.number("short_mscale"), entries.number("long_mscale")  # Phi-3.5-MoE has both
    attention_factor = entries.number("attention_factor") if short is None else short
    return new.longrope(
        entries.need("short_factor"),
        entries.need("long_factor"),
        entries.original(),
        factor=1.0 if attention_factor is not None else entries.stretch(),
        attention_factor=attention_factor,
        long_attention_factor=long,
    )


@functools.lru_cache(maxsize=64)
def _inv_freq(s: RopeScaling, rotary_dim: int, theta: float, seqlen: int) -> npt.NDArray[np.float64]:
    if s.kind == "yarn" and theta <= 1.0:
        raise OptionError(f"{_WHO}.yarn: theta must be > 1, got {theta:g}")
    if s.kind == "longrope" and len(s.short_factor) != rotary_dim // 2:
        raise OptionError(
            f"{_WHO}.longrope: short_factor and long_factor have {len(s.short_factor)} entries, but "
            f"rotary_dim={rotary_dim} needs {rotary_dim // 2}; if the model rotates only a part of each "
            f"head, pass rotary_dim={2 * len(s.short_factor)}"
        )
    compute, fields = _INV_FREQ[s.kind]
    options = {name: getattr(s, name) for name in fields}
    if s.kind in BY_LENGTH:
        options["seqlen"] = seqlen
    result = compute(rotary_dim, theta, **options)
    result.flags.writeable = False  # it is shared through the cache
    return result


def _divisors(who: str, name: str, values: Any, *, empty: bool = False) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        shape = f" of shape {values.shape}" if isinstance(values, np.ndarray) else ""
        raise OptionError(f"{who}: {name} must be a sequence of numbers, got {type(values).__name__}{shape}")
    result = tuple(number(who, f"{name}[{i}]", v, above=0.0) for i, v in enumerate(values))
    if not result and not empty:
        raise OptionError(f"{who}: {name} is empty; it needs rotary_dim / 2 numbers")
    if any(math.isinf(1.0 / v) for v in result):
        raise OptionError(f"{who}: {name} holds a number too small to divide by")
    return result
