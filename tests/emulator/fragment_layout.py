"""Layout of tensor-core fragments as in the PTX document: one formula per shape.

The emulator uses one rule for all shapes; the tests compare it with these formulas.
"""

from __future__ import annotations

import numpy as np

#: Bits of an element in a register.
WIDTH = {"f64": 64, "tf32": 32, "b1": 1}
WIDTH |= dict.fromkeys(("f16", "bf16"), 16) | dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 8)
WIDTH |= dict.fromkeys(("s4", "u4"), 4)

#: (shape, bits) -> places of element i of a lane's A fragment, (row, column), and of its B fragment, (k, n);
#: g = lane / 4, t = lane % 4.
PLACES = {
    ("m16n8k16", 16): (lambda i, g, t: (g + 8 * (i in (2, 3, 6, 7)), 2 * t + (i & 1) + 8 * (i >= 4)), lambda i, g,
     t: (2 * t + (i & 1) + 8 * (i >= 2), g)),
    ("m16n8k8", 16): (lambda i, g, t: (g + 8 * (i >= 2), 2 * t + (i & 1)), lambda i, g, t: (2 * t + (i & 1), g)),
    ("m16n8k4", 32): (lambda i, g, t: (g + 8 * i, t), lambda i, g, t: (t, g)),
    ("m16n8k8", 32): (lambda i, g, t: (g + 8 * (i in (1, 3)), t + 4 * (i in (2, 3))), lambda i, g,
     t: (t + 4 * (i == 1), g)),
    ("m8n8k16", 8): (lambda i, g, t: (g, 4 * t + i), lambda i, g, t: (4 * t + i, g)),
    ("m16n8k16", 8): (lambda i, g, t: (g + 8 * (i >= 4), 4 * t + (i & 3)), lambda i, g, t: (4 * t + i, g)),
    ("m16n8k32", 8): (lambda i, g, t: (g + 8 * (4 <= i < 8 or i >= 12), 4 * t + (i & 3) + 16 * (i >= 8)), lambda i,
     g, t: (4 * t + (i & 3) + 16 * (i >= 4), g)),
    ("m8n8k32", 4): (lambda i, g, t: (g, 8 * t + i), lambda i, g, t: (8 * t + i, g)),
    ("m16n8k32", 4): (lambda i, g, t: (g + 8 * (i >= 8), 8 * t + (i & 7)), lambda i, g, t: (8 * t + i, g)),
    ("m16n8k64", 4): (lambda i, g, t: (g + 8 * (8 <= i < 16 or i >= 24), 8 * t + (i & 7) + 32 * (i >= 16)), lambda i,
     g, t: (8 * t + (i & 7) + 32 * (i >= 8), g)),
    ("m8n8k128", 1): (lambda i, g, t: (g, 32 * t + i), lambda i, g, t: (32 * t + i, g)),
    ("m16n8k128", 1): (lambda i, g, t: (g + 8 * (i >= 32), 32 * t + (i & 31)), lambda i, g, t: (32 * t + i, g)),
    ("m16n8k256", 1): (lambda i, g, t: (g + 8 * (32 <= i < 64 or i >= 96), 32 * t + (i & 31) + 128 * (i >= 64)),
     lambda i, g, t: (32 * t + (i & 31) + 128 * (i >= 32), g)),
    ("m8n8k4", 64): (lambda i, g, t: (g, t), lambda i, g, t: (t, g)),
    ("m16n8k4", 64): (lambda i, g, t: (g + 8 * i, t), lambda i, g, t: (t, g)),
    ("m16n8k8", 64): (lambda i, g, t: (g if i % 2 == 0 else g + 8, t if i < 2 else t + 4), lambda i, g,
     t: (t + 4 * i, g)),
    ("m16n8k16", 64): (lambda i, g, t: (g if i % 2 == 0 else g + 8, 2 * i + t if i % 2 == 0 else 2 * i - 2 + t),
     lambda i, g, t: (t + 4 * i, g)),
}  # fmt: skip


def to_registers(bits, place, width):
    """Fragment of the matrix ``bits[w]`` of each warp, lane by lane and element by element."""
    word = max(32, width)
    count = bits[0].size // 32
    registers = np.zeros((count * width // word, len(bits), 32), f"u{word // 8}")
    for lane in range(32):
        for i in range(count):
            element = bits[:, *place(i, lane // 4, lane % 4)].astype(registers.dtype)
            registers[i * width // word, :, lane] |= element << registers.dtype.type(i * width % word)
    registers.flags.writeable = False
    return list(registers)


def place_c(i, g, t):
    return g + 8 * (i >= 2), 2 * t + (i & 1)


def from_registers(registers, rows, dtype):
    """Matrix ``[W, rows, 8]`` of a C or D fragment."""
    width = 8 * np.dtype(dtype).itemsize
    matrix = np.empty((len(registers[0]), rows, 8), dtype)
    per_register = max(1, 32 // width)
    for lane in range(32):
        for i in range(rows // 4):
            word = np.ascontiguousarray(registers[i // per_register][:, lane : lane + 1])
            matrix[:, *place_c(i, lane // 4, lane % 4)] = word.view(dtype)[:, i % per_register]
    return matrix
