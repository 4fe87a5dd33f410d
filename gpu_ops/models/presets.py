"""Configs of published models by name, for estimates; without weights."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from gpu_ops.errors import OptionError
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.models.config import Layer, LlamaConfig

__all__ = ["PRESETS", "find_config"]


def _scaling(factor: float) -> RopeScaling:
    """Rope scaling of Llama 3.1 and 3.2."""
    return RopeScaling.from_hf(
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    )


def _llama_3_2(hidden: int, ffn: int, nlayers: int, nheads: int, head_dim: int) -> LlamaConfig:
    sizes = (128256, hidden, ffn, nlayers, nheads, 8, head_dim)
    return LlamaConfig(*sizes, theta=500000.0, scaling=_scaling(32.0), tied=True)


_GEMMA: dict[str, Any] = {
    "weight_offset": 1.0,
    "post_norms": True,
    "embedding_scale": None,
    "activation": "gelu_tanh",
    "eps": 1e-6,
    "tied": True,
}
_SLIDES, _SEES_ALL = Layer(window=4095), Layer()
_SLIDES_3, _SEES_ALL_3 = Layer(window=511), Layer(1e6)

#: From the config.json of each model.
PRESETS: dict[str, LlamaConfig] = {
    #                          vocab  hidden ffn layers heads kv
    "smollm2-135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, theta=100000.0, tied=True),
    "tinyllama-1.1b": LlamaConfig(32000, 2048, 5632, 22, 32, 4),
    "llama-2-7b": LlamaConfig(32000, 4096, 11008, 32, 32),
    "llama-2-13b": LlamaConfig(32000, 5120, 13824, 40, 40),
    "llama-3-8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, theta=500000.0),
    "llama-3-70b": LlamaConfig(128256, 8192, 28672, 80, 64, 8, theta=500000.0),
    "llama-3-405b": LlamaConfig(128256, 16384, 53248, 126, 128, 8, theta=500000.0, scaling=_scaling(8.0)),
    "llama-3.2-1b": _llama_3_2(2048, 8192, 16, 32, 64),
    "llama-3.2-3b": _llama_3_2(3072, 8192, 28, 24, 128),
    "mistral-7b": LlamaConfig(32000, 4096, 14336, 32, 32, 8, window=4095),
    "bitnet-b1.58-2b": LlamaConfig(
        *(128256, 2560, 6912, 30, 20, 5), theta=500000.0, sub_norms=True, activation="relu2", tied=True
    ),
    "gemma-2-2b": LlamaConfig(
        *(256000, 2304, 9216, 26, 8, 4, 256),
        **_GEMMA,
        softcap=50.0,
        logits_softcap=30.0,
        layers=(_SLIDES, _SEES_ALL) * 13,
    ),
    "gemma-3-1b": LlamaConfig(
        *(262144, 1152, 6912, 26, 4, 1, 256),
        **_GEMMA,
        qk_norm=True,
        layers=((*(_SLIDES_3,) * 5, _SEES_ALL_3) * 5)[:26],
    ),
}


def find_config(op: str, name: str) -> LlamaConfig:
    """Find a preset by name, ignoring punctuation, or read the config of a folder or of a ``config.json``.

    Raises
    ------
    OptionError
        There is neither; the message has the nearest name.

    Examples
    --------
    >>> find_config("plan", "Llama3-8B").nlayers
    32
    """
    plain = {_plain(known): known for known in PRESETS}
    if _plain(name) in plain:
        return PRESETS[plain[_plain(name)]]
    if not _exists(name):
        near = difflib.get_close_matches(_plain(name), plain, n=1)
        hint = f"did you mean {plain[near[0]]}? " if near else ""
        raise OptionError(f"{op}: no model and no file {name!r}; {hint}models: {', '.join(PRESETS)}")
    if Path(name).is_file() and Path(name).suffix != ".json":
        raise OptionError(f"{op}: {name} is not a config.json; pass that file, its folder, or a model's name")
    return LlamaConfig.from_hf(name)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a name; with a NUL
        return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
