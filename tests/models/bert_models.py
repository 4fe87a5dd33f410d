"""Small BERTs with random weights, in the folder format of transformers, and the textbook formula."""

from __future__ import annotations

import json
import math

import numpy as np

from gpu_ops.formats.safetensors import NUMPY_DTYPES, header_of
from gpu_ops.models import BertConfig
from gpu_ops.models.bert import NAMES
from gpu_ops.models.tensors import planned

CONFIG = BertConfig(vocab=50, hidden=48, ffn=80, nlayers=2, nheads=3, max_positions=20, ntypes=3)
ENTRIES = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 20,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
SENTENCES = [[1, 7, 2], [1, 9, 30, 31, 7, 7, 2], [1], [], list(range(20)), [4, 4]]


def made(config=CONFIG, dtype=np.float64, seed=0):
    """Random weights by name."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.2 + name.endswith("norm")).astype(dtype)
        for name, shape in config.shapes().items()
    }


def write(folder, arrays, config=CONFIG, more=None, prefix="", **entries):
    """Write a folder with these arrays; ``more``: other tensors, by their names in the file."""
    tensors = {
        prefix + part.name: arrays[name][part.rows]
        for name, parts in planned(config, NAMES).items()
        for part in parts
    } | (more or {})
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    header = header_of({n: (names[x.dtype], x.shape) for n, x in tensors.items()}, {"format": "pt"})
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(header + data)
    (folder / "config.json").write_text(json.dumps(ENTRIES | entries))


def textbook_states(ids, arrays, config=CONFIG, types=None):
    """States of one sentence, step by step, in float64."""
    p = {name: x.astype(np.float64) for name, x in arrays.items()}
    types = np.zeros(len(ids), int) if types is None else types

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.eps)
        return scaled * p[name] + p[f"{name}_bias"]

    def dense(x, name):
        return x @ p[name].T + p[f"{name}_bias"]

    x = norm(p["embed"][ids] + p["positions"][: len(ids)] + p["types"][types], "norm")
    for i in range(config.nlayers):
        at = f"layers.{i}."
        q, k, v = np.split(dense(x, f"{at}qkv"), 3, axis=-1)
        heads = []
        for j in range(config.nheads):
            part = slice(j * config.head_dim, (j + 1) * config.head_dim)
            s = np.exp(q[:, part] @ k[:, part].T / math.sqrt(config.head_dim))
            heads.append(s / s.sum(-1, keepdims=True) @ v[:, part])
        x = norm(x + dense(np.concatenate(heads, -1), f"{at}o"), f"{at}attn_norm")
        h = dense(x, f"{at}up")
        h = h * (1 + np.vectorize(math.erf)(h / math.sqrt(2))) / 2
        x = norm(x + dense(h, f"{at}down"), f"{at}mlp_norm")
    return x


def textbook_embedding(ids, arrays, config=CONFIG):
    if not len(ids):
        return np.zeros(config.hidden)
    mean = textbook_states(ids, arrays, config).mean(0)
    return mean / np.linalg.norm(mean)
