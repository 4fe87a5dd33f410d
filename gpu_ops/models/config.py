"""Config of a Llama: sizes, and the options of its ops."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.models.config_hf import ACTIVATIONS, FAMILIES, LAYER_TYPES, SIZES, options_from_hf, scaling_to_hf
from gpu_ops.reference.gemm.swiglu import Activation

__all__ = ["PROJECTIONS", "Layer", "LlamaConfig"]

PROJECTIONS = ("qkv", "o", "gate_up", "down")
_WHO = "LlamaConfig"


@dataclass(frozen=True)
class Layer:
    """Options in which the layers of one model may differ; see :class:`LlamaConfig`."""

    theta: float | None = 10000.0
    scaling: RopeScaling | None = None
    window: int = -1

    def __post_init__(self) -> None:
        if self.theta is not None:
            checks.number(_WHO, "theta", self.theta, above=0.0)
        if self.scaling is not None:  # drop its theta, and a partial_rotary_factor of 1
            partial = self.scaling.partial_rotary_factor
            scaling = replace(
                self.scaling, theta=None, partial_rotary_factor=None if partial == 1.0 else partial
            )
            object.__setattr__(self, "scaling", scaling)
        checks.integer(_WHO, "window", self.window, low=-1)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a Llama-shaped decoder: Llama, Mistral, Ministral, Qwen2, Qwen3, SmolLM, Granite, Gemma 2
    and 3, BitNet b1.58, and models of their architecture.

    Parameters
    ----------
    vocab, hidden, ffn, nlayers : int
    nheads, nheads_kv : int
        Number of heads of queries, and of keys and values; nheads is a multiple of nheads_kv (default: equal).
    head_dim : int
        Default: hidden / nheads.
    eps : float
        Epsilon of the RMS norms.
    theta : float or None
        Base of the rotary frequencies; None: queries and keys are not rotated. ``scaling`` is a
        :class:`gpu_ops.RopeScaling`, or None.
    window : int
        Number of keys that a query sees before its own; -1: all of them.
    activation : str
        Activation, see :func:`gpu_ops.swiglu`.
    tied : bool
        Whether the output layer's weight is the embedding table.
    biases : tuple of str
        Projections with a bias, from ``qkv``, ``o``, ``gate_up`` and ``down``.
    qk_norm : bool
        Whether an RMS norm over each head of queries and keys comes before their rotation.
    layers : tuple of Layer
        One per layer, in place of ``theta``, ``scaling`` and ``window``, if layers differ.
    softmax_scale : float or None
        Option of :func:`gpu_ops.attention`, like ``softcap``.
    weight_offset : float
        Added to the weights of the norms: 1 in Gemma.
    sub_norms : bool
        Norms of the inputs of ``o`` and ``down``, as in BitNet b1.58.
    post_norms : bool
        Norms of the outputs of ``o`` and ``down`` before they are added to the residual stream, as in Gemma.
    embedding_scale : float or None
        Factor of the embeddings. None: sqrt(hidden), rounded to the weights' dtype, as in Gemma.
    residual_scale : float
        Factor of the output that each half of a layer adds to the residual stream (Granite). It costs nothing: the
        stream is stored divided by it, and norms give the same result with their eps divided by its square.
    logits_scaling : float
        Divisor of the logits (Granite).
    logits_softcap : float
        Logits then become ``logits_softcap * tanh(logits / logits_softcap)`` (Gemma 2); 0: no cap.

    Examples
    --------
    >>> from gpu_ops.models import LlamaConfig
    >>> config = LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> config.head_dim, config.parameters
    (16, 125248)
    """

    vocab: int
    hidden: int
    ffn: int
    nlayers: int
    nheads: int
    nheads_kv: int = 0
    head_dim: int = 0
    eps: float = 1e-5
    theta: float | None = 10000.0
    scaling: RopeScaling | None = None
    window: int = -1
    activation: str = "silu"
    tied: bool = False
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    layers: tuple[Layer, ...] = ()
    softmax_scale: float | None = None
    softcap: float = 0.0
    weight_offset: float = 0.0
    sub_norms: bool = False
    post_norms: bool = False
    embedding_scale: float | None = 1.0
    residual_scale: float = 1.0
    logits_scaling: float = 1.0
    logits_softcap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "ffn", "nheads"):
            checks.integer(_WHO, name, getattr(self, name), low=1)
        checks.integer(_WHO, "nlayers", self.nlayers, low=0)
        checks.one_of(_WHO, "activation", self.activation, get_args(Activation))
        object.__setattr__(self, "nheads_kv", self.nheads_kv or self.nheads)
        if self.nheads % checks.integer(_WHO, "nheads_kv", self.nheads_kv, low=1):
            raise OptionError(f"{_WHO}: nheads={self.nheads} is no multiple of nheads_kv={self.nheads_kv}")
        if not self.head_dim and self.hidden % self.nheads:
            raise OptionError(
                f"{_WHO}: hidden={self.hidden} is no multiple of nheads={self.nheads}; pass head_dim="
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.nheads)
        if checks.integer(_WHO, "head_dim", self.head_dim, low=2) % 2:
            raise OptionError(f"{_WHO}: head_dim={self.head_dim} is odd; rotary embedding turns pairs")
        for name in ("qk_norm", "sub_norms", "post_norms"):
            checks.flag(_WHO, name, getattr(self, name))
        self._check_numbers()
        if self.softmax_scale == self.head_dim**-0.5:  # equal models are equal configs
            object.__setattr__(self, "softmax_scale", None)
        biased = [checks.one_of(_WHO, "biases", part, PROJECTIONS) for part in self.biases]
        object.__setattr__(self, "biases", tuple(part for part in PROJECTIONS if part in biased))
        layers = tuple(self.layers)
        if len(layers) not in (0, self.nlayers) or not all(isinstance(x, Layer) for x in layers):
            raise OptionError(
                f"{_WHO}: layers= must hold a models.Layer for each of nlayers={self.nlayers}, or nothing; "
                f"got {len(layers)}"
            )
        everywhere = Layer(self.theta, self.scaling, self.window)
        if layers:  # equal models are equal configs
            everywhere = layers[0] if len(set(layers)) == 1 else Layer()
        for name, value in vars(everywhere).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "layers", layers if len(set(layers)) > 1 else ())

    def _check_numbers(self) -> None:
        """Check numbers that kernels compute with, in float32 for all dtypes but float64."""
        computable = functools.partial(checks.computable, _WHO, dtype="float32")
        computable("eps", self.eps, low=0.0)
        computable("weight_offset", self.weight_offset)
        for name in ("softcap", "logits_softcap"):
            computable(name, getattr(self, name), low=0.0, divides=True)
        for name in ("softmax_scale", "embedding_scale", "residual_scale", "logits_scaling"):
            value, divides = getattr(self, name), name in ("residual_scale", "logits_scaling")
            if value is not None or divides:
                checks.number(_WHO, name, value, above=0.0)
                computable(name, value, divides=divides)
        computable("eps / residual_scale**2", self.stream_eps)
        computable("embedding_scale / residual_scale", self.embedding_factor("float32"))

    @functools.cached_property
    def window_size(self) -> tuple[int, int]:
        """Option ``window_size`` of :func:`gpu_ops.attention`."""
        return (self.window, 0) if self.window >= 0 else (-1, -1)

    @property
    def attention_options(self) -> dict[str, Any]:
        """Options of :func:`gpu_ops.attention`."""
        return {
            "causal": True,
            "window_size": self.window_size,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }

    @functools.cached_property
    def stream_eps(self) -> float:
        """Epsilon of the norms of the residual stream, which is stored divided by ``residual_scale``."""
        return self.eps / self.residual_scale**2

    def embedding_factor(self, dtype: npt.DTypeLike) -> float:
        """Factor of the rows of an embedding table of this dtype."""
        scale = self.embedding_scale
        if scale is None:
            scale = float(np.asarray(math.sqrt(self.hidden)).astype(dtype))
        return scale / self.residual_scale

    @functools.cached_property
    def head_slices(self) -> tuple[slice, slice, slice]:
        """Slices of the heads of q, k and v among those of ``qkv``."""
        q, kv = self.nheads, self.nheads_kv
        return slice(0, q), slice(q, q + kv), slice(q + kv, q + 2 * kv)

    @functools.cached_property
    def by_layer(self) -> tuple[LlamaConfig, ...]:
        """Config of each layer: this one with the layer's options."""
        if not self.layers:
            return (self,) * self.nlayers
        per_layer = [{f.name: getattr(layer, f.name) for f in fields(Layer)} for layer in self.layers]
        return tuple(replace(self, layers=(), **options) for options in per_layer)

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of a block. ``qkv`` and ``gate_up`` join several projections of one input."""
        h, d = self.hidden, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (h,),
            "qkv": ((self.nheads + 2 * self.nheads_kv) * d, h),
            "o": (h, self.nheads * d),
            "mlp_norm": (h,),
            "gate_up": (2 * self.ffn, h),
            "down": (h, self.ffn),
        }
        shapes |= {f"{part}_bias": shapes[part][:1] for part in self.biases}
        if self.qk_norm:
            shapes |= {"q_norm": (d,), "k_norm": (d,)}
        if self.sub_norms:
            shapes |= {"attn_sub_norm": (self.nheads * d,), "ffn_sub_norm": (self.ffn,)}
        if self.post_norms:
            shapes |= {"attn_post_norm": (h,), "mlp_post_norm": (h,)}
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name; weights of layers are called ``layers.<i>.<part>``."""
        h, block = self.hidden, self.block_shapes()
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, h)}
        for i in range(self.nlayers):
            shapes |= {f"layers.{i}.{part}": shape for part, shape in block.items()}
        shapes["norm"] = (h,)
        return shapes if self.tied else shapes | {"lm_head": (self.vocab, h)}

    def joined(self) -> dict[str, tuple[int, ...]]:
        """Number of rows of each projection in ``qkv`` and in ``gate_up``."""
        q, kv = self.nheads * self.head_dim, self.nheads_kv * self.head_dim
        return {"qkv": (q, kv, kv), "gate_up": (self.ffn, self.ffn)}

    @property
    def parameters(self) -> int:
        """Number of elements of all weights."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    @classmethod
    def from_hf(cls, config: Any) -> LlamaConfig:
        """Read a Hugging Face config: a dict, or the path of ``config.json`` or its folder.

        ``model_type`` is one of llama, mistral, ministral, qwen2, qwen3, smollm3, granite, bitnet, gemma2 and
        gemma3_text. If it is missing, ``architectures`` selects the family, and without both the model is a Llama.
        Entries that the family does not have are refused if they would change the model. As in transformers,
        ``rope_scaling`` replaces ``rope_parameters`` if a config has both, ``partial_rotary_factor`` is ignored
        (these families rotate whole heads; with a rope type other than default it is refused, as they cannot run
        it), and a mistral with ``layer_types`` is a ministral.

        Raises
        ------
        OptionError
            An entry is missing, out of range, or requests an option that the family does not have.
        """
        options, layers = options_from_hf(config)
        return cls(**options, layers=tuple(Layer(*values) for values in layers))

    def to_hf(self, model_type: str | None = None) -> dict[str, Any]:
        """Return the equivalent entries of a Hugging Face config, in the spelling that every version reads.

        ``model_type``: the family to write; default: the first that has these options.

        Raises
        ------
        OptionError
            The family, or every one, lacks one of these options.

        Examples
        --------
        >>> from gpu_ops.models import LlamaConfig
        >>> config = LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, qk_norm=True)
        >>> config.to_hf()["model_type"], LlamaConfig.from_hf(config.to_hf()) == config
        ('qwen3', True)
        """
        return _entries(self, model_type)


def _entries(config: LlamaConfig, model_type: Any) -> dict[str, Any]:
    """Entries that the family reads back as this config; see :meth:`gpu_ops.models.LlamaConfig.to_hf`."""
    who = "LlamaConfig.to_hf"
    names = FAMILIES if model_type is None else [checks.one_of(who, "model_type", model_type, FAMILIES)]
    layers = config.by_layer or (config,)
    sliding = next((c for c in layers if c.window >= 0), config)
    rotating = next((c for c in layers if c.theta is not None and c.window < 0), None)
    rotating = rotating or next((c for c in layers if c.theta is not None), config)
    window = max(c.window for c in layers)
    slides = [c.window >= 0 for c in layers]
    common = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()} | {
        "num_key_value_heads": config.nheads_kv,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "rope_theta": 10000.0 if rotating.theta is None else rotating.theta,
        **({} if rotating.scaling is None else scaling_to_hf(rotating.scaling)),
    }
    scale = config.softmax_scale
    special = {
        "attention_bias": "o" in config.biases,
        "mlp_bias": "down" in config.biases,
        "use_sliding_window": window >= 0,
        "sliding_window": window + 1 if window >= 0 else None,
        "max_window_layers": slides.index(True) if any(slides) else config.nlayers,
        "layer_types": [LAYER_TYPES[x] for x in slides],
        "no_rope_layers": [int(c.theta is not None) for c in layers],
        "rope_local_base_freq": sliding.theta,
        "attn_logit_softcapping": config.softcap or None,
        "final_logit_softcapping": config.logits_softcap or None,
        "query_pre_attn_scalar": config.head_dim if scale is None else _whole(scale**-2),
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logits_scaling,
    }
    act = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    for family_name in names:
        family = FAMILIES[family_name]
        entries = {"architectures": [family.architecture], "model_type": family_name, **common}
        entries |= {family.activation: act, **{name: special[name] for name in family.reads}}
        if type(config).from_hf(entries) == config:
            return entries
    raise OptionError(f"{who}: {' and '.join(names)} cannot have these options together: {config}")


def _whole(x: float) -> float:
    """Round ``x`` to an integer if it differs only by rounding."""
    return round(x) if abs(x - round(x)) < 1e-9 * x else x
