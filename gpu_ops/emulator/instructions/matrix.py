"""Tensor-core products (``mma.sync``) and the instructions that move their fragments.

One rule lays out every fragment. Lane ``L`` is in group ``g = L / 4`` at place ``t = L % 4``, and a register holds
``E`` neighbouring elements of a row. In matrices of whole registers ("words"),

* register r of A is at row ``g + 8 (r % (M/8))``, word ``t + 4 (r / (M/8))``; register r of B, transposed, is at row
  ``n = g``, word ``t + 4 r``; the same holds for 64-bit registers (f64);
* C and D of 32- or 64-bit elements have two registers per pair of columns: element ``r % 2`` of word ``t`` in row
  ``g + 8 (r / 2)``; of f16 they have one word per pair, register r in row ``g + 8 r``. The registers of the next 8
  columns follow (wmma).

Gathering a matrix therefore copies each register into one strided block. The bytes are then the matrix in row-major
order, whatever its element type. Products are exact in float64, are summed there with C, and are rounded once to D:
``tensor_cores="exact"``. Silicon is coarser. ``"truncate"`` adds as A100 and H100 do: see :func:`_add_truncated`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from gpu_ops.emulator.instructions import unknown
from gpu_ops.emulator.syntax import Array

Multiply = Callable[[Array, Array, Array, bool], Array]
Registers = tuple[int, str]  # the number of registers, and the PTX type of one


@dataclass(frozen=True)
class Mma:
    """One form of mma.sync.

    ``run(a, b, c, truncating=False)`` takes and returns lists of registers, each ``[W, 32]`` bits.
    """

    a: Registers
    b: Registers
    c: Registers
    d: Registers
    macs: int  # multiply-adds per warp instruction
    kind: str  # peak that it counts against: f64, tf32, f16, bf16, f8, s8, s4, b1
    run: Callable[..., list[Array]]


def _table(dtype: type) -> Callable[[Array], Array]:
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return lambda words: values[words.view(np.uint8)]


def _nibbles(words: Array, dtype: type) -> Array:
    """Unpack 4-bit elements to float32, the low nibble of a byte first."""
    octets = words.view(np.uint8)
    pairs: Array = np.stack([octets << 4, octets & 0xF0], axis=-1).view(dtype)
    return (pairs >> 4).reshape(*octets.shape[:-1], -1).astype(np.float32)


def _bf16(words: Array) -> Array:
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


#: Element type -> function from a matrix of words ``[..., n]`` to its values ``[..., n E]``. Sums of products of the
#: integers are below 2^24, so float32 holds them exactly.
DECODE: dict[str, Callable[[Array], Array]] = {
    "f64": lambda words: words.view(np.float64),
    "tf32": lambda words: (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64),
    "f16": lambda words: words.view(np.float16).astype(np.float64),
    "bf16": _bf16,
    "e4m3": _table(ml_dtypes.float8_e4m3fn),
    "e5m2": _table(ml_dtypes.float8_e5m2),
    "s8": lambda words: words.view(np.int8).astype(np.float32),
    "u8": lambda words: words.view(np.uint8).astype(np.float32),
    "s4": lambda words: _nibbles(words, np.int8),
    "u4": lambda words: _nibbles(words, np.uint8),
    "b1": lambda words: np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(np.float32),
}

_WIDTHS = {64: "f64", 32: "tf32", 16: "f16 bf16", 8: "e4m3 e5m2 s8 u8", 4: "s4 u4", 1: "b1"}
#: Bits of an element in a register: a tf32 is a float32 whose low bits are ignored.
ELEMENT_BITS = {name: width for width, names in _WIDTHS.items() for name in names.split()}

_WIDE = {"f64": np.float64, "f32": np.float32, "s32": np.int32}  # one element of C per register
ACCUMULATORS = {**_WIDE, "f16": np.float16}

_CHUNK = 1 << 14  # elements of A at a time, so that their float64 values stay in the L2 cache

_FLOAT8, _INT8, _INT4 = ("e4m3", "e5m2"), ("s8", "u8"), ("s4", "u4")
# (types that A and B may mix, types of C and D, kind, shapes)
_FORMS: tuple[tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("f16",), ("f32", "f16"), "f16", ("m16n8k8", "m16n8k16")),
    (("bf16",), ("f32",), "bf16", ("m16n8k8", "m16n8k16")),
    (("tf32",), ("f32",), "tf32", ("m16n8k4", "m16n8k8")),
    (("f64",), ("f64",), "f64", ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    (_FLOAT8, ("f32", "f16"), "f8", ("m16n8k16", "m16n8k32")),
    (_INT8, ("s32",), "s8", ("m8n8k16", "m16n8k16", "m16n8k32")),
    (_INT4, ("s32",), "s4", ("m8n8k32", "m16n8k32", "m16n8k64")),
    (("b1",), ("s32",), "b1", ("m8n8k128", "m16n8k128", "m16n8k256")),
)


def gather(registers: Sequence[Array], rows: int) -> Array:
    """Words ``[W, rows, n]`` of an operand from its registers (B: transposed, ``rows`` = 8)."""
    groups = rows // 8
    warps = registers[0].shape[0]
    words = np.empty((warps, groups, 8, len(registers) // groups, 4), registers[0].dtype)
    for r, register in enumerate(registers):
        words[:, r % groups, :, r // groups] = register.reshape(warps, 8, 4)
    return words.reshape(warps, rows, -1)


def _accumulate(a: Array, b: Array, c: Array, saturate: bool = False) -> Array:
    """Compute ``a @ b + c`` in the dtype of ``c``: one rounding of the exact sum, or integers that wrap around."""
    products = a @ b
    if c.dtype != np.int32:
        products += c
        return products.astype(c.dtype)
    if not saturate:
        return products.astype(np.int32) + c
    limits = np.iinfo(np.int32)
    return np.clip(products.astype(np.int64) + c, limits.min, limits.max).astype(np.int32)


#: Products that one adder takes at a time, and the bits that it keeps at and below the largest addend's leading one.
#: Fasi et al. 2021 (A100: 8 products of 16-bit numbers, 4 of tf32); float8 as measured on H100.
_ADDERS = {"f16": (8, 25), "bf16": (8, 25), "tf32": (4, 25), "f8": (32, 14)}


def _add_truncated(kind: str) -> Multiply | None:
    """Function ``a @ b + c`` that adds as the tensor cores of A100 and H100 do, for kinds that they truncate.

    The exact products and c are aligned to the largest of them, cut to the adder's bits towards zero, and summed
    exactly. The sum is cut to float32, or rounded to float16. Adders run one after the other along k.
    """
    if kind not in _ADDERS:
        return None
    width, kept = _ADDERS[kind]

    def run(a: Array, b: Array, c: Array, saturate: bool) -> Array:
        total = c.astype(np.float64)
        for first in range(0, a.shape[2], width):
            along = slice(first, first + width)
            addends = a[:, :, along, None] * b[:, None, along, :]
            addends = np.concatenate([addends, total[:, :, None, :]], axis=2)
            largest = np.abs(addends).max(axis=2)
            cut = _cut(addends, np.frexp(largest)[1][:, :, None, :] - kept).sum(axis=2)
            total = np.where(np.isfinite(largest), cut, addends.sum(axis=2))
            if c.dtype == np.float32:
                total = _cut(total, np.maximum(np.frexp(total)[1] - 24, -149))
        return total.astype(c.dtype)

    return run


def _cut(x: Array, exponent: Array) -> Array:
    """Cut to multiples of 2^exponent, towards zero."""
    cut: Array = np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent)
    return cut


def multiplies(kind: str, combine: str | None) -> tuple[Multiply, Multiply]:
    """Functions ``a @ b + c`` for this kind: with exact sums, and with the sums of truncating tensor cores."""
    exact = _bit_products(combine) if combine else _accumulate
    return exact, _add_truncated(kind) or exact


def _bit_products(combine: str) -> Multiply:
    """Function that adds to c the sum over k of ``a and b`` or ``a xor b``, for matrices of zeros and ones."""
    if combine == "and":
        return _accumulate

    def run(a: Array, b: Array, c: Array, saturate: bool) -> Array:
        either = a.sum(-1)[..., None] + b.sum(-2)[..., None, :]
        return _accumulate(-2 * a, b, either.astype(np.int32) + c)

    return run


def accumulator(registers: Sequence[Array], rows: int, dtype: type) -> Array:
    """Matrix ``[W, rows, n]`` that the registers of C hold."""
    if dtype is np.float16:
        return gather(registers, rows).view(dtype)
    warps, groups = registers[0].shape[0], rows // 8
    words = np.empty((warps, groups, 8, len(registers) // (2 * groups), 4, 2), registers[0].dtype)
    for r, register in enumerate(registers):
        words[:, r // 2 % groups, :, r // 2 // groups, :, r % 2] = register.reshape(warps, 8, 4)
    return words.reshape(warps, rows, -1).view(dtype)


def scatter(matrix: Array, bits: type) -> Array:
    """Registers of D, ``[count, W, 32]``: the inverse of :func:`accumulator`."""
    warps, rows, columns = matrix.shape
    words: Array = matrix.view(bits).reshape(warps, rows // 8, 8, columns // 8, 4, -1)
    return words.transpose(3, 1, 5, 0, 2, 4).reshape(-1, warps, 32)


_NAME = re.compile(
    r"sync\.aligned\.(?P<shape>\w+)\.row\.col(?P<satfinite>\.satfinite)?"
    r"\.(?P<d>\w+)\.(?P<a>\w+)\.(?P<b>\w+)\.(?P<c>\w+)(\.(?P<combine>and|xor)\.popc)?"
)


def _kind(shape: str, a_type: str, b_type: str, c_type: str) -> str | None:
    for operands, accumulators, peak, shapes in _FORMS:
        if shape in shapes and a_type in operands and b_type in operands and c_type in accumulators:
            return peak
    return None


@cache
def mma(modifiers: tuple[str, ...]) -> Mma:
    """Form with these modifiers, for instance sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32."""
    match = _NAME.fullmatch(".".join(modifiers))
    if not match:
        raise unknown("mma", modifiers)
    saturate, combine = bool(match["satfinite"]), match["combine"]
    a_type, b_type, c_type, d_type = match["a"], match["b"], match["c"], match["d"]
    peak = _kind(match["shape"], a_type, b_type, c_type)
    fits = c_type == d_type and bool(combine) == (peak == "b1") and (not saturate or peak in ("s8", "s4"))
    if peak is None or not fits:
        raise unknown("mma", modifiers)

    m, n, k = (int(size) for size in re.findall(r"\d+", match["shape"]))
    decode_a, decode_b, dtype = DECODE[a_type], DECODE[b_type], ACCUMULATORS[c_type]
    word_bits, bits = (64, np.uint64) if peak == "f64" else (32, np.uint32)
    step = _CHUNK // (m * k)
    ways = multiplies(peak, combine)

    def run(
        a: Sequence[Array], b: Sequence[Array], c: Sequence[Array], truncating: bool = False
    ) -> list[Array]:
        multiply = ways[truncating]
        d = np.empty((len(c), *c[0].shape), bits)
        for start in range(0, len(c[0]), step):
            warps = slice(start, start + step)
            left = decode_a(gather([register[warps] for register in a], m))
            right = decode_b(gather([register[warps] for register in b], n)).swapaxes(1, 2)
            addend = accumulator([register[warps] for register in c], m, dtype)
            d[:, warps] = scatter(multiply(left, right, addend, saturate), bits)
        return list(d)

    word = "f64" if peak == "f64" else "b32"
    words = k * ELEMENT_BITS[a_type] // (4 * word_bits)  # words of a row of A that one lane holds
    result = (m // 8, "b32") if c_type == "f16" else (m // 4, c_type)
    return Mma((words * m // 8, word), (words, word), result, result, m * n * k, peak, run)


def _matrices(rows: Array, height: int) -> Array:
    """Rows ``[W, height N, 16]`` of bytes as N matrices per warp."""
    return rows.reshape(rows.shape[0], -1, height, 16)


def load_fragments(rows: Array, transposed: bool) -> list[Array]:
    """Load for ldmatrix.m8n8.b16: uint8 ``[W, 8 N, 16]``, row i from the address of lane i, to N registers."""
    elements = _matrices(rows, 8).view(np.uint16)  # [W, N, 8, 8]
    if transposed:
        elements = elements.swapaxes(2, 3)
    words = elements.swapaxes(0, 1).copy().view(np.uint32)
    return list(words.reshape(words.shape[0], -1, 32))


def store_fragments(registers: Sequence[Array], transposed: bool) -> Array:
    """Store for stmatrix.m8n8.b16, the inverse of :func:`load_fragments`."""
    elements = np.stack(registers, axis=1).view(np.uint16).reshape(-1, len(registers), 8, 8)
    if transposed:
        elements = elements.swapaxes(2, 3).copy()
    return elements.view(np.uint8).reshape(-1, 8 * len(registers), 16)


def movmatrix(register: Array) -> Array:
    """Fragment of the transposed matrix, for movmatrix.m8n8.trans.b16."""
    return load_fragments(store_fragments([register], False), True)[0]


def load_fragments_b8(rows: Array) -> list[Array]:
    """Load for ldmatrix.m16n16.trans.b8: uint8 ``[W, 16 N, 16]`` to 2 N registers.

    Byte b of register q holds row ``4 t + b`` and column ``g + 8 q``: the B fragment of half q.
    """
    columns = _matrices(rows, 16).reshape(rows.shape[0], -1, 16, 2, 8)
    words = columns.transpose(1, 3, 0, 4, 2).copy().view(np.uint32)  # [N, q, W, g, 4 t + b] as words
    return list(words.reshape(-1, rows.shape[0], 32))


def store_fragments_b8(registers: Sequence[Array]) -> Array:
    """Store for stmatrix.m16n8.trans.b8: N registers to uint8 ``[W, 8 N, 16]``.

    Byte e of a register goes to row ``2 t + e % 2`` and column ``g + 8 (e / 2)`` of its matrix.
    """
    octets = np.stack(registers, axis=1).view(np.uint8).reshape(-1, len(registers), 8, 4, 2, 2)
    return octets.transpose(0, 1, 3, 5, 4, 2).reshape(-1, 8 * len(registers), 16)


# Products of tiles whose fragments have no documented layout (``wmma``).
#
# The layout here is that of ``mma.sync`` (above), extended to 16 and 32 rows and columns; element i of an f16
# and an f32 accumulator are at the same place. Fragments of f16 have 8 registers even if fewer hold the tile:
# those are then repeated.

_TILES = ("m16n16k16", "m8n32k16", "m32n8k16")
# Shapes by the type of A and B, and the types of C and D.
_SHAPES = {
    "f16": (_TILES, ("f16", "f32")),
    "bf16": (_TILES, ("f32",)),
    "s8": (_TILES, ("s32",)),
    "u8": (_TILES, ("s32",)),
    "tf32": (("m16n16k8",), ("f32",)),
    "f64": (("m8n8k4",), ("f64",)),
    "s4": (("m8n8k32",), ("s32",)),
    "u4": (("m8n8k32",), ("s32",)),
    "b1": (("m8n8k128",), ("s32",)),
}
_LANE = np.arange(32)


@dataclass(frozen=True)
class Fragment:
    """Layout of a tile of ``rows`` x ``columns`` elements in a warp; B is transposed, so its rows are those of n.

    ``word`` is the bytes of a register. Of ``registers``, the first ``count`` hold the tile.
    """

    operand: str
    rows: int
    columns: int
    bits: int
    word: int
    registers: int
    pairs: bool = False  # two registers per pair of columns: accumulators of 32 and 64 bits

    @property
    def per_word(self) -> int:
        return 8 * self.word // self.bits

    @property
    def count(self) -> int:
        return self.rows * self.columns // (32 * self.per_word)

    def place(self, register: int) -> tuple[Array, Array]:
        """Row and first column of each lane's part of a register."""
        groups = self.rows // 8
        row, t = _LANE // 4, _LANE % 4
        if self.pairs:
            pair = register // 2
            return 8 * (pair % groups) + row, 8 * (pair // groups) + 2 * t + register % 2
        return 8 * (register % groups) + row, self.per_word * (4 * (register // groups) + t)

    def is_along(self, layout: str) -> bool:
        """Whether the elements of a register are neighbours in memory."""
        return layout == ("col" if self.operand == "b" else "row")

    def leading(self, layout: str) -> int:
        """Default distance of rows (columns) in memory, in elements."""
        return self.columns if self.is_along(layout) else self.rows


@cache
def fragment(operand: str, shape: str, ptx_type: str) -> Fragment:
    """Fragment of operand a, b, c or d with elements of a type."""
    sizes = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape)
    known = any(
        shape in shapes and ptx_type in ((name,) if operand in "ab" else results)
        for name, (shapes, results) in _SHAPES.items()
    )
    if sizes is None or not known:
        raise unknown("wmma", (operand, shape, ptx_type))
    m, n, k = (int(size) for size in sizes.groups())
    inputs = operand in "ab"
    bits = ELEMENT_BITS[ptx_type] if inputs else 8 * np.dtype(ACCUMULATORS[ptx_type]).itemsize
    rows, columns, word = n if operand == "b" else m, k if inputs else n, max(4, bits // 8)
    registers = 8 if inputs and ptx_type == "f16" else rows * columns * bits // (8 * word * 32)
    return Fragment(operand, rows, columns, bits, word, registers, not inputs and bits >= 32)


_WMMA_NAME = re.compile(
    r"mma\.(?:(?P<combine>and|xor)\.popc\.)?sync\.aligned\.(?:row|col)\.(?:row|col)\.(?P<shape>\w+)"
    r"\.(?P<d>\w+)(?:\.(?P<a>\w+)\.(?P<b>\w+))?\.(?P<c>f16|f32|f64|s32)(?P<satfinite>\.satfinite)?(?:\.r[nzmp])?"
)


@cache
def wmma_mma(modifiers: tuple[str, ...]) -> Mma:
    """Product with these modifiers, such as mma.sync.aligned.row.col.m16n16k16.f32.f32."""
    match = _WMMA_NAME.fullmatch(".".join(modifiers))
    if match is None:
        raise unknown("wmma", modifiers)
    a_type, b_type = match["a"] or "f16", match["b"] or "f16"
    shape, combine = match["shape"], match["combine"]
    shapes, results = _SHAPES.get(a_type, ((), ()))
    exists = a_type == b_type and shape in shapes and {match["c"], match["d"]} <= set(results)
    if not exists or bool(combine) != (a_type == "b1"):
        raise unknown("wmma", modifiers)
    a, b = fragment("a", shape, a_type), fragment("b", shape, b_type)
    c, d = fragment("c", shape, match["c"]), fragment("d", shape, match["d"])
    saturate, bits = bool(match["satfinite"]), (np.uint64 if d.word == 8 else np.uint32)
    c_dtype, d_dtype = ACCUMULATORS[match["c"]], ACCUMULATORS[match["d"]]
    peak = {"u8": "s8", "u4": "s4"}.get(a_type, a_type)
    ways = multiplies(peak, combine)

    def run(
        left: Sequence[Array], right: Sequence[Array], addend: Sequence[Array], truncating: bool = False
    ) -> list[Array]:
        multiply = ways[truncating]
        x = DECODE[a_type](gather(left[: a.count], a.rows))
        y = DECODE[b_type](gather(right[: b.count], b.rows)).swapaxes(1, 2)
        z = accumulator(addend, c.rows, c_dtype)
        if c_dtype is d_dtype:
            return list(scatter(multiply(x, y, z, saturate), bits))
        wide_addend = z.astype(np.float32 if truncating else np.float64)  # one is f16, the other f32
        return list(scatter(multiply(x, y, wide_addend, saturate).astype(d_dtype), bits))

    word = "b64" if a.word == 8 else "b32"
    return Mma(
        (a.registers, word),
        (b.registers, word),
        (c.registers, "b64" if c.word == 8 else "b32"),
        (d.registers, "b64" if d.word == 8 else "b32"),
        a.rows * b.rows * a.columns,
        peak,
        run,
    )
