"""A ternary matrix in a separate file: a safetensors file whose metadata has the shape and the format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import one_of
from gpu_ops.errors import FormatError, GpuOpsError
from gpu_ops.formats.files import opened, path_of, write_file
from gpu_ops.formats.safetensors import SafetensorsFile, header_of
from gpu_ops.formats.ternary_checks import check_scale, matrix_shape, unpack
from gpu_ops.reference.weights.ternary_formats import FORMATS

__all__ = ["load_parts", "save_parts"]

_KIND, _FORMAT, _SHAPE = "gpu_ops.kind", "gpu_ops.format", "gpu_ops.shape"
_MATRIX = "TernaryMatrix 1"  # with the version of this layout


def save_parts(path: Any, codes: Array, scale: Array, shape: tuple[int, int], format: str) -> None:
    op = "TernaryMatrix.save"
    target = path_of(op, path)
    metadata = {_KIND: _MATRIX, _FORMAT: format, _SHAPE: json.dumps(shape)}
    tensors = {"scale": ("F32", scale.shape), "codes": ("U8", codes.shape)}  # in this order both are aligned
    data = [array.reshape(-1).view(np.uint8) for array in (scale, codes)]
    write_file(op, target, [header_of(tensors, metadata), *data])


def load_parts(path: Any) -> tuple[Array, Array, tuple[int, int], str]:
    """Read codes, scale, shape and format, and check them."""
    op = "TernaryMatrix.load"
    where = path_of(op, path)
    with opened(op, where) as file:
        contents = SafetensorsFile(op, where, file)
        metadata, dtypes = contents.metadata, {name: t.dtype for name, t in contents.tensors.items()}
        if metadata.get(_KIND) != _MATRIX or dtypes != {"scale": "F32", "codes": "U8"}:
            raise FormatError(
                f"{op}: {where} is no file of TernaryMatrix.save: its {_KIND!r} is {metadata.get(_KIND)!r:.80}; "
                f"expected {_MATRIX!r}, and the tensors 'scale' and 'codes'"
            )
        codes, scale = contents.read("codes"), contents.read("scale")
    try:
        format = one_of(op, _FORMAT, metadata.get(_FORMAT), FORMATS)
        shape = matrix_shape(op, json.loads(metadata.get(_SHAPE, "")))
        if codes.shape != FORMATS[format].packed_shape(shape):
            raise ValueError(f"codes have the shape {codes.shape}, which {format} does not take for {shape}")
        unpack(op, codes, shape, FORMATS[format], strict=True)
        scale = check_scale(scale, shape)
    except (GpuOpsError, ValueError, RecursionError) as error:
        raise FormatError(f"{op}: {where}: {error}") from error
    return codes, scale, shape, format
