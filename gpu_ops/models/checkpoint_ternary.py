"""Packed ternary projections of models, and those of BitNet checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.ternary_blocks import whole_scale
from gpu_ops.formats.ternary_files import read_bitnet
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.models.config import PROJECTIONS
from gpu_ops.models.tensors import Part

__all__ = ["joined", "read_ternary", "scale_columns"]


def read_ternary(
    who: str, where: Path, entries: Mapping[str, Any], plan: Mapping[str, list[Part]]
) -> dict[str, TernaryMatrix]:
    """Read the packed projections, by the names of the model's arrays; none in a checkpoint of floats."""
    quantization = entries.get("quantization_config")
    if quantization is None:
        return {}
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "bitnet":
        raise OptionError(
            f"{who}: {where}: quantization_config says that the weights are quantised; float weights and packed ones "
            "of BitNet are loaded"
        )
    for name, expected in {"quantization_mode": "offline", "use_rms_norm": False}.items():
        if quantization.get(name) not in (None, expected):
            raise OptionError(
                f"{who}: {where}: quantization_config has {name}={quantization[name]!r}, expected {expected!r}"
            )
    packed = read_bitnet(where)
    if not packed:
        raise FormatError(f"{who}: {where}: quantization_config says that weights are packed, and none is")
    arrays = {}
    for name, parts in plan.items():
        modules = [part.name.removesuffix(".weight") for part in parts]
        present = [module for module in modules if module in packed]
        if not present:
            continue
        if len(present) < len(modules) or name.rpartition(".")[2] not in PROJECTIONS:
            raise FormatError(
                f"{who}: {where}: {present[0]} is packed, and the model's {name} is not as a whole"
            )
        if f"{name}_bias" in plan and quantization.get("linear_class") == "autobitlinear":
            raise OptionError(
                f"{who}: {where}: {present[0]} has a bias, which the scale of an AutoBitLinear multiplies as well; "
                "that is not supported"
            )
        matrices = [packed.pop(module) for module in modules]
        for part, matrix in zip(parts, matrices, strict=True):
            if matrix.shape != part.shape:
                raise ShapeError(
                    f"{who}: {where}: {part.name} is {matrix.shape}, and {part.shape} by the config"
                )
        arrays[name] = joined([(matrix.trits(), scale_columns(matrix)) for matrix in matrices])
    if packed:
        raise FormatError(f"{who}: {where}: {min(packed)} is packed, and no part of a model of this config")
    return arrays


def scale_columns(w: TernaryMatrix) -> Array:
    """Scale of each row, or of each block of a row: (N, 1) or (N, blocks)."""
    scale = whole_scale(w.codes, w.scale, w.shape, w.format)
    return np.broadcast_to(scale, (w.shape[0], 1)) if scale.ndim == 0 else scale.reshape(w.shape[0], -1)


def joined(parts: Sequence[tuple[Array, Array]]) -> TernaryMatrix:
    """Join the rows of parts, (trits, :func:`scale_columns`), in the format that the kernels read. The scale is one
    number, or one per row or block if they differ."""
    groups = max(scale.shape[1] for _, scale in parts)
    scale = np.concatenate([np.repeat(x, groups // x.shape[1], axis=1) for _, x in parts])
    if (scale == scale[:1, :1]).all():
        scale = scale[0, 0]
    elif (scale == scale[:, :1]).all():
        scale = scale[:, 0]
    return TernaryMatrix.from_trits(np.concatenate([trits for trits, _ in parts]), scale, format="w2")
