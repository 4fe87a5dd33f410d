"""The gradient of attention's sinks on the CPU: a task is a head."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.jit import FLOATS, compute, kernel, types
from gpu_ops.kernels.numba_cpu.parallel import claim, launcher

Array = np.ndarray[Any, Any]

EXP_NANOSECONDS = 5


def sinks_gradient(sinks: Array, lse: Array, delta: Array) -> Array:
    """Sinks float64 (nheads,); lse and delta (batch, nheads, queries); the result in lse's dtype.

    d lse / d sink is the sink's probability; its value is 0, so only -delta remains.
    """
    gradient = np.empty(sinks.shape, lse.dtype)
    launch = launcher(lse.size * EXP_NANOSECONDS)
    launch(attention_sinks_gradient[lse.dtype], len(sinks), sinks, lse, delta, gradient)
    return gradient


def _signature(t: str) -> tuple[types.Type, ...]:
    return (
        types.Array(types.float64, 1, "A", readonly=True),
        types.Array(compute(t), 3, "A", readonly=True),
        types.Array(types.float64, 3, "C"),
        types.Array(compute(t), 1, "C"),
    )


@kernel(_signature, tuple(dict.fromkeys(compute(t).name for t in FLOATS)))
def attention_sinks_gradient(state, n_tasks, sinks, lse, delta, gradient):
    head = claim(state)
    while head < n_tasks:
        total = 0.0
        for b in range(lse.shape[0]):
            for i in range(lse.shape[2]):
                if lse[b, head, i] != -np.inf:  # else its sink is -inf as well
                    total += np.exp(sinks[head] - lse[b, head, i]) * delta[b, head, i]
        gradient[head] = -total
        head = claim(state)
