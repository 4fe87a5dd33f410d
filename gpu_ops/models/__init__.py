"""Models as plain functions on arrays: a transformer block, a Llama, forward and backward."""

from gpu_ops.models.block import POLICIES, Saved, Sequences, block_backward, block_forward
from gpu_ops.models.checkpoint import load, save
from gpu_ops.models.config import Layer, LlamaConfig
from gpu_ops.models.llama import hidden_states, logits, loss, loss_and_grads
from gpu_ops.models.presets import PRESETS
from gpu_ops.models.projection import (
    Int8Input,
    Latent,
    Lora,
    initial_lora,
    lora_grads,
    lora_shapes,
    merged,
    with_int8_input,
    with_latent,
    with_lora,
)
from gpu_ops.models.weights import Block, Llama, initial_weights

__all__ = [
    "POLICIES",
    "PRESETS",
    "Block",
    "Int8Input",
    "Latent",
    "Layer",
    "Llama",
    "LlamaConfig",
    "Lora",
    "Saved",
    "Sequences",
    "block_backward",
    "block_forward",
    "hidden_states",
    "initial_lora",
    "initial_weights",
    "load",
    "logits",
    "lora_grads",
    "lora_shapes",
    "loss",
    "loss_and_grads",
    "merged",
    "save",
    "with_int8_input",
    "with_latent",
    "with_lora",
]
