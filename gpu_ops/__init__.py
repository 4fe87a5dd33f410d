"""Transformer kernels for arrays, with no deep-learning framework.

The import loads NumPy but no compiler: each op loads its kernels on first use.
"""

from typing import TYPE_CHECKING

from gpu_ops import errors
from gpu_ops.core.autotune import autotune
from gpu_ops.core.op import explain, workspace_size
from gpu_ops.formats.block_mask import BlockMask
from gpu_ops.formats.gguf_writer import write_gguf
from gpu_ops.formats.packed_matrix import PackedMatrix, quantize
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.formats.ternary_files import read_bitnet, read_gguf
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.ops.attention.decode import attention_decode
from gpu_ops.ops.attention.dense import attention, attention_backward
from gpu_ops.ops.attention.merge import attention_merge
from gpu_ops.ops.attention.varlen import attention_varlen, attention_varlen_backward
from gpu_ops.ops.gemm.linear import linear, linear_backward
from gpu_ops.ops.gemm.swiglu import swiglu, swiglu_backward
from gpu_ops.ops.gemm.swiglu_mlp import swiglu_mlp, swiglu_mlp_backward
from gpu_ops.ops.loss.cross_entropy import cross_entropy, cross_entropy_backward
from gpu_ops.ops.loss.linear_cross_entropy import linear_cross_entropy
from gpu_ops.ops.norm.layernorm import layernorm, layernorm_backward
from gpu_ops.ops.norm.rmsnorm import rmsnorm, rmsnorm_backward
from gpu_ops.ops.norm.rmsnorm_quant import rmsnorm_quant_int8
from gpu_ops.ops.rope.rope import rope, rope_backward
from gpu_ops.ops.rope.rope_append_kv import rope_append_kv
from gpu_ops.ops.rows.adamw import adamw_step
from gpu_ops.ops.rows.dropout import dropout, dropout_backward
from gpu_ops.ops.rows.embedding import embedding, embedding_backward
from gpu_ops.ops.rows.global_norm import global_norm
from gpu_ops.ops.rows.softmax import softmax, softmax_backward
from gpu_ops.ops.sampling.sample import sample
from gpu_ops.ops.weights.ternary import ternary_quantize
from gpu_ops.ops.weights.ternary_linear import TernaryLinear, ternary_matmul_backward
from gpu_ops.ops.weights.ternary_matmul import ternary_matmul
from gpu_ops.ops.weights.ternary_model import quantize_model
from gpu_ops.ops.weights.ternary_pack import ternary_pack, ternary_unpack

if TYPE_CHECKING:  # with a __getattr__, a type checker would accept every name
    from gpu_ops import compat as compat
    from gpu_ops import distributed as distributed
    from gpu_ops import emulator as emulator
    from gpu_ops import formats as formats
    from gpu_ops import inference as inference
    from gpu_ops import memory as memory
    from gpu_ops import models as models
    from gpu_ops import training as training
else:
    _PACKAGES = ("compat", "distributed", "emulator", "formats", "inference", "memory", "models", "training")

    def __getattr__(name: str) -> object:
        """Load a subpackage such as ``gpu_ops.models`` on first access."""
        import importlib

        if name in _PACKAGES:
            return importlib.import_module(f"gpu_ops.{name}")
        raise errors.no_attribute(__name__, name, [*__all__, *_PACKAGES])


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])


__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "PackedMatrix",
    "RopeScaling",
    "TernaryLinear",
    "TernaryMatrix",
    "__version__",
    "adamw_step",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_merge",
    "attention_varlen",
    "attention_varlen_backward",
    "autotune",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "dropout_backward",
    "embedding",
    "embedding_backward",
    "errors",
    "explain",
    "global_norm",
    "layernorm",
    "layernorm_backward",
    "linear",
    "linear_backward",
    "linear_cross_entropy",
    "quantize",
    "quantize_model",
    "read_bitnet",
    "read_gguf",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_quant_int8",
    "rope",
    "rope_append_kv",
    "rope_backward",
    "sample",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_mlp",
    "swiglu_mlp_backward",
    "ternary_matmul",
    "ternary_matmul_backward",
    "ternary_pack",
    "ternary_quantize",
    "ternary_unpack",
    "workspace_size",
    "write_gguf",
]
