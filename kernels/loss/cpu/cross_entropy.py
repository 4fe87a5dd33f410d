"""Cross-entropy on the CPU, forward and backward: one task is a run of rows.

u = softcap tanh(z / softcap), or z; with target y and class weights w

forward    loss = own w_y (lse - u_y) + others sum(w (lse - u)) + z_loss lse^2      own = 1 - label_smoothing
backward   dz = dloss (p (own w_y + others sum(w) + 2 z_loss lse) - others w - own w_y [j = y]) du/dz
           p = exp(u - shift) / sum(exp(u - shift))

lse is rounded: float32 holds that of logits near 1e7 to the nearest integer. So lse - u is computed as
(max - u) + log(sum), and p divides by the sum of the row's exponentials, relative to lse or to the maximum.

Both read each logit once, by blocks that stay in the first cache; forward keeps a maximum and a sum relative to it,
backward a row of exponentials in the second cache. Gradients too large for a cache are streamed past it. An ignored
row is not read. In one kernel, a row is still in the second cache when it is read again; the gradient, no wider than
the logits, may be at the start of their memory.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.stream import fence, finish, put, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import bits, like, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.fastmath import exp, tanh_and_slope
from gpu_ops.kernels.common.cpu.jit import (
    Kernel,
    compute,
    device_function,
    exact,
    inner,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

BLOCK = 2048  # columns: 8 KB of float32
LANES = 64  # independent maxima: LLVM makes no vector code of a single one


class Options(NamedTuple):
    """Options. ``weighted``: by class. ``others``: label_smoothing / vocab; ``weight_sum``: of the classes."""

    ignore_index: int
    weighted: bool
    own: float
    others: float
    weight_sum: float
    z_loss: float
    softcap: float


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def forward(logits: Array, targets: Array, weight: Array, loss: Array, lse: Array, options: Options) -> None:
    """Run forward. logits (rows, cols); targets int64, loss and lse (rows,)."""
    chunk = items_per_task(*logits.shape)
    arrays = bits(logits), targets, weight, loss, lse
    launch(FORWARD[logits.dtype], -(-len(targets) // chunk), chunk, *arrays, *options)


def backward(
    dloss: Array, logits: Array, targets: Array, lse: Array, weight: Array, dlogits: Array, options: Options
) -> None:
    """Run backward. dlogits may be logits. dloss (rows,) holds all factors of the rows' gradients."""
    chunk, streaming = items_per_task(*logits.shape), not stays_in_cache(dlogits.nbytes)
    arrays = dloss, bits(logits), targets, lse, weight, bits(dlogits)
    launch(BACKWARD[logits.dtype], -(-len(targets) // chunk), chunk, *arrays, *options, streaming)


def forward_backward(
    dloss: Array,
    logits: Array,
    targets: Array,
    weight: Array,
    loss: Array,
    lse: Array,
    dlogits: Array,
    options: Options,
) -> None:
    """Run forward and backward. Logits in the computing type; dlogits may be at the start of each of their rows."""
    chunk = items_per_task(*logits.shape)
    arrays = dloss, logits, targets, weight, loss, lse, bits(dlogits)
    launch(FORWARD_BACKWARD[dlogits.dtype], -(-len(targets) // chunk), chunk, *arrays, *options)


# Scratch of a thread: u and du/dz of a block or, for backward, of a row, and maxima.
Room = namedtuple("Room", "u slope lanes")


@inner
def fill(row, start, n, softcap, u, slope):
    """Compute u of n logits, and du/dz if there is a cap."""
    for j in range(n):
        u[j] = load(row, start + j)
    if softcap > 0:
        for j in range(n):
            t, slope[j] = tanh_and_slope(u[j] / softcap)
            u[j] = softcap * t


@inner
def largest(u, n, lanes):
    lanes[:] = -np.inf
    whole = n // LANES * LANES
    for start in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] = u[start + j] if u[start + j] > lanes[j] else lanes[j]
    for j in range(whole, n):
        lanes[0] = u[j] if u[j] > lanes[0] else lanes[0]
    top = lanes[0]
    for j in range(1, LANES):
        top = lanes[j] if lanes[j] > top else top
    return top


@inner
def sum_of_exponentials(u, n, row_max):
    total = like(row_max, 0.0)
    for j in range(n):
        total += exp(u[j] - row_max)
    return total


@inner
def exponentials(u, n, shift):
    """Replace u by exp(u - shift); returns the sum."""
    total = like(shift, 0.0)
    for j in range(n):
        u[j] = exp(u[j] - shift)
        total += u[j]
    return total


@exact
def distance(row_max, logit):
    """row_max - logit, always rounded first: ``inner`` may reorder a sum to (total + row_max) - logit."""
    return row_max - logit


@inner
def weighted_distances(u, n, row_max, weight, start, weighted):
    """Sums of w * (row_max - u) and of w."""
    total, weights = like(row_max, 0.0), like(row_max, n)
    if weighted:
        weights = like(row_max, 0.0)
        for j in range(n):
            total += weight[start + j] * distance(row_max, u[j])
            weights += weight[start + j]
    else:
        for j in range(n):
            total += distance(row_max, u[j])
    return total, weights


@inner
def differentiate(weights, n, scale, weight, start, weighted, others):
    """Replace exponentials by p * scale - others * w."""
    if weighted:
        for j in range(n):
            weights[j] = weights[j] * scale - others * weight[start + j]
    else:
        for j in range(n):
            weights[j] = weights[j] * scale - others


@inner
def put_scaled(to, start, n, u, slope, factor, softcap):
    if softcap > 0:
        for j in range(n):
            u[j] *= slope[j]
    for j in range(n):
        store(to, start + j, u[j] * factor)


@device_function
def loss_of_row(row, target, weight, o, room):
    """Return loss, lse, and the two terms of lse: the maximum, and the sum of exponentials relative to it."""
    u, cols, zero = room.u, len(row), like(o.own, 0.0)
    row_max, row_sum, at = like(o.own, -np.inf), zero, zero
    distances, weights = zero, zero
    for start in range(0, cols, BLOCK):
        n = min(BLOCK, cols - start)
        fill(row, start, n, o.softcap, u, room.slope)
        top = largest(u, n, room.lanes)
        if top > row_max:
            row_sum *= exp(row_max - top)
            if weights != 0 and row_max > -np.inf:
                distances += weights * (top - row_max)
            row_max = top
        base = row_max if row_max > -np.inf else zero
        row_sum += sum_of_exponentials(u, n, base)
        if o.others > 0:
            more, of_block = weighted_distances(u, n, base, weight, start, o.weighted)
            distances += more
            weights += of_block
        if start <= target < start + n:
            at = u[target - start]
    log_sum = math.log(row_sum)
    lse = row_max + log_sum
    # the difference first: a loss near 0 keeps its digits, as does one of large logits
    nll = (row_max - at) + log_sum
    value = o.own * nll * (weight[target] if o.weighted else like(o.own, 1.0))
    if o.others > 0:
        value += o.others * (distances + o.weight_sum * log_sum)
    return value + o.z_loss * lse * lse, lse, row_max, row_sum


@device_function
def scale_of_row(target, lse, row_sum, weight, o):
    """Factor of an exponential of the row in du; ``row_sum``: the sum of all exponentials."""
    w_y = weight[target] if o.weighted else like(o.own, 1.0)
    return (o.own * w_y + o.others * o.weight_sum + like(o.own, 2.0) * o.z_loss * lse) / row_sum


@device_function
def differentiate_block(weights, start, n, target, scale, weight, o):
    """Replace n exponentials by du."""
    differentiate(weights, n, scale, weight, start, o.weighted, o.others)
    if start <= target < start + n:
        weights[target - start] -= o.own * (weight[target] if o.weighted else like(o.own, 1.0))


def _kernel_forward() -> Kernel:
    def cross_entropy_forward(
        state, n_tasks, chunk, logits, targets, weight, loss, lse, ignore_index, weighted, own, others,
        weight_sum, z_loss, softcap,
    ):  # fmt: skip
        o = Options(ignore_index, weighted, own, others, weight_sum, z_loss, softcap)
        room = Room(np.full(BLOCK, own), np.full(BLOCK, own), np.full(LANES, own))
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, len(targets))):
                if targets[r] == ignore_index:
                    loss[r], lse[r] = like(own, 0.0), like(own, -np.inf)
                else:
                    row = read_row(logits, (r,))
                    loss[r], lse[r], _, _ = loss_of_row(row, targets[r], weight, o, room)
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        c = compute(t)
        weights, line = read(c.name, 1), write(c.name, 1)
        return types.int64, read(t, 2), read("int64", 1), weights, line, line, *_numbers(c)

    return kernel(signature)(cross_entropy_forward)


def _kernel_backward() -> Kernel:
    def cross_entropy_backward(
        state, n_tasks, chunk, dloss, logits, targets, lse, weight, dlogits, ignore_index, weighted, own,
        others, weight_sum, z_loss, softcap, streaming,
    ):  # fmt: skip
        rows, cols = logits.shape
        o = Options(ignore_index, weighted, own, others, weight_sum, z_loss, softcap)
        u, slope = np.full(cols, own), np.full(cols if softcap > 0 else 0, own)
        result = np.zeros(BLOCK, logits.dtype)
        waits, where = np.zeros(64, logits.dtype), np.zeros(2, np.int64)
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, rows)):
                target, row, gradients = targets[r], read_row(logits, (r,)), write_row(dlogits, (r,))
                if target == ignore_index:
                    for j in range(cols):
                        gradients[j] = 0
                    continue
                row_sum = 0.0
                for start in range(0, cols, BLOCK):
                    n = min(BLOCK, cols - start)
                    fill(row, start, n, softcap, u[start:], slope[start:])
                    row_sum += np.float64(exponentials(u[start:], n, lse[r]))
                scale = scale_of_row(target, lse[r], like(own, row_sum), weight, o)
                following = read_row(logits, (min(r + 1, rows - 1),))
                for start in range(0, cols, BLOCK):
                    n, du, du_dz = min(BLOCK, cols - start), u[start:], slope[start:]
                    differentiate_block(du, start, n, target, scale, weight, o)
                    if streaming:
                        put_scaled(result, 0, n, du, du_dz, dloss[r], softcap)
                        put(result, gradients[start : start + n], waits, where, (following,), start)
                    else:
                        put_scaled(gradients, start, n, du, du_dz, dloss[r], softcap)
            if streaming:
                finish(waits, where)
                fence()
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        c = compute(t)
        line = read(c.name, 1)
        arrays = line, read(t, 2), read("int64", 1), line, line, write(t, 2)
        return types.int64, *arrays, *_numbers(c), types.boolean

    return kernel(signature)(cross_entropy_backward)


def _kernel_forward_backward() -> Kernel:
    def cross_entropy_forward_backward(
        state, n_tasks, chunk, dloss, logits, targets, weight, loss, lse, dlogits, ignore_index, weighted,
        own, others, weight_sum, z_loss, softcap,
    ):  # fmt: skip
        rows, cols = logits.shape
        o = Options(ignore_index, weighted, own, others, weight_sum, z_loss, softcap)
        room = Room(np.full(BLOCK, own), np.full(BLOCK, own), np.full(LANES, own))
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, rows)):
                target, row, gradients = targets[r], read_row(logits, (r,)), write_row(dlogits, (r,))
                if target == ignore_index:
                    loss[r], lse[r] = like(own, 0.0), like(own, -np.inf)
                    for j in range(cols):
                        gradients[j] = 0
                    continue
                loss[r], lse[r], row_max, row_sum = loss_of_row(row, target, weight, o, room)
                scale = scale_of_row(target, lse[r], row_sum, weight, o)
                for start in range(0, cols, BLOCK):
                    n = min(BLOCK, cols - start)
                    fill(row, start, n, softcap, room.u, room.slope)
                    exponentials(room.u, n, row_max)
                    differentiate_block(room.u, start, n, target, scale, weight, o)
                    put_scaled(gradients, start, n, room.u, room.slope, dloss[r], softcap)
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        c = compute(t)
        known, line = read(c.name, 1), write(c.name, 1)
        arrays = known, read(c.name, 2), read("int64", 1), known, line, line, write(t, 2)
        return types.int64, *arrays, *_numbers(c)

    return kernel(signature)(cross_entropy_forward_backward)


def _numbers(c: types.Type) -> tuple[types.Type, ...]:
    """Types of the fields of :class:`Options`."""
    return types.int64, types.boolean, c, c, c, c, c


FORWARD, BACKWARD, FORWARD_BACKWARD = _kernel_forward(), _kernel_backward(), _kernel_forward_backward()
