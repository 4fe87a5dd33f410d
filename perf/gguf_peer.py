"""Packed models for the benches: GGUF files of random weights, and llama.cpp, which runs the same files.

llama.cpp is optional: ``pip install llama-cpp-python`` compiles it for this CPU, in about ten minutes of one core.
Where that fails, compile the copy in its source archive (``cmake -S vendor/llama.cpp -B build``, then
``cmake --build build --target llama``) and set ``LLAMA_CPP_LIB_PATH=build/bin``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops import models
from perf.case import Call, Inputs, Prepare
from perf.machine import threads

_TOKENIZER = {  # llama.cpp loads no file without one; the other rows of the table count as unused tokens
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
}


def gguf_file(weights: Mapping[str, Any], config: models.LlamaConfig, format: str) -> np.ndarray:
    """Bytes of the file that ``gpu-ops quantize`` makes of a model."""
    with tempfile.TemporaryDirectory() as folder:
        length = {"max_position_embeddings": 8192}  # llama.cpp requires one
        models.save(folder, models.Llama.of(weights, config), config, entries=length)
        Path(folder, "tokenizer.json").write_text(json.dumps(_TOKENIZER))
        path = Path(folder, "model.gguf")
        models.export_gguf(folder, path, format)
        return np.fromfile(path, np.uint8)


def load(file: np.ndarray, **options: Any) -> tuple[models.Llama, models.LlamaConfig]:
    """The model of a file, by :func:`gpu_ops.models.load`."""
    with written(file) as path:
        return models.load(path, **options)


@contextlib.contextmanager
def written(file: np.ndarray) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        file.tofile(path)
        yield path


def llama_cpp_peers() -> dict[str, Prepare]:
    """llama.cpp, if its Python bindings are installed."""
    return {} if importlib.util.find_spec("llama_cpp") is None else {"llama.cpp": llama_cpp_forward}


def llama_cpp_forward(x: Inputs) -> Call:
    """Forward pass of the last ``new`` tokens of each text; the others are in the cache, in float16."""
    import llama_cpp
    from llama_cpp._logger import set_verbose

    ids, new = x["ids"], x["new"]
    batch, length = ids.shape
    set_verbose(False)
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    with written(x["file"]) as path:
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = batch * -(-length // 256) * 256, batch
    params.n_batch = params.n_ubatch = max(512, batch)
    params.n_threads = params.n_threads_batch = threads()
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(texts: range, first: int, last: int) -> None:
        count = last - first
        tokens = llama_cpp.llama_batch_init(len(texts) * count, 0, 1)
        tokens.n_tokens = len(texts) * count
        for i in range(tokens.n_tokens):
            text, position = texts[i // count], first + i % count
            tokens.token[i], tokens.pos[i] = ids[text, position], position
            tokens.n_seq_id[i], tokens.seq_id[i][0] = 1, text
            tokens.logits[i] = position == length - 1
        if llama_cpp.llama_decode(context, tokens):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_batch_free(tokens)

    for text in range(batch):
        for first in range(0, length - new, params.n_batch):
            decode(range(text, text + 1), first, min(first + params.n_batch, length - new))

    def run() -> np.ndarray:
        for text in range(batch):
            llama_cpp.llama_memory_seq_rm(memory, text, length - new, -1)
        decode(range(batch), length - new, length)
        rows = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, (text + 1) * new - 1), (vocab,))
            for text in range(batch)
        ]
        return np.stack(rows)

    weakref.finalize(run, llama_cpp.llama_model_free, model)
    weakref.finalize(run, llama_cpp.llama_free, context)  # the last one made is called first
    return run
