"""Memory of a step, known before it runs: what it takes, and one buffer that holds all of it."""

from gpu_ops.memory.arena import Arena
from gpu_ops.memory.estimate import Estimate, choose_policies, estimate
from gpu_ops.memory.trace import Buffer, Trace

__all__ = ["Arena", "Buffer", "Estimate", "Trace", "choose_policies", "estimate"]
