"""Quantised linear layers in folders of Hugging Face transformers, by ``quantization_config``.

gptq, awq             codes of 4 bits in words, a scale and a zero point per group of input features
bitsandbytes          NF4 and FP4 in blocks of 64 or more, with scales that may be nested; LLM.int8()
compressed-tensors    pack-quantized, int-quantized, float-quantized
fp8, fbgemm_fp8       e4m3 with scales per tensor, per row or per tile

Each layer becomes a :class:`PackedMatrix` with the same numbers. Its tensors are checked when it is found, and read
when it is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.safetensors import SafetensorsFile, StoredTensor
from gpu_ops.reference.weights.packed_bitsandbytes import DYNAMIC, PERIOD, nest
from gpu_ops.reference.weights.packed_formats import FORMATS, GROUPS, Fields

__all__ = ["METHODS", "QuantizedLayer", "quantized_layer"]

_FLOATS = ("F16", "BF16", "F32")
_MOST_STATE = 1 << 16  # bytes of the JSON of a layer of bitsandbytes
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
_INT8_FACTOR = np.float32(7.874015718698502e-3)  # 1 / 127 in bitsandbytes


class QuantizedLayer:
    """A linear layer (N, K) and the tensors of a folder that hold it.

    Attributes
    ----------
    tensors : set of str
        Names of the tensors that :meth:`read` needs, or that say nothing more about the weights.
    """

    def __init__(self, files: Mapping[str, SafetensorsFile], name: str, shape: tuple[int, int]) -> None:
        self._files, self.name, self.shape = files, name, shape
        self.tensors: set[str] = set()
        self._make: Callable[[], PackedMatrix] | None = None

    def read(self) -> PackedMatrix:
        """Read the weights. FormatError if their bytes are damaged."""
        assert self._make is not None
        return self._make()

    def has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self._files

    def stored(self, suffix: str, dtypes: tuple[str, ...] = (), *shapes: tuple[int, ...]) -> StoredTensor:
        """Entry of a tensor, checked. Any shape and dtype will do if none is listed."""
        name = f"{self.name}.{suffix}"
        if name not in self._files:
            raise FormatError(f"{self._what()}: there is no {suffix!r}")
        tensor: StoredTensor = self._files[name].tensors[name]
        if dtypes and tensor.dtype not in dtypes:
            raise FormatError(
                f"{self._what()}: {suffix} is {tensor.dtype[:80]}; expected {' or '.join(dtypes)}"
            )
        if shapes and tensor.shape not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ShapeError(f"{self._what()}: {suffix} has shape {tensor.shape}; expected {expected}")
        self.tensors.add(name)
        return tensor

    def skip(self, *suffixes: str) -> None:
        """Leave tensors unread: scales of activations, which stay floats here."""
        self.tensors |= {f"{self.name}.{suffix}" for suffix in suffixes if self.has(suffix)}

    def array(self, suffix: str) -> Array:
        name = f"{self.name}.{suffix}"
        return self._files[name].read(name)

    def numbers(self, suffix: str) -> Array:
        """Finite scales as float32."""
        numbers = self.array(suffix).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise FormatError(f"{self._what()}: {suffix} holds NaN or infinity")
        return numbers

    def damaged(self, why: str) -> FormatError:
        return FormatError(f"{self._what()}: {why}")

    def unsupported(self, why: str) -> OptionError:
        return OptionError(f"{self._what()}: {why}")

    def made_by(self, make: Callable[[], PackedMatrix]) -> QuantizedLayer:
        self._make = make
        return self

    def _what(self) -> str:
        file = next((file for name, file in self._files.items() if name.startswith(f"{self.name}.")), None)
        return f"{file.what}: {self.name}" if file is not None else self.name


def quantized_layer(
    files: Mapping[str, SafetensorsFile], name: str, shape: tuple[int, int], options: Mapping[str, Any]
) -> QuantizedLayer | None:
    """Find the quantised layer ``name`` of shape (N, K); None if the folder has no such layer, or one of floats.

    Parameters
    ----------
    options : mapping
        ``quantization_config`` with a ``quant_method`` of :data:`METHODS`.

    Raises
    ------
    FormatError, ShapeError, OptionError
        A tensor is missing or unlike the method's, or the layer has a feature that is not supported.
    """
    return METHODS[options["quant_method"]](QuantizedLayer(files, name, shape), options)


# ---- methods -----------------------------------------------------------------------------------------------


def _gptq(layer: QuantizedLayer, options: Mapping[str, Any]) -> QuantizedLayer | None:
    if not layer.has("qweight"):
        return None
    bits, (n, k) = options.get("bits"), layer.shape
    if bits not in (2, 3, 4, 8):
        raise layer.unsupported(f"quantization_config has bits={bits!r}; 2, 3, 4 and 8 are read")
    version = options.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise layer.unsupported(f"checkpoint_format is {version!r}; 'gptq' and 'gptq_v2' are read")
    if k * bits % 32 or n * bits % 32:
        raise layer.unsupported(f"shape {layer.shape}: codes of {bits} bits end within a word")
    group = _group_size(layer, options)
    groups = -(-k // group)
    layer.stored("qweight", ("I32",), (k * bits // 32, n))
    layer.stored("qzeros", ("I32",), (groups, n * bits // 32))
    layer.stored("scales", _FLOATS, (groups, n))
    reordered = layer.has("g_idx")
    if reordered:
        layer.stored("g_idx", ("I32",), (k,))

    def make() -> PackedMatrix:
        codes = _codes(layer.array("qweight"), bits).T
        zeros = _codes(layer.array("qzeros").T, bits)
        if version == "gptq":
            if (zeros == (1 << bits) - 1).any():
                raise layer.damaged(
                    f"a zero point is stored as {(1 << bits) - 1}, one less than it is: some readers take it for 0, "
                    "others for the next number"
                )
            zeros += 1
        scales = layer.numbers("scales").T
        return _grouped(layer, codes, scales, zeros, bits, group, layer.array("g_idx") if reordered else None)

    return layer.made_by(make)


def _awq(layer: QuantizedLayer, options: Mapping[str, Any]) -> QuantizedLayer | None:
    if not layer.has("qweight"):
        return None
    bits, version, (n, k) = options.get("bits"), options.get("version", "gemm"), layer.shape
    if bits != 4 or not isinstance(version, str) or version.lower() != "gemm" or n % 8:
        raise layer.unsupported(
            f"bits={bits!r}, version={version!r}, shape {layer.shape}; 4 bits of 'gemm' are read"
        )
    group = _group_size(layer, options)
    groups = -(-k // group)
    layer.stored("qweight", ("I32",), (k, n // 8))
    layer.stored("qzeros", ("I32",), (groups, n // 8))
    layer.stored("scales", _FLOATS, (groups, n))
    shifts = 4 * np.argsort(_AWQ_ORDER).astype(np.uint32)

    def codes(suffix: str) -> Array:
        words = layer.array(suffix).view(np.uint32)
        return (words[:, :, None] >> shifts & np.uint32(15)).astype(np.uint8).reshape(len(words), n).T

    def make() -> PackedMatrix:
        return _grouped(
            layer, codes("qweight"), layer.numbers("scales").T, codes("qzeros"), bits, group, None
        )

    return layer.made_by(make)


def _compressed(layer: QuantizedLayer, options: Mapping[str, Any]) -> QuantizedLayer | None:
    layer.skip("input_scale", "input_zero_point")
    if not layer.has("weight_packed"):
        return _with_scales(layer, options)
    n, k = layer.shape
    width = layer.stored("weight_packed", ("I32",)).shape[-1]
    bits = next((bits for bits in (2, 4, 8) if -(-k * bits // 32) == width), 0)
    if not bits:
        raise layer.unsupported(
            f"weight_packed has {width} words in a row; codes of 2, 4 and 8 bits are read"
        )
    layer.stored("weight_packed", ("I32",), (n, width))
    groups = _scale_groups(layer, "weight_scale")
    if layer.has("weight_shape"):
        layer.stored("weight_shape", ("I64", "I32"), (2,))
    has_zeros, reordered = layer.has("weight_zero_point"), layer.has("weight_g_idx")
    if has_zeros:
        layer.stored("weight_zero_point", ("I32",), (-(-n * bits // 32), groups))
    if reordered:
        layer.stored("weight_g_idx", ("I32",), (k,))

    def make() -> PackedMatrix:
        if layer.has("weight_shape") and tuple(layer.array("weight_shape")) != layer.shape:
            raise layer.damaged(
                f"weight_shape is {layer.array('weight_shape')}, and {layer.shape} by the config"
            )
        codes = _codes(layer.array("weight_packed").T, bits)[:k].T
        zeros = _codes(layer.array("weight_zero_point"), bits)[:n] if has_zeros else None
        order = layer.array("weight_g_idx") if reordered else None
        if order is not None and (order == -1).all():
            order = None
        scales = np.broadcast_to(layer.numbers("weight_scale").reshape(-1, groups), (n, groups))
        return _grouped(layer, codes, scales, zeros, bits, -(-k // groups), order)

    return layer.made_by(make)


def _with_scales(layer: QuantizedLayer, options: Mapping[str, Any]) -> QuantizedLayer | None:
    """A layer whose ``weight`` has a number per byte."""
    suffix = next((name for name in ("weight_scale", "weight_scale_inv") if layer.has(name)), None)
    if suffix is None or layer.stored("weight").dtype in _FLOATS:
        return None
    layer.skip("input_scale", "activation_scale", "input_scale_ub")
    is_float = layer.stored("weight", ("F8_E4M3", "I8"), layer.shape).dtype == "F8_E4M3"
    (n, k), tile = layer.shape, options.get("weight_block_size")
    stored = layer.stored(suffix, _FLOATS).shape
    if tile is not None and len(stored) == 2:
        height, width = _tile(layer, tile)
        layer.stored(suffix, _FLOATS, (-(-n // height), -(-k // width)))
    else:
        height, width = 1, -(-k // _scale_groups(layer, suffix))
    has_zeros = layer.has("weight_zero_point")
    if has_zeros:
        if is_float:
            raise layer.unsupported("weight_zero_point of 8-bit floats")
        layer.stored("weight_zero_point", ("I8",), stored)

    def rows(numbers: Array) -> Array:
        return np.broadcast_to(
            np.repeat(numbers.reshape(-1, -(-k // width)), height, axis=0)[:n], (n, -(-k // width))
        )

    def make() -> PackedMatrix:
        codes, scales = layer.array("weight").view(np.uint8), rows(layer.numbers(suffix))
        if is_float:
            return _packed(layer, "e4m3", codes, scales, None, width, None)
        zeros = rows(layer.array("weight_zero_point").view(np.uint8) ^ np.uint8(128)) if has_zeros else None
        return _grouped(layer, codes ^ np.uint8(128), scales, zeros, 8, width, None)

    return layer.made_by(make)


def _bitsandbytes(layer: QuantizedLayer, options: Mapping[str, Any]) -> QuantizedLayer | None:
    if layer.has("SCB"):
        return _int8(layer)
    codes_type = next(
        (name for name in ("nf4", "fp4") if layer.has(f"weight.quant_state.bitsandbytes__{name}")), None
    )
    if codes_type is None:
        return None
    (n, k), format = layer.shape, FORMATS[codes_type]
    state = layer.stored(f"weight.quant_state.bitsandbytes__{codes_type}", ("U8",))
    if len(state.shape) != 1 or state.size > _MOST_STATE:
        raise layer.damaged(f"its quant_state has {state.size} bytes; at most {_MOST_STATE} are read")
    if k % format.block:
        raise layer.unsupported(f"{k} input features: blocks of {format.block} would run across rows")
    fields = _state(layer, codes_type)
    block, nested = fields["blocksize"], fields.get("nested_blocksize")
    if layer.stored("weight").size != n * k // 2:
        raise layer.damaged(f"weight has {layer.stored('weight').size} bytes; expected {n * k // 2}")
    count = -(-n * k // block)
    layer.stored("weight.quant_map", ("F32",), (16,))
    layer.stored("weight.absmax", ("F32",) if nested is None else ("U8",), (count,))
    if nested is not None:
        layer.stored("weight.nested_absmax", ("F32",), (-(-count // nested),))
        layer.stored("weight.nested_quant_map", ("F32",), (256,))

    def make() -> PackedMatrix:
        if not np.array_equal(layer.array("weight.quant_map"), np.array(format.values, np.float32)):
            raise layer.damaged(f"quant_map has other numbers than {codes_type}")
        size, repeats = n * k // format.block, block // format.block
        codes = layer.array("weight").reshape(-1).view(np.uint8).reshape(size, -1)
        if nested is None:
            absmax = layer.numbers("weight.absmax")
        else:
            factors, offset = layer.numbers("weight.nested_absmax"), np.float32(fields["nested_offset"])
            values, steps = layer.numbers("weight.nested_quant_map"), layer.array("weight.absmax")
            periods, rest = divmod(nested * repeats, PERIOD)
            nest_format = FORMATS[f"{codes_type}_nested"].for_columns(k)
            is_smaller = nest_format.bits_per_weight < format.bits_per_weight
            if is_smaller and not rest and np.array_equal(values, DYNAMIC):
                factors, steps = np.repeat(factors, periods), np.repeat(steps, repeats)[:size]
                nested_blocks = nest(nest_format.block, codes, steps, factors, offset)
                return PackedMatrix(nested_blocks.reshape(n, -1), layer.shape, nest_format.name)
            # short blocks, another map, or factors of fewer scales: multiplied out, the same weights
            absmax = values[steps] * np.repeat(factors, nested)[:count] + offset
        scale = np.repeat(absmax, repeats)[:size]
        blocks = np.hstack([scale[:, None].astype("<f4").view(np.uint8), codes])
        return PackedMatrix(blocks.reshape(n, -1), layer.shape, codes_type)

    return layer.made_by(make)


def _int8(layer: QuantizedLayer) -> QuantizedLayer:
    """LLM.int8(): a scale per row."""
    n, k = layer.shape
    layer.stored("weight", ("I8",), layer.shape)
    layer.stored("SCB", ("F32",), (n,))
    if layer.has("weight_format"):
        layer.stored("weight_format", ("U8", "I8"), (), (1,))

    def make() -> PackedMatrix:
        if layer.has("weight_format") and layer.array("weight_format").any():
            raise layer.unsupported("weight_format is of tiles; rows are read")
        codes = layer.array("weight").view(np.uint8) ^ np.uint8(128)
        return _grouped(layer, codes, layer.numbers("SCB")[:, None] * _INT8_FACTOR, None, 8, k, None)

    return layer.made_by(make)


METHODS: dict[str, Callable[[QuantizedLayer, Mapping[str, Any]], QuantizedLayer | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _with_scales,
    "fbgemm_fp8": _with_scales,
}
"""Readers by ``quant_method``."""


# ---- parts of methods --------------------------------------------------------------------------------------


def _group_size(layer: QuantizedLayer, options: Mapping[str, Any]) -> int:
    size = options.get("group_size", 128)
    if size == -1:
        return max(1, layer.shape[1])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise layer.unsupported(f"quantization_config has group_size={size!r}")
    return size


def _scale_groups(layer: QuantizedLayer, suffix: str) -> int:
    """Number of scales of a row."""
    n, k = layer.shape
    shape = layer.stored(suffix, _FLOATS).shape
    if math.prod(shape) == 1 or shape in ((n,), (n, 1)):
        return 1
    if len(shape) == 2 and shape[0] == n and 0 < shape[1] <= k and k % shape[1] == 0:
        return shape[1]
    raise ShapeError(
        f"{layer.name}: {suffix} has shape {shape}; expected one scale, ({n},), ({n}, 1) or ({n}, groups of {k})"
    )


def _tile(layer: QuantizedLayer, tile: Any) -> tuple[int, int]:
    try:
        height, width = tile
        if not (isinstance(height, int) and isinstance(width, int) and min(height, width) > 0):
            raise ValueError
    except (TypeError, ValueError):
        raise layer.unsupported(f"quantization_config has weight_block_size={tile!r:.80}") from None
    return height, width


def _state(layer: QuantizedLayer, codes_type: str) -> dict[str, Any]:
    """Entries of bitsandbytes' quant_state, checked."""
    try:
        state = json.loads(layer.array(f"weight.quant_state.bitsandbytes__{codes_type}").tobytes())
        block, nested = state["blocksize"], state.get("nested_blocksize")
        if tuple(state["shape"]) != layer.shape:
            raise ValueError(f"shape {state['shape']}, and {layer.shape} by the config")
        for size in (block, nested):
            if size is not None and not (isinstance(size, int) and 0 < size <= 1 << 20):
                raise ValueError(f"blocks of {size!r:.80}")
        if nested is not None and not abs(state["nested_offset"]) <= float(np.finfo(np.float32).max):
            raise ValueError("an offset that is not a finite float32")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise layer.damaged(f"its quant_state is damaged: {error}") from error
    if block % FORMATS[codes_type].block:
        raise layer.unsupported(f"blocks of {block}; multiples of {FORMATS[codes_type].block} are read")
    return dict(state)


def _codes(words: Array, bits: int) -> Array:
    """Codes of ``bits`` bits along the first axis: (words, N) to (codes, N), uint8; the lowest bits come first."""
    words = np.ascontiguousarray(words).view(np.uint32)
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
        return (
            (words[:, None] >> shifts & np.uint32((1 << bits) - 1))
            .astype(np.uint8)
            .reshape(-1, words.shape[1])
        )
    stream = np.unpackbits(words.T.copy().view(np.uint8), axis=1, bitorder="little")
    fields = stream.reshape(len(stream), -1, bits)
    return np.asarray(np.packbits(fields, axis=2, bitorder="little")[:, :, 0].T)


def _grouped(
    layer: QuantizedLayer,
    codes: Array,
    scales: Array,
    zeros: Array | None,
    bits: int,
    group: int,
    group_index: Array | None,
) -> PackedMatrix:
    """Matrix of integer codes (N, K), scales and zero points (N, groups). ``group_index``: group of each column."""
    half = 1 << (bits - 1)
    columns = None
    if group_index is not None:
        columns = np.argsort(group_index, kind="stable")
        if not np.array_equal(group_index[columns], np.arange(len(columns)) // group):
            raise layer.damaged(
                f"its group indices are not {-(-len(columns) // group)} groups of {group} columns"
            )
        if np.array_equal(columns, np.arange(len(columns))):
            columns = None
        else:
            codes = codes[:, columns]
    stored = "8" if bits == 8 else "4"
    if zeros is None or (zeros == half).all():
        if bits < 4:
            codes = codes + np.uint8(8 - half)
        return _packed(layer, f"int{stored}", codes, scales, None, group, columns)
    return _packed(layer, f"uint{stored}", codes, scales, zeros, group, columns)


def _packed(
    layer: QuantizedLayer,
    family: str,
    codes: Array,
    scales: Array,
    zeros: Array | None,
    group: int,
    columns: Array | None,
) -> PackedMatrix:
    """Matrix in the group format of the largest size that fits the groups."""
    n, k = layer.shape
    size = next((size for size in GROUPS if k % size == 0 and (group % size == 0 or group >= k)), None)
    if size is None:
        raise layer.unsupported(
            f"groups of {group} of {k} input features; multiples of {GROUPS[-1]} are read"
        )
    format = FORMATS[f"{family}_g{size}"]
    of_block = np.arange(k // size) * size // group

    def by_block(x: Array) -> Array:
        return np.ascontiguousarray(x[:, of_block]).reshape(-1, 1)

    zero = None if zeros is None else by_block(zeros)
    fields = Fields(np.ascontiguousarray(codes).reshape(-1, size), by_block(scales), run_minimums=zero)
    return PackedMatrix(format.join(fields).reshape(n, -1), layer.shape, format.name, columns=columns)
