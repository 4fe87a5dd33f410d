"""QK-norm, RoPE and the cache write for Numba: the readable twin of rope_append_kv.cu.

    n = x * rstd * (offset + weight)
    y1 = n1 cos - n2 sin,    y2 = n2 cos + n1 sin,    angle = position * inv_freq[i]

A block takes one token at a time. Its threads write cos and sin of every frequency to shared memory, computed in
float64 (the CUDA C++ kernel uses fixed-point turns). Then each warp takes a head, with adjacent columns in adjacent
lanes. Sums over a head are float64, so that nothing finite overflows; the CUDA C++ kernel scales instead.

Heads for quantized pages wait in shared memory, after the table, until their scale is known.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float32, float64, int32, int64, uint32

from gpu_ops.kernels.common.numba_cuda.dtype import LARGEST, functions, magnitude, of_magnitude
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "kernel", "shared_numbers"]

THREADS = 128
_WARPS = THREADS // 32
_TINY = 2.0**-126  # the smallest scale: its inverse is finite


@cache
def kernel(dtype: str, positions: str, place: str, has_weights: bool, codes: str) -> NumbaKernel:
    """Kernel. ``positions``: that array's dtype, or ``""``; ``place``: "rows", "pages" or "slots" locate a token.

    ``codes``: the dtype of quantized pages, or ``""``.
    """
    load, store, compute, element, _ = functions(dtype)
    encode, largest = functions(codes or dtype).store, LARGEST.get(codes, 0.0)
    has_positions, in_pages, in_slots = bool(positions), place == "pages", place == "slots"

    @cuda.jit(device=True)
    def rstd_of(x, b, s, h, eps):
        """1 / sqrt(mean of squares + eps) of a head, on every lane."""
        squares = float64(0.0)
        for c in range(uint32(cuda.threadIdx.x % 32), uint32(x.shape[3]), uint32(32)):
            squares += float64(load(x[b, s, h, c])) * float64(load(x[b, s, h, c]))
        for shift in (16, 8, 4, 2, 1):
            squares += cuda.shfl_xor_sync(0xFFFFFFFF, squares, shift)
        return compute(1.0 / math.sqrt(squares / x.shape[3] + eps))

    @cuda.jit(device=True)
    def normalised(x, b, s, h, c, weight, rstd, offset):
        n = load(x[b, s, h, c])
        return n * rstd * (compute(offset) + load(weight[c])) if has_weights else n

    def turner(put):
        @cuda.jit(device=True)
        def turn_head(x, b, s, y, page, row, h, weight, table, pairs, interleaved, eps, offset):
            """``y[page, row, h] = rope(rmsnorm(x[b, s, h]))``; y may alias x."""
            rstd = rstd_of(x, b, s, h, eps) if has_weights else compute(1.0)
            lane, pairs, columns = uint32(cuda.threadIdx.x % 32), uint32(pairs), uint32(x.shape[3])
            for i in range(lane, pairs, uint32(32)):
                first = uint32(2) * i if interleaved else i
                second = first + uint32(1) if interleaved else pairs + i
                x1 = normalised(x, b, s, h, first, weight, rstd, offset)
                x2 = normalised(x, b, s, h, second, weight, rstd, offset)
                cos, sin = table[i], table[pairs + i]
                put(y, page, row, h, first, x1 * cos - x2 * sin)
                put(y, page, row, h, second, x2 * cos + x1 * sin)
            for c in range(uint32(2) * pairs + lane, columns, uint32(32)):
                put(y, page, row, h, c, normalised(x, b, s, h, c, weight, rstd, offset))

        return turn_head

    @cuda.jit(device=True)
    def put_rounded(y, page, row, h, c, value):
        y[page, row, h, c] = store(value)

    @cuda.jit(device=True)
    def put_staged(staged, start, row, h, c, value):
        staged[start + c] = value

    turn_head, stage_head = turner(put_rounded), turner(put_staged)

    @cuda.jit(device=True)
    def encode_staged(staged, start, y, scales, page, row, h):
        """Write the codes and the scale of the head at ``staged[start]``."""
        lane, columns = uint32(cuda.threadIdx.x % 32), uint32(y.shape[3])
        cuda.syncwarp()
        top = int32(0)
        for c in range(lane, columns, uint32(32)):
            top = max(top, magnitude(staged[start + c]))
        for shift in (16, 8, 4, 2, 1):
            top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, shift))
        scale = of_magnitude(top) / float32(largest)
        usable = scale >= float32(_TINY) and scale < float32(math.inf)
        if not usable:
            scale = float32(0.0) if scale < float32(_TINY) else float32(math.nan)
        inverse = float32(1.0) / scale if usable else float32(0.0)
        for c in range(lane, columns, uint32(32)):
            value = staged[start + c] * inverse if usable else float32(0.0)
            y[page, row, h, c] = encode(max(min(value, float32(largest)), -float32(largest)))
        if lane == 0:
            scales[page, row, h] = scale
        cuda.syncwarp()  # staged may be overwritten

    @cuda.jit(device=True)
    def place_of(b, s, row, block_table, slot_mapping, num_pages, page_size):
        """Page and row of a token; page -1: not stored."""
        page = int64(b)
        if in_slots:
            slot = slot_mapping[b, s]
            page, row = (slot // page_size, slot % page_size) if slot >= 0 else (int64(-1), int64(0))
        elif in_pages:
            i = row // max(page_size, 1)
            page = int64(block_table[b, i]) if 0 <= i < block_table.shape[1] else int64(-1)
            row -= i * page_size
        inside = 0 <= page < num_pages and 0 <= row < page_size
        return page if inside else int64(-1), row

    def rope_append_kv(
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        q_weight,
        k_weight,
        inv_freq,
        positions,
        seqused_k,
        block_table,
        slot_mapping,
        k_scale,
        v_scale,
        interleaved,
        eps,
        offset,
        attention_factor,
    ):
        table = cuda.shared.array(0, compute)  # cos, then sin
        batch, seqlen, pairs = q.shape[0], q.shape[1], inv_freq.shape[0]
        warp, lane = uint32(cuda.threadIdx.x // 32), uint32(cuda.threadIdx.x % 32)
        for token in range(cuda.blockIdx.x, batch * seqlen, cuda.gridDim.x):
            b, s = token // seqlen, token % seqlen
            row = int64(s) if in_slots else int64(seqused_k[b]) + s
            position = row
            if has_positions:
                position = int64(positions[b if positions.shape[0] > 1 else 0, s])
            for i in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
                angle = float64(position) * inv_freq[i]
                table[i] = compute(attention_factor * math.cos(angle))
                table[pairs + i] = compute(attention_factor * math.sin(angle))
            cuda.syncthreads()
            page, row = place_of(b, s, row, block_table, slot_mapping, k_cache.shape[0], k_cache.shape[1])
            b, s = uint32(b), uint32(s)  # unsigned indices need no wrap-around for negative ones
            for h in range(warp, uint32(q.shape[2]), uint32(_WARPS)):
                turn_head(q, b, s, out, b, s, h, q_weight, table, pairs, interleaved, eps, offset)
            if page >= 0:
                page, row = uint32(page), uint32(row)
                for h in range(warp, uint32(k.shape[2]), uint32(_WARPS)):
                    if codes:
                        start = uint32(2 * pairs) + warp * uint32(k.shape[3])
                        turns = (table, pairs, interleaved, eps, offset)
                        stage_head(k, b, s, table, start, row, h, k_weight, *turns)
                        encode_staged(table, start, k_cache, k_scale, page, row, h)
                        for c in range(lane, uint32(v.shape[3]), uint32(32)):
                            table[start + c] = load(v[b, s, h, c])
                        encode_staged(table, start, v_cache, v_scale, page, row, h)
                    else:
                        turn_head(
                            k, b, s, k_cache, page, row, h, k_weight, table, pairs, interleaved, eps, offset
                        )
                        for c in range(lane, uint32(v.shape[3]), uint32(32)):
                            v_cache[page, row, h, c] = v[b, s, h, c]
            cuda.syncthreads()  # the table may be overwritten

    heads = f"{element}[:, :, :, :]"
    weight = f"{element}[::1]" if has_weights else "int64"
    optional = (
        f"{positions}[:, :]" if has_positions else "int64",
        "int64" if in_slots else "int32[::1]",
        "int32[:, :]" if in_pages else "int64",
        "int64[:, :]" if in_slots else "int64",
    )
    caches = f"{functions(codes or dtype).element}[:, :, :, :]"
    scale = "float32[:, :, :]" if codes else "int64"
    types = [
        *[heads] * 4,
        caches,
        caches,
        weight,
        weight,
        "float64[::1]",
        *optional,
        scale,
        scale,
        "int64",
        *["float64"] * 3,
    ]
    parts = (dtype, positions, place, "norm" if has_weights else "", codes)
    name = "_".join(filter(None, ("rope_append_kv", *parts)))
    return NumbaKernel(rope_append_kv, f"void({', '.join(types)})", name)


def shared_numbers(rotary_dim: int, head_dim: int, codes: str) -> int:
    """Numbers in shared memory: cos and sin of each pair, and a head for each warp where pages are quantized."""
    return rotary_dim + (_WARPS * head_dim if codes else 0)
