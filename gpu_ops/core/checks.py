"""Validation helpers that every op shares: named axes, dtypes, options.

Each raises a typed error that states the value received, the values allowed and what to do next.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import DTypeError, OptionError, ShapeError

__all__ = [
    "FLOAT_DTYPES",
    "Axes",
    "computable",
    "contiguous",
    "epsilon",
    "exactly",
    "flag",
    "float_dtype",
    "integer",
    "native",
    "number",
    "one_of",
    "result_dtype",
    "unsupported",
    "window",
]

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# Largest magnitude of an option, by the dtype of arrays. Its reciprocal is the least magnitude of a divisor.
_LARGEST = {name: 1e308 if name == "float64" else 1e38 for name in FLOAT_DTYPES}

_NO_NUMBERS = (bool, np.timedelta64)  # bool is an int to Python, and a time an integer to NumPy


class Axes:
    """Named axis lengths of one call: the first array that names an axis fixes its length.

    >>> axes = Axes("attention")
    >>> axes.bind("q", np.zeros((2, 5, 8, 64)), "batch seqlen_q nheads head_dim")
    >>> axes["nheads"]
    8
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self._sizes: dict[str, int] = {}
        self._origin: dict[str, str] = {}

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def set(self, axis: str, size: int, origin: str) -> None:
        """Set an axis length that no array's shape contains."""
        self._sizes[axis], self._origin[axis] = size, origin

    def bind(self, name: str, x: Array, axes: str) -> None:
        """Name the axes of ``x``; a name used before must have the same length here."""
        names = axes.split()
        if x.ndim != len(names):
            raise ShapeError(
                f"{self.op}: {name} has {x.ndim} axes, shape {x.shape}; "
                f"expected {len(names)}: {self._expected(names)}"
            )
        for axis, size in zip(names, x.shape, strict=True):
            known = self._sizes.get(axis)
            if known is None:
                self._sizes[axis] = size
                self._origin[axis] = name
            elif known != size:
                raise ShapeError(
                    f"{self.op}: {name} has shape {x.shape}, expected {self._expected(names)}: "
                    f"{axis} is {size} here but {known} in {self._origin[axis]}"
                )

    def _expected(self, names: Iterable[str]) -> str:
        parts = [f"{n}={self._sizes[n]}" if n in self._sizes else n for n in names]
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def exactly(op: str, name: str, x: Array, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> None:
    """Require that ``x`` has exactly this shape and, unless None, this dtype."""
    if x.shape != shape:
        raise ShapeError(f"{op}: {name} has shape {x.shape}, expected exactly {shape}")
    if dtype is not None and x.dtype != dtype:
        raise DTypeError(f"{op}: {name} is {x.dtype}, expected {dtype}; cast it: {name}.astype('{dtype}')")


def native(op: str, name: str, x: Array) -> None:
    """Require that the bytes of ``x`` are in this machine's order."""
    if not x.dtype.isnative:
        raise DTypeError(
            f"{op}: {name} is byte-swapped ({x.dtype.str}); "
            f"convert it: {name}.astype({name}.dtype.newbyteorder('='))"
        )


def contiguous(op: str, name: str, out: Array | None) -> None:
    """Require a C-contiguous array for one number per row: kernels write without gaps. None: no array was passed."""
    if out is not None and not out.flags.c_contiguous:
        raise ShapeError(f"{op}: out {name} must be C-contiguous; pass numpy.empty({out.shape}, ...)")


def float_dtype(op: str, **arrays: Array | None) -> str:
    """Name of the float dtype that all arrays share; ``None`` entries are skipped."""
    dtypes = {name: x.dtype for name, x in arrays.items() if x is not None}
    (first, dtype), *rest = dtypes.items()
    name = next((n for n, d in FLOAT_DTYPES.items() if d == dtype), None)
    if name is None:
        hint = f"cast it first, for example {first}.astype(np.float32)"
        raise DTypeError(f"{op}: {first} is {dtype}; allowed: {', '.join(FLOAT_DTYPES)}. {hint}")
    for other, d in rest:
        if d != dtype:
            raise DTypeError(
                f"{op}: {other} is {d} but {first} is {dtype}; mixed dtypes are not promoted: "
                f"cast one of them, for example {other}.astype({first}.dtype)"
            )
    return name


def computing_dtype(dtype: str) -> np.dtype[Any]:
    """Dtype that kernels compute ``dtype`` in, also of lse, rstd and the like: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def result_dtype(
    op: str, name: str, value: Any, default: np.dtype[Any], *others: np.dtype[Any]
) -> np.dtype[Any]:
    """The dtype of a result: ``default``, or one of ``others`` if ``value`` requests it."""
    if value is None:
        return default
    allowed = dict.fromkeys((default, *others))
    dtype: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        dtype = np.dtype(value)
    if dtype is None or isinstance(value, np.ndarray) or dtype not in allowed:
        raise DTypeError(f"{op}: {name} must be {' or '.join(map(str, allowed))} here, got {value!r}")
    return dtype


def one_of(
    op: str, name: str, value: Any, allowed: Iterable[str], *, meant: Mapping[str, str] | None = None
) -> str:
    """Return ``value`` if it is one of ``allowed``, else raise an error that suggests the nearest or ``meant`` one.

    A 0-d array of a string counts as the string: np.load returns one for a string saved in an .npz file.
    """
    allowed = tuple(allowed)
    if isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "UT":
        value = value.item()
    if isinstance(value, str) and value in allowed:
        return str(value)  # np.str_ is a str too
    word = str(value)
    near = [meant[word]] if meant and word in meant else difflib.get_close_matches(word, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OptionError(f"{op}: {name}={value!r} is unknown; {hint}allowed: {', '.join(map(repr, allowed))}")


def real(op: str, name: str, value: Any) -> Any:
    """A real number, NaN and infinities included."""
    if isinstance(value, _NO_NUMBERS) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise OptionError(f"{op}: {name} must be a number, got {type(value).__name__} {value!r}")
    return value


def number(op: str, name: str, value: Any, *, low: float = -math.inf, above: float = -math.inf) -> float:
    """A finite real number, ``>= low`` and ``> above``."""
    try:
        result = value if type(value) is float else float(real(op, name, value))
    except OverflowError as error:
        raise OptionError(f"{op}: {name} must be finite, and float64 cannot hold the one given") from error
    if not math.isfinite(result) or result < low or result <= above:
        bound = f" and > {above:g}" if above > -math.inf else f" and >= {low:g}" if low > -math.inf else ""
        raise OptionError(f"{op}: {name} must be finite{bound}, got {value!r}")
    return result + 0.0  # -0.0 becomes 0.0: programs are looked up by equality


def computable(
    op: str, name: str, value: Any, dtype: str, *, low: float = -math.inf, divides: bool = False
) -> float:
    """A number that is finite in the dtype that kernels compute in for arrays of ``dtype``.

    ``divides``: kernels divide by it unless it is 0, so its reciprocal must be finite as well.
    """
    result = number(op, name, value, low=low)
    largest = _LARGEST[dtype]
    least = 1 / largest if divides else 0.0
    if result and not least <= abs(result) <= largest:
        bounds = f"0 or between {least:g} and {largest:g}" if divides else f"at most {largest:g}"
        computed = computing_dtype(dtype)
        raise OptionError(
            f"{op}: {name} must be {bounds} in size, for {dtype} is computed in {computed}; got {result!r}"
        )
    return result


def scalar(op: str, name: str, value: Any, dtype: str) -> None:
    """Check a number, or a NumPy array of shape (), that kernels compute with. Other arrays are checked at use."""
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.generic) or not hasattr(value, "dtype"):
        computable(op, name, value, dtype)


def epsilon(op: str, value: Any, dtype: str) -> float:
    """``eps`` of a norm, ``>= 0``, raised to at least the smallest positive number of ``dtype``'s computing dtype.

    1 / sqrt(0) would make NaN of a row of zeros.
    """
    least = float(np.finfo(computing_dtype(dtype)).smallest_subnormal)
    return max(computable(op, "eps", value, dtype, low=0.0), least)


def integer(op: str, name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """An integer within ``[low, high]``."""
    if isinstance(value, _NO_NUMBERS) or not isinstance(value, (int, np.integer)):
        raise OptionError(f"{op}: {name} must be an integer, got {type(value).__name__} {value!r}")
    result = int(value)
    if (low is not None and result < low) or (high is not None and result > high):
        bounds = f"[{'-inf' if low is None else low}, {'inf' if high is None else high}]"
        raise OptionError(f"{op}: {name} must lie in {bounds}, got {result}")
    return result


def window(op: str, value: Any) -> tuple[int, int]:
    """``window_size``: number of keys a query sees to the left and to the right, -1 for no limit."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise OptionError(f"{op}: window_size must be (left, right), -1 for no limit; got {value!r}")
    left, right = (integer(op, f"window_size[{i}]", side) for i, side in enumerate(value))
    for i, side in enumerate((left, right)):
        if side < -1:
            raise OptionError(f"{op}: window_size[{i}] must be -1, for no limit, or at least 0; got {side}")
    return left, right


def instance(op: str, name: str, value: Any, *kinds: type) -> None:
    """Require that ``value`` is an instance of one of these classes."""
    if not isinstance(value, kinds):
        words = " or ".join(cls.__name__ for cls in kinds)
        raise OptionError(f"{op}: {name} must be a {words}, got {type(value).__name__}")


def flag(op: str, name: str, value: Any) -> bool:
    """A bool; a string or an array here is a mistake that truthiness would hide."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise OptionError(f"{op}: {name} must be True or False, got {type(value).__name__} {value!r}")


def unsupported(dtype: str) -> dict[str, str]:
    """Backends that do not support this dtype, for ops whose CUDA C++ kernels take all but float64."""
    return {"raw": "float64 has Numba kernels only"} if dtype == "float64" else {}
