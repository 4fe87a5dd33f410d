# fmt: off
"""Written by scripts/stubs.py: do not edit. The functions' docstrings are in gpu_ops/ops.

An op's result has the type of one of its arrays (NumPy's, CuPy's, torch's), and options such as return_lse change the
number of results. The type of a decorator cannot say that; overloads can, and each repeats all parameters.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu_ops import compat as compat
from gpu_ops import distributed as distributed
from gpu_ops import emulator as emulator
from gpu_ops import errors as errors
from gpu_ops import formats as formats
from gpu_ops import inference as inference
from gpu_ops import memory as memory
from gpu_ops import models as models
from gpu_ops import training as training
from gpu_ops.core.arrays import AnyArray, ArrayT, NumPyT
from gpu_ops.core.autotune import autotune as autotune
from gpu_ops.core.op import explain as explain
from gpu_ops.core.op import workspace_size as workspace_size
from gpu_ops.formats.block_mask import BlockMask as BlockMask
from gpu_ops.formats.gguf_writer import write_gguf as write_gguf
from gpu_ops.formats.packed_matrix import PackedMatrix as PackedMatrix
from gpu_ops.formats.packed_matrix import quantize as quantize
from gpu_ops.formats.rope_scaling import RopeScaling as RopeScaling
from gpu_ops.formats.ternary_files import read_bitnet as read_bitnet
from gpu_ops.formats.ternary_files import read_gguf as read_gguf
from gpu_ops.formats.ternary_matrix import TernaryMatrix as TernaryMatrix
from gpu_ops.ops.weights.ternary_linear import TernaryLinear as TernaryLinear
from gpu_ops.ops.weights.ternary_model import quantize_model as quantize_model

__version__: str

__all__ = [
    "BlockMask", "PackedMatrix", "RopeScaling", "TernaryLinear", "TernaryMatrix", "__version__", "adamw_step",
    "attention", "attention_backward", "attention_decode", "attention_merge", "attention_varlen",
    "attention_varlen_backward", "autotune", "cross_entropy", "cross_entropy_backward", "dropout",
    "dropout_backward", "embedding", "embedding_backward", "errors", "explain", "global_norm", "layernorm",
    "layernorm_backward", "linear", "linear_backward", "linear_cross_entropy", "quantize", "quantize_model",
    "read_bitnet", "read_gguf", "rmsnorm", "rmsnorm_backward", "rmsnorm_quant_int8", "rope", "rope_append_kv",
    "rope_backward", "sample", "softmax", "softmax_backward", "swiglu", "swiglu_backward", "swiglu_mlp",
    "swiglu_mlp_backward", "ternary_matmul", "ternary_matmul_backward", "ternary_pack", "ternary_quantize",
    "ternary_unpack", "workspace_size", "write_gguf",
]

def adamw_step(
    params: AnyArray, grads: AnyArray, m: AnyArray | tuple[AnyArray, AnyArray],
    v: AnyArray | tuple[AnyArray, AnyArray], *, step: int | AnyArray, lr: float | AnyArray,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-08, weight_decay: float = 0.0,
    decay_mask: AnyArray | None = None, grad_scale: float | AnyArray = 1.0, skip: AnyArray | None = None,
    master: AnyArray | None = None, rounding: str = "nearest", seed: int = 0, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> None: ...

@overload
def attention(
    q: NDArray[Any], k: AnyArray, v: AnyArray, *, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0,
    seed: int | AnyArray | None = None, bias: AnyArray | None = None, block_mask: BlockMask | None = None,
    q_start: int | None = None, k_start: int | None = None, layout: str = "bshd",
    return_lse: Literal[False] = False, out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None, layout: str = "bshd", return_lse: Literal[False] = False,
    out_dtype: DTypeLike | None = None, lse_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def attention(
    q: NDArray[Any], k: AnyArray, v: AnyArray, *, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0,
    seed: int | AnyArray | None = None, bias: AnyArray | None = None, block_mask: BlockMask | None = None,
    q_start: int | None = None, k_start: int | None = None, layout: str = "bshd", return_lse: Literal[True],
    out_dtype: DTypeLike | None = None, lse_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None, layout: str = "bshd", return_lse: Literal[True],
    out_dtype: DTypeLike | None = None, lse_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None, layout: str = "bshd", return_lse: bool = False,
    out_dtype: DTypeLike | None = None, lse_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

@overload
def attention_backward(
    dout: AnyArray, q: NDArray[Any], k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray, *,
    layout: str = "bshd", delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[False] = False, grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_backward(
    dout: AnyArray, q: ArrayT, k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray, *,
    layout: str = "bshd", delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[False] = False, grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def attention_backward(
    dout: AnyArray, q: NDArray[Any], k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray, *,
    layout: str = "bshd", delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[True], grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]: ...
@overload
def attention_backward(
    dout: AnyArray, q: ArrayT, k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray, *,
    layout: str = "bshd", delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[True], grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, dict[str, ArrayT]]: ...
@overload
def attention_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray, *,
    layout: str = "bshd", delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: bool = False, grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
    bias: AnyArray | None = None, block_mask: BlockMask | None = None, q_start: int | None = None,
    k_start: int | None = None,
) -> Any: ...

@overload
def attention_decode(
    q: NDArray[Any], k_cache: AnyArray, v_cache: AnyArray, *, seqused_k: AnyArray,
    block_table: AnyArray | None = None, k_scale: AnyArray | None = None, v_scale: AnyArray | None = None,
    num_splits: int = 0, return_lse: Literal[False] = False, out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def attention_decode(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, *, seqused_k: AnyArray,
    block_table: AnyArray | None = None, k_scale: AnyArray | None = None, v_scale: AnyArray | None = None,
    num_splits: int = 0, return_lse: Literal[False] = False, out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
) -> ArrayT: ...
@overload
def attention_decode(
    q: NDArray[Any], k_cache: AnyArray, v_cache: AnyArray, *, seqused_k: AnyArray,
    block_table: AnyArray | None = None, k_scale: AnyArray | None = None, v_scale: AnyArray | None = None,
    num_splits: int = 0, return_lse: Literal[True], out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention_decode(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, *, seqused_k: AnyArray,
    block_table: AnyArray | None = None, k_scale: AnyArray | None = None, v_scale: AnyArray | None = None,
    num_splits: int = 0, return_lse: Literal[True], out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_decode(
    q: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *, seqused_k: AnyArray,
    block_table: AnyArray | None = None, k_scale: AnyArray | None = None, v_scale: AnyArray | None = None,
    num_splits: int = 0, return_lse: bool = False, out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
) -> Any: ...

@overload
def attention_merge(
    out1: NumPyT, lse1: AnyArray, out2: AnyArray, lse2: AnyArray, *, layout: str = "bshd",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any]]: ...
@overload
def attention_merge(
    out1: ArrayT, lse1: AnyArray, out2: AnyArray, lse2: AnyArray, *, layout: str = "bshd",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...

@overload
def attention_varlen(
    q: NDArray[Any], k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, block_table: AnyArray | None = None, seqused_k: AnyArray | None = None,
    k_scale: AnyArray | None = None, v_scale: AnyArray | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, return_lse: Literal[False] = False, out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
    dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def attention_varlen(
    q: ArrayT, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None, *,
    block_table: AnyArray | None = None, seqused_k: AnyArray | None = None, k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
    dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> ArrayT: ...
@overload
def attention_varlen(
    q: NDArray[Any], k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None,
    *, block_table: AnyArray | None = None, seqused_k: AnyArray | None = None,
    k_scale: AnyArray | None = None, v_scale: AnyArray | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, return_lse: Literal[True], out_dtype: DTypeLike | None = None,
    lse_dtype: DTypeLike | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
    softcap: float = 0.0, sinks: AnyArray | None = None, alibi_slopes: AnyArray | None = None,
    dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention_varlen(
    q: ArrayT, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None, *,
    block_table: AnyArray | None = None, seqused_k: AnyArray | None = None, k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    return_lse: Literal[True], out_dtype: DTypeLike | None = None, lse_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray | None = None, *,
    block_table: AnyArray | None = None, seqused_k: AnyArray | None = None, k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    return_lse: bool = False, out_dtype: DTypeLike | None = None, lse_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> Any: ...

@overload
def attention_varlen_backward(
    dout: AnyArray, q: NDArray[Any], k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[False] = False, grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_varlen_backward(
    dout: AnyArray, q: ArrayT, k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[False] = False, grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def attention_varlen_backward(
    dout: AnyArray, q: NDArray[Any], k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[True], grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]: ...
@overload
def attention_varlen_backward(
    dout: AnyArray, q: ArrayT, k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: Literal[True], grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, dict[str, ArrayT]]: ...
@overload
def attention_varlen_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray | None, lse: AnyArray,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, delta: AnyArray | None = None, deterministic: bool = False,
    return_extra: bool = False, grads: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    accumulate: bool = False, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None, dropout_p: float = 0.0, seed: int | AnyArray | None = None,
) -> Any: ...

@overload
def cross_entropy(
    logits: NDArray[Any], targets: AnyArray, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, return_lse: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def cross_entropy(
    logits: ArrayT, targets: AnyArray, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, return_lse: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def cross_entropy(
    logits: NDArray[Any], targets: AnyArray, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, return_lse: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def cross_entropy(
    logits: ArrayT, targets: AnyArray, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, return_lse: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def cross_entropy(
    logits: AnyArray, targets: AnyArray, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, return_lse: bool = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

def cross_entropy_backward(
    dloss: float | AnyArray, logits: ArrayT, targets: AnyArray, lse: AnyArray, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...

def dropout(
    x: ArrayT, p: float, *, seed: int | AnyArray, offset: int = 0,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...

def dropout_backward(
    dy: ArrayT, p: float, *, seed: int | AnyArray, offset: int = 0,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def embedding(
    ids: NDArray[Any], weight: AnyArray, *, scale: float = 1.0,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def embedding(
    ids: ArrayT, weight: AnyArray, *, scale: float = 1.0, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def embedding_backward(
    dx: NDArray[Any], ids: AnyArray, num_embeddings: int, *, scale: float = 1.0,
    dweight: AnyArray | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def embedding_backward(
    dx: ArrayT, ids: AnyArray, num_embeddings: int, *, scale: float = 1.0, dweight: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def global_norm(
    arrays: NDArray[Any] | Sequence[NDArray[Any]], *, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def global_norm(
    arrays: ArrayT | Sequence[ArrayT], *, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...

@overload
def layernorm(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: None = None,
    return_sum: bool = True, return_stats: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def layernorm(
    x: NumPyT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: None = None,
    return_sum: bool = True, return_stats: Literal[True], out: AnyArray | tuple[AnyArray, ...] | None = None,
    residual_out: AnyArray | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def layernorm(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: None = None,
    return_sum: bool = True, return_stats: Literal[True], out: AnyArray | tuple[AnyArray, ...] | None = None,
    residual_out: AnyArray | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def layernorm(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: AnyArray,
    return_sum: Literal[True] = True, return_stats: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def layernorm(
    x: NumPyT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: AnyArray,
    return_sum: Literal[True] = True, return_stats: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NumPyT, NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def layernorm(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: AnyArray,
    return_sum: Literal[True] = True, return_stats: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]: ...
@overload
def layernorm(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: AnyArray,
    return_sum: Literal[False], return_stats: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def layernorm(
    x: NumPyT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: AnyArray,
    return_sum: Literal[False], return_stats: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def layernorm(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05, residual: AnyArray,
    return_sum: Literal[False], return_stats: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def layernorm(
    x: AnyArray, weight: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-05,
    residual: AnyArray | None = None, return_sum: bool = True, return_stats: bool = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> Any: ...

@overload
def layernorm_backward(
    dy: AnyArray, x: NumPyT, weight: AnyArray, mean: AnyArray, rstd: AnyArray, *,
    dresidual: AnyArray | None = None, dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def layernorm_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, mean: AnyArray, rstd: AnyArray, *,
    dresidual: AnyArray | None = None, dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...

def linear(
    x: ArrayT, weight: AnyArray, bias: AnyArray | None = None, *, residual: AnyArray | None = None,
    activations: str | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def linear_backward(
    dy: AnyArray, x: NumPyT, weight: AnyArray, *, has_bias: Literal[False] = False, only: None = None,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any]]: ...
@overload
def linear_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, *, has_bias: Literal[False] = False, only: None = None,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def linear_backward(
    dy: AnyArray, x: NumPyT, weight: AnyArray, *, has_bias: Literal[True], only: None = None,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def linear_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, *, has_bias: Literal[True], only: None = None,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def linear_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, *, has_bias: Literal[False] = False, only: Literal["dx"],
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def linear_backward(
    dy: AnyArray, x: NDArray[Any], weight: AnyArray, *, has_bias: Literal[False] = False,
    only: Literal["weights"], dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def linear_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, *, has_bias: Literal[False] = False, only: Literal["weights"],
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def linear_backward(
    dy: AnyArray, x: NDArray[Any], weight: AnyArray, *, has_bias: Literal[True], only: Literal["weights"],
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def linear_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, *, has_bias: Literal[True], only: Literal["weights"],
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def linear_backward(
    dy: AnyArray, x: AnyArray, weight: AnyArray, *, has_bias: bool = False, only: str | None = None,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

@overload
def linear_cross_entropy(
    x: NDArray[Any], weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[False] = False, only: str | None = None, dloss: float | AnyArray = 1.0,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[False] = False, only: str | None = None, dloss: float | AnyArray = 1.0,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def linear_cross_entropy(
    x: NDArray[Any], weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[False] = False, only: str | None = None, dloss: float | AnyArray = 1.0,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[False] = False, only: str | None = None, dloss: float | AnyArray = 1.0,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: NumPyT, weight: AnyArray, targets: AnyArray, *, bias: None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NumPyT, NDArray[Any]]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: NumPyT, weight: AnyArray, targets: AnyArray, *, bias: None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: NumPyT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NumPyT, NDArray[Any], NDArray[Any]]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: NumPyT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NumPyT, NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[True], only: None = None, dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: NumPyT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[True], only: Literal["dx"], dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NumPyT]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[False] = False,
    grads: Literal[True], only: Literal["dx"], dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: NumPyT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[True], only: Literal["dx"], dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[Any], NumPyT, NDArray[Any]]: ...
@overload
def linear_cross_entropy(
    x: ArrayT, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: Literal[True],
    grads: Literal[True], only: Literal["dx"], dloss: float | AnyArray = 1.0, dweight: AnyArray | None = None,
    dbias: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def linear_cross_entropy(
    x: AnyArray, weight: AnyArray, targets: AnyArray, *, bias: AnyArray | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    class_weight: AnyArray | None = None, reduction: str = "mean",
    denominator: float | AnyArray | None = None, chunk: int = 0, return_lse: bool = False,
    grads: bool = False, only: str | None = None, dloss: float | AnyArray = 1.0,
    dweight: AnyArray | None = None, dbias: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

@overload
def rmsnorm(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: None = None, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: bool = True, return_rstd: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def rmsnorm(
    x: NumPyT, weight: AnyArray, *, eps: float = 1e-06, residual: None = None, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: bool = True, return_rstd: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any]]: ...
@overload
def rmsnorm(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: None = None, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: bool = True, return_rstd: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def rmsnorm(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: Literal[True] = True, return_rstd: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def rmsnorm(
    x: NumPyT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: Literal[True] = True, return_rstd: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NumPyT, NumPyT, NDArray[Any]]: ...
@overload
def rmsnorm(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: Literal[True] = True, return_rstd: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def rmsnorm(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: Literal[False], return_rstd: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def rmsnorm(
    x: NumPyT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: Literal[False], return_rstd: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any]]: ...
@overload
def rmsnorm(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", return_sum: Literal[False], return_rstd: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def rmsnorm(
    x: AnyArray, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray | None = None,
    weight_offset: float = 0.0, casting: str = "fp32", return_sum: bool = True, return_rstd: bool = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, residual_out: AnyArray | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> Any: ...

@overload
def rmsnorm_backward(
    dy: AnyArray, x: NumPyT, weight: AnyArray, rstd: AnyArray, *, dresidual: AnyArray | None = None,
    weight_offset: float = 0.0, casting: str = "fp32", dweight: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any]]: ...
@overload
def rmsnorm_backward(
    dy: AnyArray, x: ArrayT, weight: AnyArray, rstd: AnyArray, *, dresidual: AnyArray | None = None,
    weight_offset: float = 0.0, casting: str = "fp32", dweight: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...

@overload
def rmsnorm_quant_int8(
    x: NDArray[Any], weight: AnyArray, *, eps: float = 1e-06, residual: None = None,
    weight_offset: float = 0.0, casting: str = "fp32", out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[np.int8], NDArray[Any], NDArray[np.int32]]: ...
@overload
def rmsnorm_quant_int8(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: None = None, weight_offset: float = 0.0,
    casting: str = "fp32", out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def rmsnorm_quant_int8(
    x: NumPyT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NDArray[np.int8], NDArray[Any], NDArray[np.int32], NumPyT]: ...
@overload
def rmsnorm_quant_int8(
    x: ArrayT, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray, weight_offset: float = 0.0,
    casting: str = "fp32", out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]: ...
@overload
def rmsnorm_quant_int8(
    x: AnyArray, weight: AnyArray, *, eps: float = 1e-06, residual: AnyArray | None = None,
    weight_offset: float = 0.0, casting: str = "fp32", out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> Any: ...

@overload
def rope(
    q: ArrayT, k: None = None, *, positions: int | AnyArray | None = None, theta: float | None = None,
    rotary_dim: int | None = None, interleaved: bool = False, scaling: RopeScaling | None = None,
    seqlen: int | None = None, conjugate: bool = False, layout: str = "bshd",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def rope(
    q: ArrayT, k: AnyArray, *, positions: int | AnyArray | None = None, theta: float | None = None,
    rotary_dim: int | None = None, interleaved: bool = False, scaling: RopeScaling | None = None,
    seqlen: int | None = None, conjugate: bool = False, layout: str = "bshd",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def rope(
    q: AnyArray, k: AnyArray | None = None, *, positions: int | AnyArray | None = None,
    theta: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
    scaling: RopeScaling | None = None, seqlen: int | None = None, conjugate: bool = False,
    layout: str = "bshd", out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> Any: ...

def rope_append_kv(
    q: ArrayT, k: AnyArray, v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, *,
    seqused_k: AnyArray | None = None, block_table: AnyArray | None = None,
    slot_mapping: AnyArray | None = None, k_scale: AnyArray | None = None, v_scale: AnyArray | None = None,
    q_weight: AnyArray | None = None, k_weight: AnyArray | None = None, eps: float = 1e-06,
    weight_offset: float = 0.0, positions: int | AnyArray | None = None, theta: float | None = None,
    rotary_dim: int | None = None, interleaved: bool = False, scaling: RopeScaling | None = None,
    seqlen: int | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def rope_backward(
    dq: ArrayT, dk: None = None, *, positions: int | AnyArray | None = None, theta: float | None = None,
    rotary_dim: int | None = None, interleaved: bool = False, scaling: RopeScaling | None = None,
    seqlen: int | None = None, conjugate: bool = False, layout: str = "bshd",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def rope_backward(
    dq: ArrayT, dk: AnyArray, *, positions: int | AnyArray | None = None, theta: float | None = None,
    rotary_dim: int | None = None, interleaved: bool = False, scaling: RopeScaling | None = None,
    seqlen: int | None = None, conjugate: bool = False, layout: str = "bshd",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def rope_backward(
    dq: AnyArray, dk: AnyArray | None = None, *, positions: int | AnyArray | None = None,
    theta: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
    scaling: RopeScaling | None = None, seqlen: int | None = None, conjugate: bool = False,
    layout: str = "bshd", out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> Any: ...

@overload
def sample(
    logits: NDArray[Any], *, temperature: float | AnyArray = 1.0, top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0, min_p: float | AnyArray = 0.0, seed: int | AnyArray,
    step: int | AnyArray = 0, bias: AnyArray | None = None, counts: AnyArray | None = None,
    repetition_penalty: float | AnyArray = 1.0, frequency_penalty: float | AnyArray = 0.0,
    presence_penalty: float | AnyArray = 0.0, return_logprob: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[np.int32]: ...
@overload
def sample(
    logits: ArrayT, *, temperature: float | AnyArray = 1.0, top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0, min_p: float | AnyArray = 0.0, seed: int | AnyArray,
    step: int | AnyArray = 0, bias: AnyArray | None = None, counts: AnyArray | None = None,
    repetition_penalty: float | AnyArray = 1.0, frequency_penalty: float | AnyArray = 0.0,
    presence_penalty: float | AnyArray = 0.0, return_logprob: Literal[False] = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def sample(
    logits: NDArray[Any], *, temperature: float | AnyArray = 1.0, top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0, min_p: float | AnyArray = 0.0, seed: int | AnyArray,
    step: int | AnyArray = 0, bias: AnyArray | None = None, counts: AnyArray | None = None,
    repetition_penalty: float | AnyArray = 1.0, frequency_penalty: float | AnyArray = 0.0,
    presence_penalty: float | AnyArray = 0.0, return_logprob: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NDArray[np.int32], NDArray[Any]]: ...
@overload
def sample(
    logits: ArrayT, *, temperature: float | AnyArray = 1.0, top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0, min_p: float | AnyArray = 0.0, seed: int | AnyArray,
    step: int | AnyArray = 0, bias: AnyArray | None = None, counts: AnyArray | None = None,
    repetition_penalty: float | AnyArray = 1.0, frequency_penalty: float | AnyArray = 0.0,
    presence_penalty: float | AnyArray = 0.0, return_logprob: Literal[True],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def sample(
    logits: AnyArray, *, temperature: float | AnyArray = 1.0, top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0, min_p: float | AnyArray = 0.0, seed: int | AnyArray,
    step: int | AnyArray = 0, bias: AnyArray | None = None, counts: AnyArray | None = None,
    repetition_penalty: float | AnyArray = 1.0, frequency_penalty: float | AnyArray = 0.0,
    presence_penalty: float | AnyArray = 0.0, return_logprob: bool = False,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

def softmax(
    x: ArrayT, *, scale: float = 1.0, mask: AnyArray | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...

def softmax_backward(
    dy: ArrayT, y: AnyArray, *, scale: float = 1.0, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...

def swiglu(
    gate: ArrayT, up: AnyArray | None = None, *, activation: str = "silu",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def swiglu_backward(
    dy: AnyArray, gate: ArrayT, up: None = None, *, activation: str = "silu",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def swiglu_backward(
    dy: AnyArray, gate: ArrayT, up: AnyArray, *, activation: str = "silu",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def swiglu_backward(
    dy: AnyArray, gate: AnyArray, up: AnyArray | None = None, *, activation: str = "silu",
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

@overload
def swiglu_mlp(
    x: ArrayT, w_gate: AnyArray, w_up: AnyArray, w_down: AnyArray, *, activation: str = "silu",
    keep: None = None, out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def swiglu_mlp(
    x: ArrayT, w_gate: AnyArray, w_up: AnyArray, w_down: AnyArray, *, activation: str = "silu",
    keep: Literal["gate_up"], out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def swiglu_mlp(
    x: AnyArray, w_gate: AnyArray, w_up: AnyArray, w_down: AnyArray, *, activation: str = "silu",
    keep: str | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None,
    backend: str | None = None, workspace: AnyArray | None = None,
) -> Any: ...

@overload
def swiglu_mlp_backward(
    dy: AnyArray, x: NumPyT, w_gate: AnyArray, w_up: AnyArray, w_down: AnyArray, *, activation: str = "silu",
    gate_up: AnyArray | None = None, dw_gate: AnyArray | None = None, dw_up: AnyArray | None = None,
    dw_down: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def swiglu_mlp_backward(
    dy: AnyArray, x: ArrayT, w_gate: AnyArray, w_up: AnyArray, w_down: AnyArray, *, activation: str = "silu",
    gate_up: AnyArray | None = None, dw_gate: AnyArray | None = None, dw_up: AnyArray | None = None,
    dw_down: AnyArray | None = None, out: AnyArray | tuple[AnyArray, ...] | None = None,
    device: str | None = None, backend: str | None = None, workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]: ...

@overload
def ternary_matmul(
    x: NDArray[Any] | TernaryMatrix, w: TernaryMatrix, *, x_scale: AnyArray | None = None,
    activations: str = "int8", out_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def ternary_matmul(
    x: ArrayT | TernaryMatrix, w: TernaryMatrix, *, x_scale: AnyArray | None = None,
    activations: str = "int8", out_dtype: DTypeLike | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...

@overload
def ternary_matmul_backward(
    dy: AnyArray, x: NumPyT, w: TernaryMatrix, *, activations: str = "int8", only: None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[NumPyT, NDArray[Any]]: ...
@overload
def ternary_matmul_backward(
    dy: AnyArray, x: ArrayT, w: TernaryMatrix, *, activations: str = "int8", only: None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def ternary_matmul_backward(
    dy: AnyArray, x: ArrayT, w: TernaryMatrix, *, activations: str = "int8", only: Literal["dx"],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def ternary_matmul_backward(
    dy: AnyArray, x: NDArray[Any], w: TernaryMatrix, *, activations: str = "int8", only: Literal["dw"],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> NDArray[Any]: ...
@overload
def ternary_matmul_backward(
    dy: AnyArray, x: ArrayT, w: TernaryMatrix, *, activations: str = "int8", only: Literal["dw"],
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> ArrayT: ...
@overload
def ternary_matmul_backward(
    dy: AnyArray, x: AnyArray, w: TernaryMatrix, *, activations: str = "int8", only: str | None = None,
    out: AnyArray | tuple[AnyArray, ...] | None = None, device: str | None = None, backend: str | None = None,
    workspace: AnyArray | None = None,
) -> Any: ...

@overload
def ternary_pack(
    trits: NDArray[Any], format: str, *, scale: float | AnyArray | None = None, check: bool = True,
    device: str | None = None, backend: str | None = None,
) -> NDArray[np.uint8]: ...
@overload
def ternary_pack(
    trits: ArrayT, format: str, *, scale: float | AnyArray | None = None, check: bool = True,
    device: str | None = None, backend: str | None = None,
) -> ArrayT: ...

def ternary_quantize(
    w: AnyArray, *, method: str = "absmean", group_size: int | None = None, threshold: float | None = None,
    device: str | None = None, backend: str | None = None,
) -> TernaryMatrix: ...

@overload
def ternary_unpack(
    packed: NDArray[Any], shape: tuple[int, int], format: str, *, strict: bool = True,
    device: str | None = None, backend: str | None = None,
) -> NDArray[np.int8]: ...
@overload
def ternary_unpack(
    packed: ArrayT, shape: tuple[int, int], format: str, *, strict: bool = True, device: str | None = None,
    backend: str | None = None,
) -> ArrayT: ...
