"""What generation needs beside the ops: a key/value cache in pages that sequences share."""

from gpu_ops.inference.kv_cache import CacheStats, PagedKVCache
from gpu_ops.inference.step import Step

__all__ = ["CacheStats", "PagedKVCache", "Step"]
