"""Projections of a block whose weight is not a plain array: LoRA adapters on a frozen base, ternary weights trained
through latent floats, ternary weights whose input the preceding norm quantises, and parts of weights that several
processes share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.core.allocator import new_array
from gpu_ops.core.checks import integer, one_of
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.models.config import PROJECTIONS, LlamaConfig
from gpu_ops.models.elementwise import added
from gpu_ops.models.weights import Block, Llama
from gpu_ops.ops.gemm.linear import linear, linear_backward
from gpu_ops.ops.norm.rmsnorm import rmsnorm
from gpu_ops.ops.norm.rmsnorm_quant import rmsnorm_quant_int8
from gpu_ops.ops.weights.ternary import ternary_quantize
from gpu_ops.ops.weights.ternary_linear import ternary_matmul_backward
from gpu_ops.ops.weights.ternary_matmul import ternary_matmul
from gpu_ops.reference.weights.packed_formats import FORMATS, PLAIN

__all__ = [
    "PROJECTIONS",
    "Codes",
    "Deferred",
    "Int8Input",
    "Latent",
    "Lora",
    "Projection",
    "initial_lora",
    "lora_grads",
    "lora_shapes",
    "merged",
    "normed",
    "project",
    "project_backward",
    "weight_backward",
    "with_int8_input",
    "with_latent",
    "with_lora",
    "with_packed",
]


@dataclass
class Lora:
    """LoRA weight ``x @ base.T + (x @ a.T) @ b.T``: a frozen base and a trained low-rank pair (Hu et al. 2021).

    ``b`` includes the paper's alpha / rank. In gradients ``base`` is None.
    """

    base: Any
    """array (out, in), or a :class:`gpu_ops.PackedMatrix` or :class:`gpu_ops.TernaryMatrix`"""
    a: Any
    """(rank, in)"""
    b: Any
    """(out, rank)"""


@dataclass
class Latent:
    """Ternary weights in training: every call quantises ``weight`` again, and the gradient passes to it unchanged
    (straight through), as in the training of BitNet b1.58."""

    weight: Any
    """(out, in), float"""
    activations: str = "int8"

    def quantized(self) -> Any:
        """Return the quantised weights that the layer multiplies by."""
        return ternary_quantize(self.weight)


class Projection(ABC):
    """Base class of weights with their own product: :func:`project`, :func:`project_backward` and
    :func:`weight_backward` call these methods."""

    @abstractmethod
    def project(self, x: Any, bias: Any, residual: Any) -> Any: ...

    @abstractmethod
    def project_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> Any: ...

    @abstractmethod
    def weight_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> None: ...


@dataclass
class Int8Input:
    """Ternary weights with int8 input from the preceding norm (W1.58A8, as in BitNet b1.58): ``normed`` quantises in
    the pass that normalises. With a float input they act like the plain matrix."""

    weight: TernaryMatrix


class Codes(NamedTuple):
    """int8 activations ``q * scale``, in place of an array of ``dtype``."""

    q: Any
    scale: Any
    """one per token"""
    dtype: Any


def normed(x: Any, norm: Any, weight: Any, **options: Any) -> Any:
    """``rmsnorm(x, norm, **options)`` as the input of ``weight``; int8 if that is an :class:`Int8Input`."""
    if isinstance(weight, Int8Input):
        q, scale, _ = rmsnorm_quant_int8(x, norm, **options)
        return Codes(q, scale, x.dtype)
    return rmsnorm(x, norm, **options)


def project(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
    """Compute ``x @ weight.T + bias + residual``. ``x``: an array, or the result of ``normed`` for ``weight``."""
    if isinstance(weight, Projection):
        return weight.project(x, bias, residual)
    if isinstance(weight, Lora):
        y = project(x, weight.base, bias, residual)
        return linear(linear(x, weight.a), weight.b, residual=y, out=y)
    if isinstance(weight, _TERNARY):
        packed, activations = _packed(weight)
        if isinstance(x, Codes):
            y = ternary_matmul(x.q, packed, x_scale=x.scale, out_dtype=x.dtype)
        else:
            y = ternary_matmul(x, packed, activations=activations)
        return added(added(y, bias), residual)
    return linear(x, weight, bias, residual=residual)


def project_backward(dy: Any, x: Any, weight: Any, grad: Any, dbias: Any = None) -> Any:
    """Return the gradient for x; add those of weight and bias to ``grad`` and ``dbias``, unless these are None."""
    if isinstance(weight, Projection):
        return weight.project_backward(dy, x, grad, dbias)
    if isinstance(weight, Lora):
        h = linear(x, weight.a)
        dh = project_backward(dy, h, weight.b, None if grad is None else grad.b)
        dx = project_backward(dh, x, weight.a, None if grad is None else grad.a)
        return added(dx, project_backward(dy, x, weight.base, None, dbias))
    if isinstance(weight, _TERNARY):
        packed, activations = _packed(weight)
        if grad is None:
            dx = ternary_matmul_backward(dy, x, packed, activations=activations, only="dx")
        else:
            dx, dweight = ternary_matmul_backward(dy, x, packed, activations=activations)
            added(grad, dweight)
    elif grad is None:
        dx = linear_backward(dy, x, weight, only="dx")
    elif dbias is not None:
        return linear_backward(dy, x, weight, has_bias=True, dweight=grad, dbias=dbias)[0]
    else:
        return linear_backward(dy, x, weight, dweight=grad)[0]
    if dbias is not None:  # computed as that of a layer with one input
        unread = new_array((dy.shape[-1], 1), dy.dtype, "unread", on_host=isinstance(dy, np.ndarray))
        linear_backward(dy, x[..., :1], unread, only="weights", has_bias=True, dbias=dbias)
    return dx


def weight_backward(dy: Any, x: Any, weight: Any, grad: Any, dbias: Any = None) -> None:
    """Add the gradients of weight and bias to ``grad`` and ``dbias``, without the gradient for x.

    Raises
    ------
    OptionError
        The weight is neither an array nor a part of one.
    """
    if isinstance(weight, Projection):
        weight.weight_backward(dy, x, grad, dbias)
    elif isinstance(weight, (Lora, PackedMatrix, *_TERNARY)):
        raise OptionError(f"weight_backward: the weight is {type(weight).__name__}, and not an array")
    elif dbias is not None:
        linear_backward(dy, x, weight, only="weights", has_bias=True, dweight=grad, dbias=dbias)
    else:
        linear_backward(dy, x, weight, only="weights", dweight=grad)


@dataclass(frozen=True)
class Deferred(Projection):
    """A weight whose gradient is computed later: ``queue`` receives functions without arguments."""

    weight: Any
    queue: list[Callable[[], None]]

    def project(self, x: Any, bias: Any, residual: Any) -> Any:
        return project(x, self.weight, bias, residual)

    def project_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> Any:
        self.queue.append(lambda: self.weight_backward(dy, x, grad, dbias))
        return project_backward(dy, x, self.weight, None)

    def weight_backward(self, dy: Any, x: Any, grad: Any, dbias: Any) -> None:
        weight_backward(dy, x, self.weight, grad, dbias)


_TERNARY = (Latent, Int8Input, TernaryMatrix)


def _packed(weight: Any) -> tuple[Any, str]:
    if isinstance(weight, Latent):
        return weight.quantized(), weight.activations
    return weight.weight if isinstance(weight, Int8Input) else weight, "int8"


def lora_shapes(
    config: LlamaConfig, rank: int, projections: Iterable[str] = PROJECTIONS
) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's adapters by name: ``layers.0.qkv.a``, (rank, in), and ``layers.0.qkv.b``, (out, rank)."""
    rank, parts = integer("lora_shapes", "rank", rank, low=1), _checked(projections)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in config.shapes().items():
        part = name.rpartition(".")[2]
        if name.startswith("layers.") and part in parts:
            shapes |= {f"{name}.a": (rank, shape[1]), f"{name}.b": (shape[0], rank)}
    return shapes


def initial_lora(shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> dict[str, Any]:
    """Initial float32 adapters: a is normal with variance 1 / in, b is zero, so that the model equals its base."""
    seed, adapters = integer("initial_lora", "seed", seed, low=0), {}
    for i, (name, shape) in enumerate(shapes.items()):
        if len(shape) != 2 or min(shape) < 1:
            raise ShapeError(
                f"initial_lora: {name} has shape {tuple(shape)}, expected (rank, in) or (out, rank)"
            )
        scale = np.float32(math.sqrt(1 / shape[1]) if name.endswith(".a") else 0.0)
        adapters[name] = np.random.default_rng((seed, i)).standard_normal(shape, np.float32) * scale
    return adapters


def with_lora(weights: Llama, adapters: Mapping[str, Any]) -> Llama:
    """Return the model with these adapters on its projections; arrays are shared."""
    return replace(weights, layers=_lora_layers(weights.layers, adapters))


def lora_grads(weights: Llama, grads: Mapping[str, Any]) -> Llama:
    """Gradients of adapters, for ``grads`` of :func:`gpu_ops.models.loss_and_grads`; all other weights are frozen."""
    frozen = Block(**{f.name: None for f in fields(Block)})
    return Llama(None, _lora_layers([frozen] * len(weights.layers), grads), None, None)


def _lora_layers(layers: Sequence[Block], adapters: Mapping[str, Any]) -> list[Block]:
    adapted, used = [], 0
    for i, layer in enumerate(layers):
        names = {part: f"layers.{i}.{part}" for part in PROJECTIONS}
        present = {p: n for p, n in names.items() if f"{n}.a" in adapters and f"{n}.b" in adapters}
        used += 2 * len(present)
        for p in present:
            if isinstance(getattr(layer, p), Projection):
                raise OptionError(f"with_lora: layers.{i}.{p} is divided among ranks, and adapters are not")
        parts = {
            p: Lora(getattr(layer, p), adapters[f"{n}.a"], adapters[f"{n}.b"]) for p, n in present.items()
        }
        adapted.append(replace(layer, **parts))
    if used != len(adapters):
        raise OptionError(
            f"with_lora: {len(adapters) - used} of {len(adapters)} adapters belong to no projection of the "
            f"{len(layers)} layers; their names are layers.<i>.<{'|'.join(PROJECTIONS)}>.<a|b>"
        )
    return adapted


def merged(weight: Lora) -> Any:
    """Merge the base and its adapter into one array, rounded once to the base's dtype (the adapter's, of a packed
    base: :func:`gpu_ops.quantize` packs the result again)."""
    for name in ("base", "a", "b"):
        if not hasattr(getattr(weight, name), "ndim"):
            raise DTypeError(f"merged: {name} is {type(getattr(weight, name)).__name__}, expected an array")
    a_transposed = np.ascontiguousarray(weight.a.T) if isinstance(weight.a, np.ndarray) else weight.a.T.copy()
    base = weight.base.dequantize(weight.b.dtype) if isinstance(weight.base, PackedMatrix) else weight.base
    return linear(weight.b, a_transposed, residual=base)


def with_latent(
    weights: Llama, projections: Iterable[str] = PROJECTIONS, *, activations: str = "int8"
) -> Llama:
    """Return the model with ternary projections whose latent floats are its weights."""
    parts = _checked(projections)
    layers = [
        replace(layer, **{part: Latent(getattr(layer, part), activations) for part in parts})
        for layer in weights.layers
    ]
    return replace(weights, layers=layers)


def with_int8_input(weights: Llama, projections: Iterable[str] = ("qkv", "gate_up")) -> Llama:
    """Return the model with ternary projections that take int8 from the preceding norms, by default all that have
    one. Those in tq1_0 and tq2_0 are converted by :meth:`gpu_ops.TernaryMatrix.from_packed`.

    Raises
    ------
    OptionError
        A projection is not a :class:`gpu_ops.TernaryMatrix`; :func:`gpu_ops.ternary_quantize` makes one.
    """
    parts = _checked(projections)
    layers = [
        replace(layer, **{part: Int8Input(_ternary(i, part, getattr(layer, part))) for part in parts})
        for i, layer in enumerate(weights.layers)
    ]
    return replace(weights, layers=layers)


def _ternary(layer: int, part: str, weight: Any) -> TernaryMatrix:
    what = f"with_int8_input: layers.{layer}.{part}"
    if isinstance(weight, PackedMatrix):
        try:
            return TernaryMatrix.from_packed(weight)
        except (OptionError, FormatError) as error:
            raise type(error)(f"{what}: {error}") from error
    if not isinstance(weight, TernaryMatrix):
        raise OptionError(
            f"{what} is {type(weight).__name__}, not a TernaryMatrix; make one with gpu_ops.ternary_quantize"
        )
    return weight


def with_packed(weights: Llama) -> Llama:
    """Return the model with packed floats, :class:`gpu_ops.PackedMatrix` of its matrices' dtype, for inference on the
    CPU.

    Decoding is faster, and results have the same bits. Arrays of float16, bfloat16 and float32 in host memory are
    packed if their rows are multiples of 32; other weights are shared. The first product with a matrix packs it and
    drops its array, so that memory holds each once if nothing else refers to the arrays. Gradients need arrays.

    Examples
    --------
    >>> from gpu_ops import models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=128, nlayers=1, nheads=2, tied=True)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> models.with_packed(weights).layers[0].down
    PackedMatrix((64, 128), float32, 32 bits per weight)
    """
    layers = [
        replace(layer, **{part: _packed_floats(getattr(layer, part)) for part in PROJECTIONS})
        for layer in weights.layers
    ]
    embed = _packed_floats(weights.embed)
    head = embed if weights.lm_head is weights.embed else _packed_floats(weights.lm_head)
    return replace(weights, layers=layers, embed=embed, lm_head=head)


def _packed_floats(weight: Any) -> Any:
    from gpu_ops.kernels.common.cpu.packing import in_registers, packed

    if not isinstance(weight, np.ndarray) or weight.dtype.name not in PLAIN:
        return weight
    name = weight.dtype.name
    if weight.shape[1] % FORMATS[name].block or in_registers(packed(name)):  # tile registers read rows
        return weight
    blocks = np.ascontiguousarray(weight).view(np.uint8)
    return PackedMatrix(blocks, weight.shape, name, dtype=weight.dtype)


def _checked(projections: Iterable[str]) -> list[str]:
    return [one_of("models", "projections", part, PROJECTIONS) for part in projections]
