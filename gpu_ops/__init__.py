"""Transformer kernels for arrays, with no deep-learning framework.

Importing this package imports neither Numba nor CUDA: each op loads what it needs on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_WHERE = {
    "attention": "attention",
    "attention_backward": "attention",
    "attention_varlen": "attention_varlen",
    "attention_varlen_backward": "attention_varlen",
    "attention_decode": "attention_decode",
    "BlockMask": "block_mask",
    "rope": "rope",
    "rope_backward": "rope",
    "RopeScaling": "rope_scaling",
    "rmsnorm": "rmsnorm",
    "rmsnorm_backward": "rmsnorm",
    "rmsnorm_quant_int8": "rmsnorm_quant",
    "swiglu": "swiglu",
    "swiglu_backward": "swiglu",
    "swiglu_mlp": "swiglu_mlp",
    "swiglu_mlp_backward": "swiglu_mlp",
    "TernaryMatrix": "ternary_matrix",
    "ternary_quantize": "ternary",
    "ternary_pack": "ternary",
    "ternary_unpack": "ternary",
    "ternary_matmul": "ternary",
    "explain": "dispatch",
    "errors": "errors",
}

__all__ = [
    "BlockMask",
    "RopeScaling",
    "TernaryMatrix",
    "__version__",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_varlen",
    "attention_varlen_backward",
    "errors",
    "explain",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_quant_int8",
    "rope",
    "rope_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_mlp",
    "swiglu_mlp_backward",
    "ternary_matmul",
    "ternary_pack",
    "ternary_quantize",
    "ternary_unpack",
]

if TYPE_CHECKING:
    from gpu_ops import errors
    from gpu_ops.attention import attention, attention_backward
    from gpu_ops.attention_decode import attention_decode
    from gpu_ops.attention_varlen import attention_varlen, attention_varlen_backward
    from gpu_ops.block_mask import BlockMask
    from gpu_ops.dispatch import explain
    from gpu_ops.rmsnorm import rmsnorm, rmsnorm_backward
    from gpu_ops.rmsnorm_quant import rmsnorm_quant_int8
    from gpu_ops.rope import rope, rope_backward
    from gpu_ops.rope_scaling import RopeScaling
    from gpu_ops.swiglu import swiglu, swiglu_backward
    from gpu_ops.swiglu_mlp import swiglu_mlp, swiglu_mlp_backward
    from gpu_ops.ternary import ternary_matmul, ternary_pack, ternary_quantize, ternary_unpack
    from gpu_ops.ternary_matrix import TernaryMatrix


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'gpu_ops' has no attribute {name!r}")
    module = importlib.import_module(f"gpu_ops.{where}")
    value = module if name == where == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A function may bear its module's name (gpu_ops.rope), and every import of that module, from anywhere,
    makes the import system bind the module to the name: bind the function instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _WHERE.get(name) == name:
            value = getattr(value, name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
