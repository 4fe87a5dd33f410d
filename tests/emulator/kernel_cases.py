"""Launches of the kernels of kernels.cu, with their results computed in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

RNG = np.random.default_rng(7)
TABLE = np.array([1, 2, 4, 8, 16, 32, 0, 0], np.float32)
LANE = np.arange(32)


@dataclass
class Launch:
    """Launch of a kernel. ``expected`` maps an argument number to its contents after the launch."""

    name: str
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    args: list[Any]
    expected: dict[int, Any]


CASES: dict[str, Callable[[], Launch]] = {}


def case(function):
    CASES[function.__name__.strip("_")] = function
    return function


def ints(n, low=1, high=100):
    return RNG.integers(low, high, n).astype(np.int32)


def zeros(n, dtype=np.int32):
    return np.zeros(n, dtype)


def threads(function, *arrays):
    """Apply a function of the values of one thread to all threads."""
    return np.array([function(*(int(v) for v in values)) for values in zip(*arrays, strict=True)])


@case
def nested_ifs():
    def one(v):
        if v & 1:
            if v & 2:
                return 3 * v + (100 if 3 * v & 8 else 0)
            return -v
        return v // 3 if v & 4 else v

    x = ints(128)
    v = threads(one, x)
    return Launch("nested_ifs", 1, 128, [x, zeros(128)], {1: v + v[np.arange(128) ^ 1]})


@case
def trip_counts():
    def one(v):
        steps = 0
        while v != 1:
            v, steps = (3 * v + 1 if v & 1 else v // 2), steps + 1
        return steps

    x = ints(333)
    return Launch("trip_counts", 6, 64, [x, zeros(340), 333], {1: np.append(threads(one, x), zeros(7))})


@case
def early_return():
    x = ints(96)
    return Launch("early_return", 1, 96, [x, zeros(1)], {1: [x.sum()]})


@case
def jump_table():
    x, t = ints(96, 0, 9), np.arange(96)
    choices = [t * t, t - 5, t << 3, ~t, t // 7 + 1000]
    choices += [np.full(96, 1005), t % 7, np.bitwise_count(t), np.full(96, -1)]
    return Launch("jump_table", 1, 96, [x, zeros(96)], {1: np.choose(x, choices)})


@case
def do_while():
    def one(v):
        n = 0
        while True:
            v = (v * 5 + 1 + 2**31) % 2**32 - 2**31
            if v % 7 == 0:
                return n
            if v % 3:
                n += v & 15
            n += 1
            if n >= 40:
                return n

    x = ints(64)
    return Launch("do_while", 1, 64, [x, zeros(64)], {1: threads(one, x)})


def where_am_i(grid, block):
    gx, gy, gz = (*grid, 1, 1)[:3]
    bx, by, bz = (*block, 1, 1)[:3]
    out = np.zeros((gz, gy, gx, bz, by, bx, 8), np.int32)
    for axis, n in enumerate((bx, by, bz, gx, gy, gz)):
        shape = [1] * 6
        shape[5 - axis] = n
        out[..., axis] = np.arange(n).reshape(shape)
    size = bx * by * bz
    out[..., 6] = (np.arange(size) % 32).reshape(bz, by, bx)
    out[..., 7] = gx * gy * gz * 10000 + size
    return Launch("where_am_i", grid, block, [zeros(out.size)], {0: out.ravel()})


@case
def calls():
    x, t = ints(64), np.arange(64)
    n = t & 3
    a, b = x * n, np.float32(0.5) * n + TABLE[n]
    qa, qb = a * 2, b * 2 + TABLE[2]
    rb = qb * 3 + TABLE[3]
    total = np.where(t & 1, a + qa + rb.astype(np.int32), a)
    return Launch("calls", 1, 64, [x, zeros(64, np.float32)], {1: total + b})


@case
def local_array():
    x = ints((40, 9), 0, 16)
    counts = np.stack([np.bincount(row, minlength=16) for row in x])
    return Launch("local_array", 1, 40, [x, zeros(640), 9], {1: counts.ravel()})


@case
def globals_():
    t = np.arange(96)
    z = (t * t + 7)[::-1]
    return Launch("globals", 1, 96, [zeros(96, np.float32), zeros(96)], {0: TABLE[t & 7], 1: z})


@case
def generic_pointers():
    x, t = ints(64).astype(np.float32), np.arange(64)
    i = t & 3
    y = np.choose(t % 3, [x[i] + 2000, 2 * x[i] + 1000, 3 * x[(t + i) & 63]])
    return Launch("generic_pointers", 1, 64, [x, zeros(64, np.float32)], {1: y})


@case
def padding():
    t = np.arange(64)
    y = (t + 4) * 10000.0 + 5 + 2 * t - 4  # the last of three copies, and once more
    return Launch("padding", 1, 64, [zeros(64, np.float64), 5], {0: y})


@case
def by_value():
    dtype = np.dtype([("scale", "f4"), ("table", "i4", 6), ("tag", "i1")], align=True)
    s = np.array((0.5, ints(6), -3), dtype)
    c = np.array((2.0, ints(6), 9), dtype)
    t = np.arange(64)
    y = 0.5 * s["table"][(t + 2) % 6] + 2 * c["table"][t % 6] - 300 - 3
    return Launch("by_value", 1, 64, [s, c, -300, zeros(64, np.float32), 2], {3: y})


@case
def widths():
    x = RNG.integers(0, 256, (48, 64)).astype(np.uint8)
    x[:, 16:32] = RNG.integers(-(2**40), 2**40, (48, 2)).astype(np.float64).view(np.uint8)

    def part(at, count, dtype):
        size = np.dtype(dtype).itemsize * count
        return np.ascontiguousarray(x[:, at : at + size]).view(dtype).astype(object).T

    a, c, d, e, f = (
        part(0, 4, "i4"),
        part(32, 4, "i2"),
        part(40, 4, "u1"),
        part(44, 2, "u2"),
        part(48, 2, "i8"),
    )
    quotient = [
        abs(p) // abs(q | 1) * (1 if (p < 0) == ((q | 1) < 0) else -1) for p, q in zip(*f, strict=True)
    ]
    s, u = part(2, 1, "i2")[0], part(2, 1, "u2")[0]
    ints32 = [a[0] ^ a[3], (a[1] * a[2] + 2**63) % 2**64 - 2**63]
    y = [*ints32, part(16, 2, "f8").sum(axis=0), c[0] - c[3], c[1] * c[2], d.sum(axis=0), e[0] - e[1]]
    y += [quotient, [v % 2**64 >> 3 for v in f[0]]]
    y += [part(0, 1, "i1")[0], part(0, 1, "u1")[0], s * 65536 + u]
    expected = np.array([[int(v) for v in row] for row in y], np.int64).T.ravel()
    return Launch("widths", 1, 48, [x, zeros(expected.size, np.int64)], {1: expected})


@case
def spin_lock():
    return Launch("spin_lock", 5, 40, [zeros(1), zeros(1)], {0: [0], 1: [200]})


@case
def last_block():
    x = ints(1000).astype(np.float32)
    ticket, y = zeros(1, np.uint32), zeros(1, np.float32)
    return Launch("last_block", 6, 64, [x, zeros(6, np.float32), ticket, y, 1000], {2: [0], 3: [x.sum()]})


@case
def flags():
    y = 1000 * np.arange(1, 5)[:, np.newaxis] + LANE
    return Launch("flags", 1, 64, [zeros(2), zeros(32), zeros(128), 4], {2: y.ravel()})


@case
def end_while_polled():
    y = np.ones(64)
    y[:32] = 0
    y[1] = LANE.sum()
    return Launch("end_while_polled", 1, 64, [zeros(2), zeros(64)], {1: y})


@case
def named_barriers():
    x = ints((7, 32)).astype(np.float32)
    return Launch("named_barriers", 3, 64, [x, zeros(224, np.float32), 7], {1: x[:, ::-1].ravel()})


@case
def counting_barriers():
    x = ints((5, 70))
    x[2, 3], x[4] = -1, ints(70, 1, 50)
    y = np.stack([(x & 1).sum(axis=1), (x > 0).all(axis=1), (x > 90).any(axis=1)], axis=1)
    return Launch("counting_barriers", 5, 70, [x, zeros(15)], {1: y.ravel()})


@case
def atomics():
    x = ints((3, 64), -100, 100)
    start = np.array([0, 0, 50, -50, 2**31 - 1, 1, -1, 0, 0, 0, 0, 5], np.int32)

    def after(v):
        z, u = start.copy(), v.view(np.uint32)
        z[0], z[1] = v.sum(), -v.sum()
        z[2], z[3] = min(50, v.min()), max(-50, v.max())
        z[4:6] = np.array([min(2**31 - 1, u.min()), max(1, u.max())], np.uint32).view(np.int32)
        z[6], z[7] = np.bitwise_and.reduce(v | 15), np.bitwise_or.reduce(v & 255)
        z[8] = np.bitwise_xor.reduce(v)
        z[9], z[10], z[11] = v.size % 5, -v.size % 5, 6
        return z

    args = [x, np.append(start, zeros(12)), zeros(1, np.float32), zeros(1, np.float64), zeros(2, np.uint64)]
    z = np.append(after(x.ravel()), after(x[0]))
    biggest = x.astype(np.int64)[0].view(np.uint64).max()
    return Launch(
        "atomics", 3, 64, args, {1: z, 2: [48], 3: [48], 4: np.array([192 << 33, biggest], np.uint64)}
    )


@case
def partial_masks():
    x = ints(64)
    y = np.zeros((64, 8), np.uint32)
    for first in (0, 32):
        v = x[first : first + 32].astype(np.int64)
        low, high, out = v[:20], v[20:], y[first : first + 32]

        def ballot(bits, at=0):
            return int((bits.astype(bool) << (np.arange(bits.size) + at)).sum())

        out[:20, 0] = ballot(low & 1)
        out[:20, 1] = (low > 90).any() | (low > 0).all() << 1
        out[:20, 2] = [ballot(low & 3 == w & 3) for w in low]
        out[:20, 3], out[:20, 4] = low.sum(), low.max()
        out[:20, 5], out[:20, 6] = low[np.arange(20) // 4 * 4], 0xFFFFF
        out[20:, 0] = ballot(high & 2, 20)
        out[20:, 1] = high[np.maximum(np.arange(12) - 1, 0)]
        out[20:, 2] = high[np.minimum(np.arange(12) + 1, 11)]
        out[20:, 3] = np.bitwise_or.reduce(high)
        out[:, 7] = ballot(v & 4)
    return Launch("partial_masks", 1, 64, [x, zeros(512, np.uint32)], {1: y.ravel()})


@case
def inline_scopes():
    x, t = ints(64), np.arange(64)
    return Launch("inline_scopes", 1, 64, [x, zeros(64)], {1: x ** (t & 3) - t**2})


@case
def predicated():
    x = ints(64)
    y = np.concatenate([np.where(x > 50, 1 + x, -6), x <= 50, np.where(x > 50, 0, -1)])
    return Launch("predicated", 1, 64, [x, zeros(192)], {1: y})


@case
def clocks():
    return Launch("clocks", 1, 32, [zeros(64, np.int64)], {0: np.append(LANE, np.ones(32))})


SHAPES = [
    ((1,), (1,)),
    ((3,), (33,)),
    ((2,), (1024,)),
    ((2, 3, 4), (5, 6, 2)),
    ((1, 70), (2, 3, 4)),
    ((2,), (4, 8, 32)),
]
