"""Memory of calls: estimated before they run, limited, or taken from one buffer."""

from gpu_ops.core.declared import publish
from gpu_ops.memory.arena import Arena
from gpu_ops.memory.estimate import Estimate, choose_policies, estimate, estimate_call
from gpu_ops.memory.inference import estimate_inference, fit, kv_cache_bytes
from gpu_ops.memory.pool import Pool, limit
from gpu_ops.memory.trace import Buffer, Trace
from gpu_ops.memory.weights import Weights

__all__ = [
    "Arena",
    "Buffer",
    "Estimate",
    "Pool",
    "Trace",
    "Weights",
    "choose_policies",
    "estimate",
    "estimate_call",
    "estimate_inference",
    "fit",
    "kv_cache_bytes",
    "limit",
]

publish(globals())
