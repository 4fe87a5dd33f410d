"""Quantise the weights of a whole model, and report the effect."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.core.checks import FLOAT_DTYPES
from gpu_ops.errors import DTypeError, OptionError
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.ops.weights.ternary import ternary_quantize

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SKIP", "QuantizedModel", "QuantizedWeight", "quantize_model"]

_AT_A_TIME = 1 << 22  # number of weights that are dense at a time
SKIP = ("*embed*", "*lm_head*", "*norm*")  # weights that ternary models do not quantise


@dataclass(frozen=True)
class QuantizedWeight:
    """Report on one weight. ``kept``: reason why it was not quantised, else empty."""

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    density: float = 1.0
    relative_error: float = 0.0  # ||W - scale * t|| / ||W||, Frobenius
    bits_per_weight: float = 0.0
    kept: str = ""


@dataclass(frozen=True)
class QuantizedModel:
    """Report of :func:`quantize_model`, one row per weight: ``print(report)``; ``rich.print(report)`` for a table."""

    rows: tuple[QuantizedWeight, ...]

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (row.name, str(row.shape), row.kept)
            if row.kept
            else (
                row.name,
                str(row.shape),
                f"{row.density:.3f}",
                f"{row.relative_error:.3f}",
                f"{row.bits_per_weight:.3f}",
            )
            for row in self.rows
        ]

    def _total(self) -> str:
        ratio = self.bytes_before / max(self.bytes_after, 1)
        return f"{self.bytes_before:,} bytes to {self.bytes_after:,}, {ratio:.2f} times fewer"

    def __str__(self) -> str:
        lines = [_COLUMNS, *self._cells()]
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        text = ["  ".join([line[0].ljust(widths[0]), line[1].ljust(widths[1]), *line[2:]]) for line in lines]
        return "\n".join([*text, self._total()])

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(*_COLUMNS, caption=self._total())
        for cells in self._cells():
            table.add_row(*cells)
        return table


_COLUMNS = ("weight", "shape", "density", "error", "bits")


@typed_memory_errors("quantize_model")
def quantize_model(
    weights: Mapping[str, Any],
    *,
    skip: Sequence[str] = SKIP,
    method: str = "absmean",
    group_size: int | None = None,
    threshold: float | None = None,
) -> tuple[dict[str, Any], QuantizedModel]:
    """Quantise every matrix of a model except those that ``skip`` names.

    Parameters
    ----------
    weights : mapping of str to array
        Arrays by name. Float arrays (N, K) are quantised; other shapes and dtypes are returned unchanged.
    skip : sequence of str
        Shell patterns of names not to quantise; by default embeddings, the output head and norms.
        A pattern other than the defaults that matches no name is an error.
    method, group_size, threshold
        Same as in :func:`ternary_quantize`.

    Returns
    -------
    quantized : dict of str to TernaryMatrix or array
        In the order of ``weights``; weights that were not quantised are the caller's own objects.
    report : QuantizedModel
        Density, relative error and bits per weight of each; prints as a table.

    Raises
    ------
    OptionError, DTypeError, ShapeError
        The message has the weight's name.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> w = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    >>> model, report = gpu_ops.quantize_model({"embed": w, "mlp.up": w, "mlp.bias": w[0]})
    >>> model["mlp.up"]
    TernaryMatrix((256, 512), format='w2', scale per tensor, 32,772 bytes)
    >>> print(report)
    weight    shape       density  error  bits
    embed     (256, 512)  skipped
    mlp.up    (256, 512)  0.692  0.513  2.000
    mlp.bias  (512,)      no matrix
    1,050,624 bytes to 559,108, 1.88 times fewer
    """
    name = "quantize_model"
    if not isinstance(weights, Mapping):
        raise DTypeError(
            f"{name}: weights is {type(weights).__name__}; expected a mapping of names to arrays"
        )
    for key in weights:
        if not isinstance(key, str):
            raise OptionError(f"{name}: weights has a name {key!r}, which is no string")
    patterns = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else (skip,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(
            f"{name}: skip must be patterns, such as ('*embed*',), or () for none; got {skip!r}"
        )
    for pattern in patterns:
        if pattern not in SKIP and not any(fnmatch.fnmatchcase(key, pattern) for key in weights):
            raise OptionError(f"{name}: skip={pattern!r} matches none of the {len(weights)} names")
    quantized: dict[str, Any] = {}
    rows = []
    for key, array in weights.items():
        w = Call(name).read(key, array)
        kept = _kept(key, w, patterns)
        if kept:
            quantized[key] = array
            rows.append(QuantizedWeight(key, w.shape, w.nbytes, w.nbytes, kept=kept))
            continue
        try:
            t: TernaryMatrix = ternary_quantize(w, method=method, group_size=group_size, threshold=threshold)
        except (OptionError, ValueError) as error:  # ShapeError is a ValueError
            raise type(error)(f"{name}: {key}: {error}") from error
        quantized[key] = t
        error_, bits = _relative_error(w, t), t.bits_per_weight
        rows.append(QuantizedWeight(key, w.shape, w.nbytes, t.nbytes, t.density, error_, bits))
    return quantized, QuantizedModel(tuple(rows))


def _kept(key: str, w: Array, patterns: tuple[str, ...]) -> str:
    """Reason why a weight is not quantised; empty if it is."""
    if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
        return "skipped"
    if w.ndim != 2 or not w.size:
        return "no matrix"
    return "" if w.dtype in FLOAT_DTYPES.values() else f"{w.dtype}"


def _relative_error(w: Array, t: TernaryMatrix) -> float:
    """Relative Frobenius error in float64, computed some rows at a time."""
    error = size = 0.0
    for rows, dense in _dense(t):
        exact = w[rows].astype(np.float64)
        error += float(np.square(exact - dense).sum())
        size += float(np.square(exact).sum())
    return math.sqrt(error / size) if size else 0.0


def _dense(t: TernaryMatrix) -> Iterator[tuple[slice, Array]]:
    """Dense rows of W, some at a time."""
    w2, (n, k) = t.to("w2"), t.shape
    step = max(_AT_A_TIME // max(k, 1), 1)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        scale = w2.scale[rows] if w2.scale.ndim else w2.scale
        part = TernaryMatrix._trusted(w2.codes[rows], scale, (rows.stop - rows.start, k), "w2")
        yield rows, part.dequantize(np.float64)
