"""Models as plain functions on arrays: a Llama, its blocks, forward and backward; and BERT, forward."""

from gpu_ops.core.declared import publish
from gpu_ops.models.adapters import load_adapters, save_adapters
from gpu_ops.models.bert import Bert, BertBlock, BertConfig, bert_states, load_bert, sentence_embeddings
from gpu_ops.models.block import POLICIES, Saved, Sequences, block_backward, block_forward
from gpu_ops.models.checkpoint import load, save
from gpu_ops.models.config import Layer, LlamaConfig
from gpu_ops.models.gguf_export import export_gguf
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
    with_packed,
)
from gpu_ops.models.weights import Block, Llama, initial_weights

__all__ = [
    "POLICIES",
    "PRESETS",
    "Bert",
    "BertBlock",
    "BertConfig",
    "Block",
    "Int8Input",
    "Latent",
    "Layer",
    "Llama",
    "LlamaConfig",
    "Lora",
    "Saved",
    "Sequences",
    "bert_states",
    "block_backward",
    "block_forward",
    "export_gguf",
    "hidden_states",
    "initial_lora",
    "initial_weights",
    "load",
    "load_adapters",
    "load_bert",
    "logits",
    "lora_grads",
    "lora_shapes",
    "loss",
    "loss_and_grads",
    "merged",
    "save",
    "save_adapters",
    "sentence_embeddings",
    "with_int8_input",
    "with_latent",
    "with_lora",
    "with_packed",
]

publish(globals())
