"""Form of a model's weights in an estimate: arrays or packed matrices, with or without LoRA adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core.checks import flag, integer, one_of
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix, check_columns
from gpu_ops.formats.packed_part import layout_of
from gpu_ops.kernels.weights.packed_panels import GPU_LANES, panel_bytes
from gpu_ops.memory.trace import Trace
from gpu_ops.models import Llama, LlamaConfig, lora_shapes, with_lora
from gpu_ops.models.config import PROJECTIONS
from gpu_ops.reference.weights.packed_formats import FORMATS

__all__ = ["Weights", "check_blocks", "planned_model", "trained_shapes"]

_WHO = "memory.Weights"


@dataclass(frozen=True)
class Weights:
    """Form of a model's weights in memory, for :func:`estimate`, :func:`estimate_inference` and :func:`fit`.

    Raises
    ------
    OptionError
        An unknown format or projection; ``tables`` without a format.

    Examples
    --------
    >>> from gpu_ops import memory, models
    >>> config = models.PRESETS["llama-3-8b"]
    >>> sizes = {"batch": 1, "seqlen": 2048, "dtype": "bfloat16", "policy": "layer"}
    >>> plan = memory.estimate(config, **sizes, weights=memory.Weights("nf4", rank=16))
    >>> f"{plan.parts['weights'] / 2**30:.2f} of {2 * config.parameters / 2**30:.2f} GiB"
    '5.61 of 14.96 GiB'
    >>> plan.peak < 8e9
    True
    """

    format: str | None = None
    """Format of the projections, as :func:`gpu_ops.models.load` packs them with ``format=``: ``"nf4"``, ``"q4_k"``
    and all others of :class:`gpu_ops.PackedMatrix`. None: arrays."""
    tables: bool = False
    """Whether the embedding table and the output layer are packed too, as in GGUF files. :func:`gpu_ops.models.load`
    with ``format=`` leaves them arrays."""
    rank: int | None = None
    """Rank of the LoRA adapters, on a base that is frozen. None: no adapters."""
    projections: Sequence[str] = PROJECTIONS
    """Projections with adapters."""

    def __post_init__(self) -> None:
        if self.format is not None:
            one_of(_WHO, "format", self.format, tuple(FORMATS))
        if flag(_WHO, "tables", self.tables) and self.format is None:
            raise OptionError(f"{_WHO}: tables=True packs the tables too, in the format that format= names")
        if self.rank is not None:
            integer(_WHO, "rank", self.rank, low=1)
        for name in self.projections:
            one_of(_WHO, "projections", name, PROJECTIONS)

    def __str__(self) -> str:
        names = [f"{self.format}{' with tables' if self.tables else ''}"] if self.format else []
        names += [f"LoRA of rank {self.rank}"] if self.rank else []
        return ", ".join(names)


def check_blocks(who: str, weights: Weights, config: LlamaConfig) -> None:
    """Raise an error if the rows of a packed matrix are not whole blocks."""
    for name, shape in config.shapes().items():
        if _is_packed(weights, name):
            try:
                check_columns(who, FORMATS[str(weights.format)], shape[1])
            except ShapeError as error:
                raise ShapeError(f"{error}, in {name}") from None


def planned_model(
    weights: Weights, trace: Trace, config: LlamaConfig, dtype: np.dtype[Any]
) -> tuple[Llama, dict[str, int]]:
    """Model without memory, and its bytes by term: weights, adapters."""
    before = trace.live_bytes
    arrays: dict[str, Any] = {}
    for name, shape in config.shapes().items():
        if _is_packed(weights, name):
            arrays[name] = _Planned(trace, shape, str(weights.format), dtype)
        else:
            arrays[name] = trace.empty(shape, dtype, "weights")
    base, parts = Llama.of(arrays, config), {"weights": trace.live_bytes - before}
    if weights.rank is None:
        return base, parts
    shapes = trained_shapes(weights, config)
    adapters = {name: trace.empty(shape, dtype, "adapters") for name, shape in shapes.items()}
    parts["adapters"] = trace.live_bytes - before - parts["weights"]
    return with_lora(base, adapters), parts


def trained_shapes(weights: Weights, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that are trained."""
    if weights.rank is None:
        return config.shapes()
    return lora_shapes(config, weights.rank, weights.projections)


def _is_packed(weights: Weights, name: str) -> bool:
    if weights.format is None:
        return False
    return name.rpartition(".")[2] in PROJECTIONS or (weights.tables and name in ("embed", "lm_head"))


class _Planned(PackedMatrix):
    """Packed matrix without memory, of the size of the panels that the kernels read."""

    def __init__(self, trace: Trace, shape: tuple[int, ...], format: str, dtype: np.dtype[Any]) -> None:
        from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

        rows, cols = shape
        fmt = FORMATS[format].for_columns(cols)
        lanes = GPU_LANES if trace.on_gpu else LANES
        blocks = rows, cols // fmt.block * fmt.nbytes
        panels = -(-rows // lanes) * panel_bytes(layout_of(fmt), lanes, cols)
        self._memory = trace.empty((max(panels, math.prod(blocks)),), np.uint8, "weights")
        super().__init__(self._memory[: math.prod(blocks)].reshape(blocks), (rows, cols), format, dtype=dtype)

    def on(self, device: Any) -> Any:
        """Memory of the panels, in place of a copy."""
        return self._memory
