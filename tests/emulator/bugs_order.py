"""More planted bugs for tests/emulator/test_sanitizer.py: missing or wrong synchronisation."""

from __future__ import annotations

import numpy as np

from tests.emulator.bugs import Arguments, Bug, row

RACE, ASYNC = "shared-memory race", "asynchronous copy not waited for"


def _flag(rng: np.random.Generator) -> Arguments:
    return [np.zeros(1, np.int32), np.zeros(64, np.float32)], {1: np.ones(64, np.float32)}


def _counts(rng: np.random.Generator) -> Arguments:
    x = rng.integers(0, 8, 64).astype(np.int32)
    return [x, np.zeros(8, np.int32)], {1: np.bincount(x, minlength=8)}


def _tiles(rng: np.random.Generator) -> Arguments:
    """Four tiles of 64 x 4; the kernel adds up their rows in reverse."""
    x = rng.standard_normal((4, 64, 4)).astype(np.float32)
    total = np.zeros(64, np.float32)
    for tile in x:
        total = total + tile[::-1, 0]
    return [x, np.zeros(64, np.float32)], {1: total}


BUGS = [
    Bug(
        "missing __syncthreads",
        RACE,
        """
  __shared__ float s[64];
  s[t] = x[t];       // OTHER
  __syncthreads();   // good
  y[t] = s[63 - t];  // BUG
""",
        other="written by block (0,0,0) thread (63,0,0)",
        says=("4-byte read", "shared offset 252"),
    ),
    Bug(
        "missing __syncthreads at the end of a loop",
        RACE,
        """
  __shared__ float s[64];
  float a = 0;
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    s[t] = x[256 * i + 4 * t];  // BUG
    __syncthreads();
    a += s[63 - t];             // OTHER
    __syncthreads();            // good
  }
  y[t] = a;
""",
        other="read by block (0,0,0) thread (63,0,0)",
        says=("4-byte write",),
        args=_tiles,
    ),
    Bug(
        "two lanes store to one element",
        RACE,
        """
  __shared__ float s[64];
  s[t] = x[t];      // good
  s[t / 2] = x[t];  // bad BUG OTHER
  __syncthreads();
  y[t] = s[63 - t];
""",
        thread="block (0,0,0) thread (1,0,0)",
        other="written by block (0,0,0) thread (0,0,0)",
    ),
    Bug(
        "missing __syncwarp",
        RACE,
        """
  __shared__ float s[64];
  s[t] = x[t];  // OTHER
  __syncwarp();         // good
  y[t] = s[t ^ 1];  // BUG
""",
        other="thread (1,0,0)",
        args=row(lambda x: x.reshape(-1, 2)[:, ::-1].ravel()),
    ),
    Bug(
        "counts without atomics",
        RACE,
        """
  __shared__ int s[8];
  if (t < 8) s[t] = 0;
  __syncthreads();
  atomicAdd(&s[x[t]], 1);  // good
  s[x[t]] += 1;            // bad BUG OTHER
  __syncthreads();
  if (t < 8) y[t] = s[t];
""",
        thread="block (0,0,0) thread (",
        other="read by block (0,0,0)",
        args=_counts,
        parameters="const int* x, int* y",
    ),
    Bug(
        "plain read among the atomics of others",
        RACE,
        """
  __shared__ int s[8];
  if (t < 8) s[t] = 0;
  __syncthreads();
  atomicAdd(&s[x[t]], 1);  // OTHER
  __syncthreads();         // good
  if (t >= 56) y[t - 56] = s[t - 56];  // BUG
""",
        thread="block (0,0,0) thread (",
        other="written by block (0,0,0)",
        args=_counts,
        parameters="const int* x, int* y",
    ),
    Bug(
        "barrier in some warps only",
        "barrier divergence",
        """
  __shared__ float s[64];
  if (t < 64) {
    s[t] = x[t];
    __syncthreads();  // bad OTHER
  }
  __syncthreads();    // BUG
  if (t < 64) y[t] = s[63 - t];
""",
        thread="block (0,0,0) thread (64,0,0)",
        other="thread (0,0,0) waits",
        block=128,
    ),
    Bug(
        "barriers of one warp in both branches",
        "barrier divergence",
        """
  __shared__ float s[64];
  s[t] = x[t];           // good
  if (t & 1) {           // bad
    s[t] = x[t];         // bad
    __syncthreads();     // bad BUG
  } else {               // bad
    s[t] = x[t] * 1.5f;  // bad
    __syncthreads();     // bad OTHER
  }                      // bad
  __syncthreads();
  y[t] = s[63 - t];
""",
        thread="block (0,0,0) thread (1,0,0)",
        other="thread (0,0,0)",
        says=("32 threads",),
    ),
    Bug(
        "named barrier for more threads than come",
        "deadlock",
        """
  __shared__ float s[64];
  s[t] = x[t];
  BARRIER(1, 64);  // good
  BARRIER(1, 96);  // bad BUG
  y[t] = s[63 - t];
""",
        says=("64 threads", "waiting at barrier 1"),
    ),
    Bug(
        "two warps wait at different barriers",
        "deadlock",
        """
  __shared__ float s[64];
  s[t] = x[t];
  BARRIER(1, 64);                // good
  if (t < 32) { BARRIER(1, 64);  // bad BUG
  } else {                       // bad
    BARRIER(2, 64);              // bad OTHER
  }                              // bad
  y[t] = s[63 - t];
""",
        other="first block (0,0,0) thread (32,0,0)",
        says=("waiting at barrier 1", "waiting at barrier 2"),
    ),
    Bug(
        "flag that nobody sets",
        "livelock",
        """
  if (t == 63) *(volatile int*)x = 1;  // good
  while (*(volatile int*)x == 0) {     // BUG
  }
  y[t] = 1;
""",
        says=("64 threads", "polling memory that nobody changes"),
        args=_flag,
        parameters="int* x, float* y",
    ),
    Bug(
        "search that never ends",
        "endless loop",
        """
  int low = 0, high = 64;
  while (low + 1 < high) {  // good
  while (low < high) {      // bad BUG
    int middle = (low + high) / 2;
    if (x[middle] <= t) low = middle; else high = middle;
  }
  y[t] = low;
""",
        says=("stopped after 20000 instructions (max_instructions)",),
        args=lambda rng: ([np.arange(64, dtype=np.float32), np.zeros(64, np.float32)], {1: np.arange(64)}),
        max_instructions=20_000,
    ),
    Bug(
        "flags of two kinds that nobody sets",
        "livelock",
        """
  if (t == 63) *(volatile int*)x = 1;      // good
  if (t < 32) {
    while (*(volatile int*)x == 0) {       // BUG
    }
  } else {
    while (atomicAdd(x, 0) == 0) {         // OTHER
    }
  }
  y[t] = 1;
""",
        other="first block (0,0,0) thread (32,0,0)",
        says=("32 threads",),
        args=_flag,
        parameters="int* x, float* y",
    ),
    Bug(
        "lane that is not in its own mask",
        "warp mask",
        """
  float v = x[t];
  y[t] = __shfl_xor_sync(0xffffffff, v, 1);  // good
  y[t] = __shfl_xor_sync(0x0000ffff, v, 1);  // bad BUG
""",
        thread="block (0,0,0) thread (16,0,0)",
        says=("lane 16 is not in its own member mask 0x0000ffff",),
        args=row(lambda x: x.reshape(-1, 2)[:, ::-1].ravel()),
    ),
    Bug(
        "shuffle from a lane outside the mask",
        "warp mask",
        """
  float v = x[t];
  if ((t & 31) < 16) {
    v = __shfl_sync(0xffff, v, (t & 15) ^ 1);   // good
    v = __shfl_sync(0xffff, v, (t & 15) + 16);  // bad BUG
  }
  y[t] = v;
""",
        says=("lane 0 shuffles from lane 16",),
        args=row(lambda x: np.where(np.arange(64) % 32 < 16, x[np.arange(64) ^ 1], x)),
    ),
    Bug(
        "shuffle from a lane that has ended",
        "warp mask",
        """
  if (t >= 48) return;  // bad
  float v = x[t];
  y[t] = __shfl_down_sync(0xffffffff, v, 16);  // BUG
""",
        thread="block (0,0,0) thread (32,0,0)",
        says=("lane 0 shuffles from lane 16, which has ended",),
        args=row(lambda x: np.where(np.arange(64) % 32 < 16, np.roll(x, -16), x)),
    ),
    Bug(
        "copy read before it is waited for",
        ASYNC,
        """
  __shared__ float4 s[64];
  copy16(&s[t], x + 4 * t);  // OTHER
  COMMIT();
  WAIT(0);  // good
  __syncthreads();
  y[t] = s[63 - t].x;  // BUG
""",
        other="the copy was issued by block (0,0,0) thread (63,0,0)",
        args=row(lambda x: x[::4][::-1], n=256),
    ),
    Bug(
        "copy waited for without a barrier",
        RACE,
        """
  __shared__ float4 s[64];
  copy16(&s[t], x + 4 * t);  // OTHER
  COMMIT();
  WAIT(0);
  __syncthreads();     // good
  y[t] = s[63 - t].x;  // BUG
""",
        other="written by block (0,0,0) thread (63,0,0)",
        args=row(lambda x: x[::4][::-1], n=256),
    ),
    Bug(
        "stage overwritten while it is read",
        RACE,
        """
  __shared__ float4 s[2][64];
  float a = 0;
  copy16(&s[0][t], x + 4 * t);
  COMMIT();
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    const float* from = x + 256 * (i + 1) + 4 * t;
    unsigned to = (unsigned)__cvta_generic_to_shared(&s[(i + 1) & 1][t]);
    if (i < 3)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));  // BUG
    COMMIT();
    WAIT(1);
    __syncthreads();
    a += s[i & 1][63 - t].x;  // OTHER
    __syncthreads();          // good
  }
  y[t] = a;
""",
        other="read by block (0,0,0) thread (63,0,0)",
        says=("16-byte write",),
        args=_tiles,
    ),
    Bug(
        "wait for too few groups",
        ASYNC,
        """
  __shared__ float4 s[64];
  copy16(&s[t], x + 4 * t);  // OTHER
  COMMIT();
  WAIT(0);  // good
  WAIT(1);  // bad
  __syncthreads();
  y[t] = s[63 - t].x;  // BUG
""",
        other="the copy was issued by block (0,0,0) thread (63,0,0)",
        args=row(lambda x: x[::4][::-1], n=256),
    ),
]
