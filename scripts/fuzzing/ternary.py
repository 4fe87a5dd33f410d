"""Trials of the ternary ops."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import gpu_ops
from scripts.fuzzing.attention import computing
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, Array, Maths
from scripts.fuzzing.trial import BACKWARD, Trial

ANY_SHAPE = ("planes", "base3", "hf_bitnet", "w2")
UNITS = {"bitnet_gpu": (16, 32), "i2_s": (1, 128), "tl1": (256, 128), "tl2": (256, 96)}
UNITS |= {"tq1_0": (1, 256), "tq2_0": (1, 256), "q2_0": (1, 64)}
FORMATS = (*ANY_SHAPE, *UNITS)


def matrix(draw: Draw, format: str) -> Array:
    """Trits of a shape that the format supports."""
    if format in UNITS:
        rows, cols = (unit * draw.pick(1, 1, 2) for unit in UNITS[format])
        rows *= draw.pick(1, 3) if rows < 4 else 1
    else:
        rows, cols = draw.length(65), draw.length(257)
    trits = draw.rng.integers(-1, 2, (rows, cols))
    if draw.chance(0.2):
        trits[draw.rng.random(trits.shape) < 0.9] = 0
    return trits.astype(np.int8)


def packed_bytes(t: Array, format: str) -> bytes | None:
    """Bytes of the formats that take one line of arithmetic; None for the others."""
    n, k = t.shape
    codes = (t + 1).astype(np.int64)
    if format == "base3":
        digits = np.pad(codes, ((0, 0), (0, -k % 5)), constant_values=1).reshape(n, -1, 5)
        return (digits @ np.array([1, 3, 9, 27, 81])).astype(np.uint8).tobytes()
    if format == "hf_bitnet":
        rows = np.pad(codes, ((0, -n % 4), (0, 0))).reshape(4, -1, k)
        return np.tensordot([1, 4, 16, 64], rows, 1).astype(np.uint8).tobytes()
    if format == "planes":
        bits = np.pad(np.stack([t == 1, t == -1], 1), ((0, 0), (0, 0), (0, -k % 32)))
        return np.packbits(bits, axis=-1, bitorder="little").tobytes()
    if format == "i2_s":
        return np.tensordot(codes.reshape(-1, 4, 32), [64, 16, 4, 1], (1, 0)).astype(np.uint8).tobytes()
    return None


def pack(draw: Draw) -> Trial:
    """Trial of packing: the bytes of simple formats, and unpacking them again."""
    format = draw.pick(*FORMATS)
    t = matrix(draw, format)
    arguments = {"trits": draw.place(t.astype(draw.pick(np.int8, np.int8, np.int64))), "format": format}

    def check(found: list[Any]) -> str | None:
        expected = packed_bytes(t, format)
        if expected is not None and found[0].tobytes() != expected:
            return "other bytes than the formula's"
        back = gpu_ops.ternary_unpack(found[0], t.shape, format)
        return None if np.array_equal(back, t) else "unpacked trits differ from those packed"

    return Trial("ternary_pack", arguments, draw, FLOAT32, check=check)


def unpack(draw: Draw) -> Trial:
    """Trial of unpacking: bytes of the formula, or invalid bytes, whose result packs to the same bytes again."""
    format = draw.pick(*FORMATS)
    t = matrix(draw, format)
    made = packed_bytes(t, format)
    data = np.frombuffer(made, np.uint8) if made else gpu_ops.ternary_pack(t, format).reshape(-1)

    def check(found: list[Any]) -> str | None:
        if str(found[0].dtype) != "int8" or not np.array_equal(found[0], t):
            return "other trits than those packed"
        for _ in range(4):
            wrong = data.copy()
            wrong[draw.integer(0, data.size - 1)] = draw.integer(0, 255)
            try:
                trits = gpu_ops.ternary_unpack(wrong, t.shape, format)
            except gpu_ops.errors.FormatError:
                continue
            embeds = format in ("tq1_0", "tq2_0", "q2_0")  # a scale, which the trits do not include
            if not embeds and gpu_ops.ternary_pack(trits, format).tobytes() != wrong.tobytes():
                return "accepted bytes that no encoder writes"
        return None

    arguments = {"packed": draw.place(data), "shape": t.shape, "format": format}
    return Trial("ternary_unpack", arguments, draw, FLOAT32, check=check)


METHODS = ("absmean", "absmean", "absmax", "twn", "percentile", "meanstd", "manual")


def quantize(draw: Draw) -> Trial:
    dtype, method = draw.dtype(), draw.pick(*METHODS)
    n, groups = draw.length(33), draw.pick(1, 2, 3)
    size = draw.pick(1, 32, 64, 100, 128)
    group = draw.pick(None, -1, size)
    w = draw.array((n, groups * size), dtype, draw.pick(0.02, 1.0, 5.0))
    arguments: dict[str, Any] = {"w": w, "method": method}
    if group is not None:
        arguments["group_size"] = group
    threshold = {"absmax": 0.7, "twn": 0.7, "percentile": 50.0, "meanstd": 0.0, "manual": 0.5}.get(method)
    if method == "manual" or (threshold is not None and draw.chance(0.3)):
        threshold = arguments["threshold"] = draw.pick(0.1, 0.5)

    def check(found: list[Any]) -> str | None:
        made = found[0]
        parts = (1, -1) if group is None else (n, -1) if group == -1 else (n * groups, size)
        x, t = (array.astype(np.float64).reshape(parts) for array in (w, made.trits()))
        size_of, scale = np.abs(x), made.scale.astype(np.float64).reshape(-1, 1)
        mean = size_of.mean(1, keepdims=True)
        if method == "absmean":
            expected = np.maximum(mean, 1e-5)
            edge = scale / 2
        else:
            kept = t != 0
            expected = np.where(kept.any(1), (size_of * kept).sum(1) / np.maximum(kept.sum(1), 1), 1)[:, None]
            edge = {
                "absmax": lambda: threshold * size_of.max(1, keepdims=True),
                "twn": lambda: threshold * mean,
                "percentile": lambda: np.percentile(size_of, threshold, axis=1, keepdims=True),
                "meanstd": lambda: mean + threshold * size_of.std(1, keepdims=True),
                "manual": lambda: np.full_like(mean, threshold),
            }[method]()
        if not np.allclose(scale, expected, rtol=2e-6, atol=0):
            return f"scale {scale.ravel()[:3]}, expected {expected.ravel()[:3]}"
        certain = np.abs(size_of - edge) > 1e-5 * edge  # float32 may put others on the other side
        wrong = certain & (t != np.sign(x) * (size_of > edge))
        return f"{wrong.sum()} trits differ, first {np.argwhere(wrong)[0]}" if wrong.any() else None

    return Trial("ternary_quantize", arguments, draw, dtype, check=check)


def scaled(draw: Draw, *kinds: str) -> tuple[Array, Array, gpu_ops.TernaryMatrix]:
    """Trits, the scale of each of them (N, K), and the matrix."""
    format = draw.pick("w2", "w2", *ANY_SHAPE, "i2_s", "tq2_0")
    t = matrix(draw, format)
    n, k = t.shape
    groups = draw.pick(*(g for g in (1, 2, 4) if k % g == 0))
    if format == "tq2_0":
        groups = 1
    granularity = draw.pick(*(kinds or ("tensor", "row", "group"))) if format != "tq2_0" else "tensor"
    shape = {"tensor": (), "row": (n,), "group": (n, groups)}[granularity]
    scale = (0.2 + draw.rng.random(shape)).astype(np.float32)
    scales = {"tensor": scale, "row": scale[..., None], "group": np.repeat(scale, k // groups, -1)}[
        granularity
    ]
    return t, np.broadcast_to(scales, (n, k)), gpu_ops.TernaryMatrix.from_trits(t, scale, format=format)


def codes(x: Array, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Quantized tokens: int8 codes, the step size, and the number of codes per token that may be off by one."""
    t: Any = computing(dtype).type
    with np.errstate(all="ignore"):
        s = t(127) / np.maximum(np.abs(x.astype(t)).max(-1, keepdims=True, initial=0), t(1e-5))
        exact = x.astype(t) * s
        near = np.abs(np.abs(exact - np.trunc(exact)) - 0.5) < 1e-4
    return np.rint(exact).astype(np.float64), 1 / s.astype(np.float64), near.sum(-1, keepdims=True)


def matmul(draw: Draw) -> Trial:
    dtype, lead = draw.dtype(), draw.pick((), (1,), (3,), (2, 2), (17,), (70,), (0,))
    t, scale, w = scaled(draw)
    int8 = draw.chance(0.6)
    x = draw.array((*lead, t.shape[1]), dtype, draw.pick(0.05, 1.0, 4.0))
    arguments: dict[str, Any] = {"x": x, "w": w}
    if not int8 or draw.chance(0.3):
        arguments["activations"] = "int8" if int8 else "native"
    if draw.chance(0.25):
        arguments["out"] = draw.out((*lead, t.shape[0]), dtype, rows=True)
    q, step, near = codes(np.array(x), dtype)

    def native(m: Maths) -> tuple[Array, ...]:
        weights = (t * scale.astype(np.float64)).astype(m.wide)
        return (m.matmul(m.load(x).reshape(-1, t.shape[1]), weights.T).reshape(*lead, t.shape[0]),)

    def check(found: list[Any]) -> str | None:
        """Check int8: sums are exact, so only the result and the float32 factors are rounded."""
        exact = q @ (t * scale.astype(np.float64)).T * step
        room = near * step * scale.max(initial=0)
        room = room + np.abs(exact) * 2.0 ** {2: -7, 4: -20, 8: -40}[dtype.itemsize]
        room = room + 2e-6 * step * np.abs(q).sum(-1, keepdims=True) + (6e-8 if dtype == np.float16 else 0)
        off = np.abs(found[0].astype(np.float64) - exact) - room
        if found[0].dtype != dtype or found[0].shape != exact.shape:
            return f"{found[0].dtype} {found[0].shape}, expected {dtype} {exact.shape}"
        return f"off by more than allowed, by {off.max():.3g}" if off.size and not off.max() <= 0 else None

    judgement: dict[str, Any] = {"check": check} if int8 else {"formula": native, "results": (dtype,)}
    return Trial("ternary_matmul", arguments, draw, dtype, linked=(("x", -1),), **judgement)


def matmul_given(draw: Draw) -> Trial:
    """Trial of int8 codes with their scales: the sums are exact, so only scales and the result are rounded."""
    t, scale, w = scaled(draw)
    lead = draw.pick((), (1,), (3,), (2, 2), (17,), (70,), (0,))
    x = draw.place(draw.rng.integers(-128, 128, (*lead, t.shape[1])).astype(np.int8))
    scale_dtype = draw.pick(np.float32, np.float32, np.float64)
    x_scale = draw.array(draw.pick(lead, (*lead, 1), ()), scale_dtype)
    dtype = draw.pick(np.dtype(scale_dtype), draw.dtype())
    arguments: dict[str, Any] = {"x": x, "w": w, "x_scale": x_scale}
    if dtype != scale_dtype or draw.chance(0.3):
        arguments["out_dtype"] = dtype
    if draw.chance(0.25):
        arguments["out"] = draw.out((*lead, t.shape[0]), dtype, rows=True)
    step = np.array(x_scale, np.float64)
    step = step if step.ndim > len(lead) else step[..., None]
    whole = np.array(x, np.float64)
    exact = whole @ (t * scale.astype(np.float64)).T * step
    room = 2e-6 * np.abs(step) * np.abs(whole).sum(-1, keepdims=True)
    room = room + np.abs(exact) * 2.0 ** {2: -7, 4: -20, 8: -40}[dtype.itemsize]

    def check(found: list[Any]) -> str | None:
        actual = found[0]
        if actual.dtype != dtype or actual.shape != exact.shape:
            return f"{actual.dtype} {actual.shape}, expected {dtype} {exact.shape}"
        over = np.abs(exact) > float(ml_dtypes.finfo(dtype).max)  # infinite in float16
        off = np.where(over, 0, np.abs(actual.astype(np.float64) - exact) - room)
        return f"off by more than allowed, by {off.max():.3g}" if off.size and not off.max() <= 0 else None

    return Trial("ternary_matmul", arguments, draw, dtype, check=check, linked=(("x", -1),))


def matmul_backward(draw: Draw) -> Trial:
    dtype, tokens = draw.dtype(), draw.length(65)
    t, scale, w = scaled(draw)
    dy, x = draw.array((tokens, t.shape[0]), dtype), draw.array((tokens, t.shape[1]), dtype)
    arguments = {"dy": dy, "x": x, "w": w, "activations": "native"}
    if only := draw.pick(None, None, "dx", "dw"):
        arguments["only"] = only
    part = {"dx": slice(1), "dw": slice(1, 2)}.get(only or "", slice(2))

    def formula(m: Maths) -> tuple[Array, ...]:
        weights = m.r((t * scale.astype(np.float64)).astype(m.wide))
        g = m.load(dy)
        return (m.matmul(g, weights), m.matmul(g.T, m.load(x)))[part]

    results = (dtype, computing(dtype))[part]
    linked = (("x", 1), ("dy", 1))
    return Trial("ternary_matmul_backward", arguments, draw, dtype, results, formula, BACKWARD, linked=linked)


def product(draw: Draw) -> Trial:
    """Trial of two ternary matrices: sums of trits are exact, so only the scales round."""
    x, x_scale, left = scaled(draw, "tensor", "row")
    n = draw.length(65)
    t = draw.rng.integers(-1, 2, (n, x.shape[1])).astype(np.int8)
    scale = (0.2 + draw.rng.random(draw.pick((), (n,)))).astype(np.float32)
    right = gpu_ops.TernaryMatrix.from_trits(t, scale, format=draw.pick(*ANY_SHAPE))
    exact = (x * x_scale.astype(np.float64)) @ (t * scale.astype(np.float64)[..., None]).T

    def check(found: list[Any]) -> str | None:
        actual = found[0]
        if actual.dtype != np.float32 or actual.shape != exact.shape:
            return f"{actual.dtype} {actual.shape}, expected float32 {exact.shape}"
        scales = np.abs(x_scale).max(initial=0) * np.abs(scale).max(initial=0)
        room = 4e-6 * scales * x.shape[1] + 1e-6 * np.abs(exact)
        off = np.abs(actual - exact) - room
        return f"off by more than allowed, by {off.max():.3g}" if off.size and off.max() > 0 else None

    return Trial("ternary_matmul", {"x": left, "w": right}, draw, FLOAT32, check=check)


TRIALS = (pack, unpack, quantize, matmul, matmul, matmul_given, matmul_backward, product)
