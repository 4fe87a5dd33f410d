"""Inference on plain arrays: a key/value cache in pages, continuous batching, text from a model's folder."""

from gpu_ops.core.declared import publish
from gpu_ops.inference.engine import Engine
from gpu_ops.inference.forward import cache_for, next_logits
from gpu_ops.inference.generation import generate
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.requests import Sampling, Token
from gpu_ops.inference.sequences import CacheStats
from gpu_ops.inference.service import Reply, Service
from gpu_ops.inference.speculative import probabilities, prompt_lookup, verify
from gpu_ops.inference.step import Step
from gpu_ops.inference.step_attention import attend
from gpu_ops.inference.text import TextStream

__all__ = [
    "CacheStats",
    "Engine",
    "PagedKVCache",
    "Reply",
    "Sampling",
    "Service",
    "Step",
    "TextStream",
    "Token",
    "attend",
    "cache_for",
    "generate",
    "next_logits",
    "probabilities",
    "prompt_lookup",
    "verify",
]

publish(globals())
