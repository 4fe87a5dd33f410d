"""Formats of the tensors of a GGUF file: which one each tensor has in a mix such as q4_k_m, as llama.cpp chooses it.

Norms and biases are float32. Of the matrices, those that lose most by few bits get more of them, by the rules of
llama.cpp's ``llama_tensor_get_type`` without an importance matrix, for models without experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_ops.formats.gguf_header import PACKED_TYPES
from gpu_ops.reference.weights.packed_formats import FORMATS

__all__ = ["MIXES", "Mix", "ModelSizes", "substitutes", "tensor_format"]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that decide formats."""

    nlayers: int
    nheads: int
    nheads_kv: int
    tied: bool
    """Whether the table of embeddings is the output layer too."""


Rule = Callable[[int, ModelSizes], bool]
"""Whether a layer gets the larger format."""


def _no_layer(layer: int, sizes: ModelSizes) -> bool:
    return False


def _more_bits(layer: int, sizes: ModelSizes) -> bool:
    """Layers of the first and last eighth, and every third one between them."""
    eighth = sizes.nlayers // 8
    return layer < eighth or layer >= 7 * sizes.nlayers // 8 or (layer - eighth) % 3 == 2


def _first_eighth(layer: int, sizes: ModelSizes) -> bool:
    return layer < sizes.nlayers // 8


def _first_four(layer: int, sizes: ModelSizes) -> bool:
    return layer < 4


def _shared_values(layer: int, sizes: ModelSizes) -> bool:
    """All layers, if four heads of queries or more share a head of values."""
    return sizes.nheads // sizes.nheads_kv >= 4


@dataclass(frozen=True)
class Mix:
    """Formats of a file: ``format``, and ``larger`` in the layers that ``values`` and ``down`` select."""

    file_type: int
    """Value of ``general.file_type``."""
    format: str
    larger: str = ""
    values: Rule = _no_layer
    """Layers whose ``attn_v`` is larger."""
    down: Rule = _no_layer
    """Layers whose ``ffn_down`` is larger."""
    embedding: str = ""
    """Format of the table of embeddings, if another."""


MIXES = {
    "f32": Mix(0, "float32"),
    "f16": Mix(1, "float16"),
    "bf16": Mix(32, "bfloat16"),
    "q8_0": Mix(7, "q8_0"),
    "q6_k": Mix(18, "q6_k"),
    "q5_k_m": Mix(17, "q5_k", "q6_k", _more_bits, _more_bits),
    "q5_k_s": Mix(16, "q5_k"),
    "q5_1": Mix(9, "q5_1"),
    "q5_0": Mix(8, "q5_0"),
    "q4_k_m": Mix(15, "q4_k", "q6_k", _more_bits, _more_bits),
    "q4_k_s": Mix(14, "q4_k", "q5_k", _first_four, _first_eighth),
    "q4_1": Mix(3, "q4_1"),
    "q4_0": Mix(2, "q4_0"),
    "iq4_nl": Mix(25, "iq4_nl", "q5_k", _shared_values, _first_eighth),
    "tq1_0": Mix(36, "tq1_0", embedding="q4_k"),
    "tq2_0": Mix(37, "tq2_0", embedding="q4_k"),
}
_SMALLER_BLOCKS = {
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
}  # for columns that blocks of 256 do not divide
_OUTPUT = "q6_k"
_LAYERS_70B = 80  # of a model whose attn_v is so small that more bits cost nothing


def substitutes(format: str) -> set[str]:
    """Formats that tensors of a mix have only where 256 does not divide their rows."""
    return {*_SMALLER_BLOCKS.values(), "float16"} - {MIXES[format].format}


def tensor_format(mix: Mix, name: str, shape: tuple[int, ...], sizes: ModelSizes) -> str:
    """Format of a tensor by its GGUF name: a format of :class:`gpu_ops.PackedMatrix`, or a dtype's name.

    >>> sizes = ModelSizes(nlayers=32, nheads=32, nheads_kv=8, tied=False)
    >>> [tensor_format(MIXES["q4_k_m"], f"blk.{i}.ffn_down.weight", (4096, 14336), sizes) for i in (0, 4, 31)]
    ['q6_k', 'q4_k', 'q6_k']
    """
    if len(shape) < 2:
        return "float32"
    if mix.format not in PACKED_TYPES:
        return mix.format
    chosen, cols = mix.format, shape[1]
    if name == "output.weight" or (sizes.tied and name == "token_embd.weight"):
        if chosen != "q8_0":
            chosen = "q8_0" if cols % FORMATS[chosen].block else _OUTPUT
    elif name == "token_embd.weight":
        chosen = mix.embedding or chosen
    elif name.startswith("blk."):
        _, layer, module, _ = name.split(".")
        rules = {"attn_v": mix.values, "ffn_down": mix.down}
        if rules.get(module, _no_layer)(int(layer), sizes):
            chosen = mix.larger
        shared = sizes.nlayers == _LAYERS_70B and sizes.nheads != sizes.nheads_kv
        if module == "attn_v" and shared and chosen == "q4_k":
            chosen = "q5_k"
    if cols % FORMATS[chosen].block:
        chosen = _SMALLER_BLOCKS.get(chosen, chosen)
    return "float16" if cols % FORMATS[chosen].block else chosen
