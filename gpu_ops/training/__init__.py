"""Parts of a training loop other than ops: loss scaling, parameters in one buffer, data, saved states."""

from gpu_ops.core.declared import publish
from gpu_ops.training.batches import Batches
from gpu_ops.training.flat import FlatParams
from gpu_ops.training.muon import muon_step
from gpu_ops.training.scaler import GradScaler, clip_coefficient
from gpu_ops.training.state import Checkpoints, load_state, save_state
from gpu_ops.training.text import stdlib_text
from gpu_ops.training.tokenizer import BytePairEncoding, load_tokenizer
from gpu_ops.training.tokens import TokenFile, write_tokens

__all__ = [
    "Batches",
    "BytePairEncoding",
    "Checkpoints",
    "FlatParams",
    "GradScaler",
    "TokenFile",
    "clip_coefficient",
    "load_state",
    "load_tokenizer",
    "muon_step",
    "save_state",
    "stdlib_text",
    "write_tokens",
]

publish(globals())
