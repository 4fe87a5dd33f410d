"""GGUF files with unknown models or damage: refused, in bounded memory."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest

import gpu_ops
from gpu_ops import models
from gpu_ops.errors import FileError, FormatError, GpuOpsError, MissingFileError, OptionError, ShapeError
from gpu_ops.models import LlamaConfig
from tests.formats.test_file_mutations import mutant
from tests.models.gguf_models import BIG, LLAMA, made, metadata, same, stored, ternary_tensors, write, written
from tests.models.model_files import INSTALL


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason=INSTALL)


REFUSED_KEYS = [
    ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
    ({"llama.attention.sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ({"llama.attention.causal": False}, "causal=False is not supported"),
    ({"llama.attn_logit_softcapping": 50.0}, "softcapping=50.0 is not supported"),
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; known: none, linear, yarn"),
    ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor=1.5 is not supported"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, and a head has 16"),
    ({"llama.attention.value_length": 8}, "value_length is 8"),
    ({"llama.attention.head_count": [4, 4]}, "head_count is an array"),
    ({"llama.attention.head_count": 0}, "head_count"),
    ({"llama.attention.head_count_kv": 3}, "nheads=4 is no multiple of nheads_kv=3"),
    ({"llama.embedding_length": "64"}, "embedding_length"),
    ({"llama.block_count": 3}, "no 'blk.2.attn_norm.weight'"),
    ({"llama.block_count": 60000}, "60000 layers, and the files 21 tensors"),
    ({"llama.block_count": 1}, "'blk.1.attn_k.weight' is no part of a 1-layer model"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps|eps"),
    ({"split.count": 3}, "one of 3 parts"),
]


@pytest.mark.parametrize(
    ("keys", "words"), REFUSED_KEYS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_keys_that_are_refused(keys, words, gguf, tmp_path):
    written(gguf, tmp_path / "a", more=keys)
    with pytest.raises(GpuOpsError, match=words):
        models.load(tmp_path / "a")


def test_yarn_without_the_length_it_stretches(tmp_path):
    keys = {"general.architecture": "llama", **metadata(LLAMA, "llama")}
    keys |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    tensors = stored(made(LLAMA), LLAMA, "llama")
    gpu_ops.write_gguf(tmp_path / "a", tensors, keys)
    assert models.load(tmp_path / "a")[1].scaling.original_max_position == 8192
    gpu_ops.write_gguf(
        tmp_path / "a", tensors, {n: x for n, x in keys.items() if n != "llama.context_length"}
    )
    with pytest.raises(
        OptionError, match=r"llama.rope.scaling.original_context_length must be an integer, got None"
    ):
        models.load(tmp_path / "a")


def test_keys_that_change_nothing(gguf, tmp_path):
    more = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.attn_factor": 1.0,
        "qwen2.expert_count": 8,
        "general.file_type": 7,
    }
    weights, config = written(gguf, tmp_path / "a", more=more)
    weights_read, read = models.load(tmp_path / "a")
    assert read == config
    assert same(weights_read, weights)


REFUSED_TENSORS = {
    "missing": (lambda a: a.pop("blk.1.ffn_up.weight"), FormatError, "no 'blk.1.ffn_up.weight', of shape (96, 64)"),
    "no table": (lambda a: a.pop("token_embd.weight"), FormatError, "no 'token_embd.weight' of two axes"),
    "shape": (
        lambda a: a.update({"blk.1.attn_output.weight": np.zeros((64, 60), np.float32)}),
        ShapeError,
        "blk.1.attn_output.weight has shape (64, 60), and (64, 64) by the config",
    ),
    "experts": (
        lambda a: a.update({"blk.0.ffn_gate_inp.weight": np.zeros((8, 64), np.float32)}),
        FormatError,
        "'blk.0.ffn_gate_inp.weight' is no part",
    ),
    "one bias": (
        lambda a: a.update({"blk.0.attn_q.bias": np.zeros(64, np.float32)}),
        FormatError,
        "'blk.0.attn_q.bias' is no part",
    ),
    "divisors": (
        lambda a: a.update({"rope_freqs.weight": np.ones(7, np.float32)}),
        FormatError,
        "rope_freqs.weight is F32 (7,); expected F32 (8,)",
    ),
    "divisors below 0": (
        lambda a: a.update({"rope_freqs.weight": np.full(8, -1, np.float32)}),
        OptionError,
        "short_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_another_model_than_the_metadatas_is_refused(name, gguf, tmp_path):
    change, error, words = REFUSED_TENSORS[name]
    tensors = stored(made(LLAMA), LLAMA, "llama")
    change(tensors)
    write(gguf, tmp_path / "a", "llama", metadata(LLAMA, "llama"), tensors)
    with pytest.raises(error, match=re.escape(words)):
        models.load(tmp_path / "a")


def test_types_that_are_not_read_are_named(gguf, tmp_path):
    tensors = stored(made(LLAMA), LLAMA, "llama")
    types = dict.fromkeys(("blk.0.ffn_up.weight",), "Q5_1")
    write(gguf, tmp_path / "a", "llama", metadata(LLAMA, "llama"), tensors, types)
    with pytest.raises(FormatError, match=r"ffn_up\.weight is Q5_1; F32, F16, BF16, F64, Q4_0, Q8_0, Q4_K, "):
        models.load(tmp_path / "a")


def test_other_architectures_are_named(gguf, tmp_path):
    write(gguf, tmp_path / "a", "mamba", {}, {"token_embd.weight": np.ones((3, 4), np.float32)})
    with pytest.raises(
        OptionError, match="architecture is 'mamba'; known: llama, qwen2, qwen3, bitnet, bitnet-b1"
    ):
        models.load(tmp_path / "a")
    gpu_ops.write_gguf(tmp_path / "a", {"token_embd.weight": np.ones((3, 4), np.float32)})
    with pytest.raises(OptionError, match="architecture is None"):
        models.load(tmp_path / "a")


def test_numbers_that_the_dtype_cannot_hold(tmp_path):
    tensors = stored(made(LLAMA), LLAMA, "llama")
    tensors["blk.1.ffn_down.weight"][3, 4] = 1e6
    keys = {"general.architecture": "llama", **metadata(LLAMA, "llama")}
    gpu_ops.write_gguf(tmp_path / "a", tensors, keys)
    with pytest.raises(
        OptionError, match=r"blk\.1\.ffn_down\.weight holds numbers beyond the range of float16"
    ):
        models.load(tmp_path / "a", dtype="float16")


def test_paths(tmp_path):
    with pytest.raises(MissingFileError, match="missing"):
        models.load(tmp_path / "missing.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(FormatError, match="does not begin with GGUF"):
        models.load(tmp_path / "a.gguf")
    with pytest.raises(FileError, match="device"):
        models.load("/dev/null")


# --- bounds ----------------------------------------------------------------------------------------


def test_loading_takes_the_models_memory_and_a_piece(gguf, tmp_path):
    config = LlamaConfig(vocab=32768, hidden=512, ffn=64, nlayers=1, nheads=8, tied=True)
    small = LlamaConfig(vocab=1, hidden=512, ffn=64, nlayers=1, nheads=8, tied=True)
    table = {"token_embd.weight": np.zeros((32768, 512 // 32 * 34), np.uint8)}
    tensors = stored(made(small), small, "llama") | table
    write(gguf, tmp_path / "a", "llama", metadata(config, "llama"), tensors, dict.fromkeys(table, "Q8_0"))
    tracemalloc.start()
    models.load(tmp_path / "a", dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * config.parameters + 25 * 2**20


def test_damaged_files_are_refused_or_read_soundly(tmp_path, rng):
    tensors, _ = ternary_tensors(rng, "tq2_0", iter([0.25, 0.5, 0.125, 1.0, 0.375, 2.0, 0.75]))
    path, keys = tmp_path / "a", {"general.architecture": "llama", **metadata(BIG, "llama")}
    gpu_ops.write_gguf(path, tensors, keys)
    whole, refused = path.read_bytes(), 0
    models.load(path)
    tracemalloc.start()
    for _ in range(200):
        path.write_bytes(mutant(whole, rng))
        try:
            weights, config = models.load(path)
        except GpuOpsError:
            refused += 1
        else:
            models.Llama.of(weights.arrays(), config)
    assert tracemalloc.get_traced_memory()[1] < 40 * len(whole)
    tracemalloc.stop()
    assert refused > 100


def test_tensors_that_share_bytes_are_refused(tmp_path):
    """Otherwise a small file would become as many arrays as it has tensor names."""
    keys = {"general.architecture": "llama", **metadata(LLAMA, "llama")}
    gpu_ops.write_gguf(tmp_path / "a", stored(made(LLAMA), LLAMA, "llama"), keys)
    data = (tmp_path / "a").read_bytes()
    at = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16 + 4
    (tmp_path / "a").write_bytes(data[:at] + bytes(8) + data[at + 8 :])
    with pytest.raises(FormatError, match=r"begins at byte \d+, within the one before it"):
        models.load(tmp_path / "a")
    (tmp_path / "a").write_bytes(data[:-1])
    with pytest.raises(FormatError, match="should end at byte"):
        models.load(tmp_path / "a")
