"""Numbers of packed weights in vectors: floats, scales and values of codes as float32, a row per lane."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.common.cpu.codegen import build
from gpu_ops.kernels.common.cpu.codegen.build import call, load_vector, number
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, ir
from gpu_ops.kernels.common.cpu.codegen.target import CONVERTS_FLOAT16
from gpu_ops.kernels.weights.cpu.ternary_ir import INT, LANES, every
from gpu_ops.kernels.weights.packed_panels import BlockLayout

FLOAT = ir.VectorType(ir.FloatType(), LANES)
BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_I8, _I16 = ir.IntType(8), ir.IntType(16)


def half(b: Any, pointer: Any) -> Any:
    """float16 in memory as float32."""
    return _half_values(b, b.zext(load_vector(b, pointer, ir.VectorType(_I16, LANES)), INT))


def _half_values(b: Any, bits: Any) -> Any:
    """float16 in 32-bit lanes as float32."""
    if CONVERTS_FLOAT16:
        half = ir.VectorType(ir.HalfType(), LANES)
        return b.fpext(b.bitcast(b.trunc(bits, ir.VectorType(_I16, LANES)), half), FLOAT)
    magnitude = b.shl(b.and_(bits, every(0x7FFF)), every(13))
    # the exponent's bias grows by 112, of denormal numbers too; infinity and NaN keep the largest exponent
    scaled = b.bitcast(b.fmul(b.bitcast(magnitude, FLOAT), build.every(FLOAT, 2.0**112)), INT)
    special = b.icmp_unsigned(">=", magnitude, every(0x7C00 << 13))
    finite = b.select(special, b.or_(magnitude, every(0x7F800000)), scaled)
    return b.bitcast(b.or_(finite, b.shl(b.and_(bits, every(0x8000)), every(16))), FLOAT)


def power_of_two(b: Any, pointer: Any) -> Any:
    """2^(e - 128) of a byte e."""
    exponent = b.zext(load_vector(b, pointer, ir.VectorType(_I8, LANES)), INT)
    normal = b.shl(b.sub(exponent, every(1)), every(23))
    denormal = b.shl(every(1 << 21), exponent)  # of e 0 and 1
    return b.bitcast(b.select(b.icmp_unsigned("<", exponent, every(2)), denormal, normal), FLOAT)


def looked_up(b: Any, values: bytes, pointer: Any) -> Any:
    """float32 ``values`` of the codes in memory, a byte per lane."""
    table = ir.ArrayType(ir.FloatType(), len(values) // 4)
    data = cgutils.global_constant(
        b.module, "scale_values", ir.Constant(table, list(struct.unpack(f"<{len(values) // 4}f", values)))
    )
    result = ir.Constant(FLOAT, ir.Undefined)
    for lane in range(LANES):
        code = b.zext(b.load(b.gep(pointer, [number(lane)])), ir.IntType(64))
        value = b.load(b.gep(data, [number(0), code], inbounds=True))
        result = b.insert_element(result, value, ir.Constant(ir.IntType(32), lane))
    return result


def plain_values(b: Any, layout: BlockLayout, lanes: Any) -> list[Any]:
    """Floats in 32-bit lanes, one or two of each, as float32."""
    if layout.bits == 32:
        return [b.bitcast(lanes, FLOAT)]
    if layout.name == "bfloat16":
        return [b.bitcast(part, FLOAT) for part in (b.shl(lanes, every(16)), b.and_(lanes, every(-1 << 16)))]
    return [_half_values(b, part) for part in (b.and_(lanes, every(0xFFFF)), b.lshr(lanes, every(16)))]


def float_values(b: Any, layout: BlockLayout, code: Any) -> Any:
    """Values of codes in 32-bit lanes, as float32."""
    if layout.is_e4m3:
        return _e4m3_values(b, code)
    if layout.offset is not None:
        return b.sitofp(b.sub(code, every(layout.offset)) if layout.offset else code, FLOAT)
    table = layout.table
    if LANES == 16:
        return call(b, "llvm.x86.avx512.permvar.sf.512", FLOAT, ir.Constant(FLOAT, list(table)), code)
    if LANES == 8:
        first, second = (
            call(b, "llvm.x86.avx2.permps", FLOAT, ir.Constant(FLOAT, list(half)), code)
            for half in (table[:8], table[8:])
        )
        return b.select(b.icmp_unsigned("<", code, every(8)), first, second)
    return _select(b, code, every, [build.every(FLOAT, value) for value in table])


def _e4m3_values(b: Any, code: Any) -> Any:
    """e4m3fn as float32, by integer and normal float32 instructions: denormal operands are slow on some CPUs."""
    magnitude = b.and_(code, every(0x7F))
    bits = b.shl(magnitude, every(20))
    normal = b.bitcast(b.add(bits, every(120 << 23)), FLOAT)
    denormal = b.fsub(b.bitcast(b.add(bits, every(121 << 23)), FLOAT), build.every(FLOAT, 2.0**-6))
    value = b.select(b.icmp_unsigned("<", magnitude, every(8)), denormal, normal)
    nan = b.icmp_unsigned("==", magnitude, every(0x7F))
    value = b.select(nan, b.bitcast(every(0x7FC00000), FLOAT), value)
    sign = b.shl(b.and_(code, every(0x80)), every(24))
    return b.bitcast(b.or_(b.bitcast(value, INT), sign), FLOAT)


def byte_values(b: Any, codes: Any, values: list[int]) -> Any:
    """Bytes of a table of 16 by codes, four in a lane. ``values`` from -128 to 255."""
    signed = [value - 256 if value > 127 else value for value in values]
    index = b.bitcast(codes, BYTES)
    name = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}.get(LANES)
    if name is not None:
        table = ir.Constant(BYTES, signed * (LANES // 4))
        return b.bitcast(call(b, name, BYTES, table, index), INT)
    chosen = _select(
        b, index, lambda code: build.every(BYTES, code), [build.every(BYTES, value) for value in signed]
    )
    return b.bitcast(chosen, INT)


def _select(b: Any, index: Any, code: Callable[[int], Any], values: list[Any]) -> Any:
    result = values[0]
    for i, value in enumerate(values[1:], 1):
        result = b.select(b.icmp_unsigned("==", index, code(i)), value, result)
    return result
