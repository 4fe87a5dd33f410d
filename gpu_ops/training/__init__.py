"""What a training loop needs beside the ops: loss scaling, parameters in one buffer, data, saved states."""

from gpu_ops.training.checkpoints import Checkpoints
from gpu_ops.training.state import load_state, save_state

__all__ = ["Checkpoints", "load_state", "save_state"]
