"""Small CUDA C++ kernels with one planted bug each, for tests/emulator/test_sanitizer.py.

The comment at the end of a line marks it: ``good`` and ``bad`` lines are in one form only, ``BUG`` marks the line
that the sanitizer must name, and ``OTHER`` the line of the other access or thread that it must name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_ops.emulator import Buffer

Arguments = tuple[list[Any], dict[int, Any]]  # arguments, and what the good form writes to some of them


def row(good: Callable[[np.ndarray], Any] = lambda x: x[::-1], n: int = 64, outputs: int = 64) -> Callable:
    """Arguments ``(x, y)`` for a good form that computes ``y = good(x)``."""

    def arguments(rng: np.random.Generator) -> Arguments:
        x = rng.standard_normal(n).astype(np.float32)
        return [x, np.zeros(outputs, np.float32)], {1: good(x)}

    return arguments


@dataclass(frozen=True)
class Bug:
    """Planted bug. ``thread``: block and thread that must be named; ``says``: other parts of the message."""

    name: str
    kind: str
    body: str
    thread: str = "block (0,0,0) thread (0,0,0)"
    other: str = ""
    says: tuple[str, ...] = ()
    args: Callable[[np.random.Generator], Arguments] = field(default_factory=lambda: row())
    parameters: str = "const float* x, float* y"
    grid: int = 1
    block: int = 64
    shared: tuple[int, int] = (0, 0)  # good, bad
    sample: tuple[int, ...] | None = None
    max_instructions: int = 1_000_000

    def source(self, form: str) -> str:
        """CUDA C++ of one form; dropped lines become empty, so line numbers stay."""
        dropped = {"good": "bad", "bad": "good"}[form]
        head = f'extern "C" __global__ void k({self.parameters}) {{\n  int t = threadIdx.x;\n'
        text = f"{HELPERS}\n{head}{self.body}}}\n"
        return "\n".join("" if dropped in _comment(line) else line for line in text.split("\n"))

    def line(self, marker: str) -> int:
        """Number of the line with a marker in the bad form."""
        (number,) = [
            i for i, line in enumerate(self.source("bad").split("\n"), 1) if marker in _comment(line)
        ]
        return number


def _comment(line: str) -> list[str]:
    return line.partition("//")[2].split()


HELPERS = r"""
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
__device__ __forceinline__ void copy16(void* to, const void* from) {
  unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
#define BARRIER(id, count) asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(count) : "memory")
"""


def _padded(rng: np.random.Generator) -> Arguments:
    """60 numbers in an array of 64; the last 4 must not be read."""
    x = rng.standard_normal(64).astype(np.float32)
    return [Buffer(x, "x", poison=np.arange(64) >= 60), y := np.zeros(64, np.float32), 60], {
        1: np.where(np.arange(64) < 60, x, y)
    }


def _result(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal(64).astype(np.float32)
    return [x, Buffer(np.zeros(64, np.float32), "y", written=False)], {1: 2 * x}


def _strided(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal((4, 64)).astype(np.float32)[:, :48]
    return [x, np.zeros(48, np.float32), 64], {1: x[:3].sum(axis=0, dtype=np.float32)}


def _guarded(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal(100).astype(np.float32)
    return [x, np.zeros(100, np.float32), 100], {1: 2 * x}


def _tail(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal(60).astype(np.float32)
    return [x, np.zeros(64, np.float32), 60], {1: np.append(x, np.zeros(4, np.float32))[::-1]}


def _eight(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal(8).astype(np.float32)
    return [x, np.zeros(64, np.float32), 64], {1: np.tile(x, 8)}


def _read_only(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal(64).astype(np.float32)
    x.flags.writeable = False
    return [x, np.zeros(64, np.float32)], {1: 2 * x}


def _in_place(rng: np.random.Generator) -> Arguments:
    x = rng.standard_normal(64).astype(np.float32)
    return [x, x], {1: (doubled := 2 * x) + doubled[::-1]}


def _huge(rng: np.random.Generator) -> Arguments:
    """More than 2^31 bytes; only touched pages use memory."""
    x = np.zeros((2049, 1 << 20), np.uint8)
    x[2048, :64] = rng.integers(0, 256, 64)
    return [x, np.zeros(64, np.uint8), 1 << 20], {1: x[2048, :64].copy()}


def _matrix(rng: np.random.Generator) -> Arguments:
    x = rng.integers(0, 1 << 16, (16, 8)).astype(np.uint16)
    return [x, np.zeros(32, np.uint32)], {1: x[8:].ravel().view(np.uint32)}


OUT = "out of bounds"

#: Bugs of a single access: its address, and the contents at that address.
BUGS = [
    Bug(
        "read past the end",
        OUT,
        """
  int i = blockIdx.x * 64 + t;
  if (i < n)   // good
  if (i <= n)  // bad
    y[i < n ? i : 0] = 2 * x[i];  // BUG
""",
        thread="block (1,0,0) thread (36,0,0)",
        says=("4-byte read", "past the end of `x`: element 100 of 100 (byte 400 of 400)"),
        args=_guarded,
        parameters="const float* x, float* y, int n",
        grid=2,
    ),
    Bug(
        "write past the end",
        OUT,
        """
  int i = blockIdx.x * 64 + t;
  float v = i < n ? x[i] : 0.f;
  if (i < n)  // good
    y[i] = 2 * v;  // BUG
""",
        thread="block (1,0,0) thread (36,0,0)",
        says=("4-byte write", "past the end of `y`: element 100 of 100"),
        args=_guarded,
        parameters="const float* x, float* y, int n",
        grid=2,
    ),
    Bug(
        "negative index",
        OUT,
        """
  float before = t ? x[t - 1] : 0.f;  // good
  float before = x[t - 1];            // bad BUG
  y[t] = x[t] - before;
""",
        says=("before the start of `x`: element -1 of 64",),
        args=row(lambda x: np.diff(x, prepend=np.float32(0))),
    ),
    Bug(
        "misaligned float4",
        "misaligned",
        """
  if (t >= 8) return;
  float4 v = *(const float4*)(x + 8 * t);      // good
  float4 v = *(const float4*)(x + 8 * t + 2);  // bad BUG
  y[t] = v.x + v.w;
""",
        says=("16-byte read", "of `x`: element 2 of 64 (byte 8 of 256)"),
        args=row(lambda x: x[::8] + x[3::8], outputs=8),
    ),
    Bug(
        "input written",
        "write to a read-only argument",
        """
  y[t] = 2 * x[t];         // good
  ((float*)x)[t] = y[t];   // bad BUG
""",
        says=("4-byte write", "of `x`: element 0 of 64 (byte 0 of 256)"),
        args=_read_only,
    ),
    Bug(
        "tail of a tile never filled",
        "uninitialised read",
        """
  __shared__ float s[64];
  if (t < n) s[t] = x[t];
  else s[t] = 0;  // good
  __syncthreads();
  y[t] = s[63 - t];  // BUG
""",
        says=("no thread has written", "shared offset 252"),
        args=_tail,
        parameters="const float* x, float* y, int n",
    ),
    Bug(
        "element of a local array never filled",
        "uninitialised read",
        """
  float a[8];
#pragma unroll 1
  for (int i = 0; i < n / 8; i++)      // good
  for (int i = 0; i < n / 8 - 1; i++)  // bad
    a[i] = x[i];
  y[t] = a[t & 7];  // BUG
""",
        thread="block (0,0,0) thread (7,0,0)",
        says=("local offset 28",),
        args=_eight,
        parameters="const float* x, float* y, int n",
    ),
    Bug(
        "result read before it is written",
        "uninitialised read",
        """
  y[t] = 2 * x[t];   // good
  y[t] += 2 * x[t];  // bad BUG
""",
        says=("of `y`: element 0 of 64",),
        args=_result,
    ),
    Bug(
        "padding read",
        "poisoned read",
        """
  y[t] = t < n ? x[t] : 0.f;  // good
  y[t] = x[t];                // bad BUG
""",
        thread="block (0,0,0) thread (60,0,0)",
        says=("of `x`: element 60 of 64",),
        args=_padded,
        parameters="const float* x, float* y, int n",
    ),
    Bug(
        "gap between rows read",
        OUT,
        """
  if (t >= 48) return;  // good
  float a = 0;
#pragma unroll 1
  for (int i = 0; i < 3; i++) a += x[i * stride + t];  // BUG
  y[t < 48 ? t : 0] = a;
""",
        thread="block (0,0,0) thread (48,0,0)",
        says=("belongs to no argument", "of `x`: byte 192 of 960"),
        args=_strided,
        parameters="const float* x, float* y, int stride",
    ),
    Bug(
        "ldmatrix past the tile",
        OUT,
        """
  __shared__ __align__(16) unsigned short s[16][8];
  for (int i = t; i < 128; i += 32) s[i / 8][i % 8] = x[i];
  __syncthreads();
  unsigned v, at = (unsigned)__cvta_generic_to_shared(&s[8 + t % 8][0]);  // good
  unsigned v, at = (unsigned)__cvta_generic_to_shared(&s[9 + t % 8][0]);  // bad
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(v) : "r"(at));  // BUG
  y[t] = v;
""",
        thread="block (0,0,0) thread (7,0,0)",
        says=("16-byte read", "shared offset 256 of 256 bytes"),
        args=_matrix,
        parameters="const unsigned short* x, unsigned* y",
        block=32,
    ),
    Bug(
        "offset that overflows an int",
        OUT,
        """
  long long at = (long long)blockIdx.x * stride + t;  // good
  int at = blockIdx.x * stride + t;                   // bad
  y[t] = x[at];  // BUG
""",
        thread="block (2048,0,0) thread (0,0,0)",
        says=("before the start of `x`: byte -2147483648 of",),
        args=_huge,
        parameters="const unsigned char* x, unsigned char* y, int stride",
        grid=2049,
        sample=(2048,),
    ),
    Bug(
        "read-only load of what the launch writes",
        "read-only load of written data",
        """
  y[t] = 2 * x[t];
  __syncthreads();
  float other = x[63 - t];         // good
  float other = __ldg(x + 63 - t);  // bad BUG
  __syncthreads();
  y[t] += other;
""",
        says=("by ld.global.nc",),
        args=_in_place,
    ),
    Bug(
        "dynamic shared memory too small",
        OUT,
        """
  extern __shared__ float s[];
  s[t] = x[t];  // BUG
  __syncthreads();
  y[t] = s[63 - t];
""",
        thread="block (0,0,0) thread (60,0,0)",
        says=("shared offset 240 of 240 bytes",),
        shared=(256, 240),
    ),
    Bug(
        "trap",
        "trap",
        """
  if (x[t] > 10.f) __trap();  // good
  if (x[t] < 10.f) __trap();  // bad BUG
  y[t] = x[63 - t];
""",
        says=("the kernel executed trap",),
    ),
    Bug(
        "assertion that fails",
        "trap",
        """
  if (x[t] > 10.f) __assertfail("x < 10", "kernel.cu", 1, "k", 1);  // good
  if (x[t] < 10.f) __assertfail("x < 10", "kernel.cu", 1, "k", 1);  // bad BUG
  y[t] = x[63 - t];
""",
        says=("__assertfail",),
    ),
]
