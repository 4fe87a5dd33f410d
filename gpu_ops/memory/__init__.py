"""Memory of a step, known before it runs: what it takes, and one buffer that holds all of it."""

from gpu_ops.memory.arena import Arena
from gpu_ops.memory.trace import Trace

__all__ = ["Arena", "Trace"]
