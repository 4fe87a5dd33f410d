"""Mistakes of every op: what is passed, which error answers, and a piece of what it says."""

from __future__ import annotations

import numpy as np

from gpu_ops.errors import DTypeError, FormatError, GpuOpsError, OptionError, ShapeError

F32, F64, I32 = np.float32, np.float64, np.int32


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, I32)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def misaligned(x):
    return np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)


class On:
    """A change computed from the array it replaces."""

    def __init__(self, change):
        self.change = change


class Of:
    """A view of another argument."""

    def __init__(self, name, view):
        self.name, self.view = name, view


cast = {name: On(lambda x, name=name: x.astype(name)) for name in ("float64", "float16", "int32", "int64")}

# op, what goes wrong, the error's type, a piece of its message, the changed arguments
CASES = [
    # attention
    ("attention", "an axis is missing", ShapeError, "q has 3 axes", {"q": ones(5, 4, 8)}),
    ("attention", "an axis too many", ShapeError, "k has 5 axes", {"k": ones(1, 2, 7, 2, 8)}),
    ("attention", "batches differ", ShapeError, "batch is 3 here but 2 in q", {"k": ones(3, 7, 2, 8)}),
    ("attention", "head_dim differs", ShapeError, "head_dim is 4 here but 8 in q", {"k": ones(2, 7, 2, 4)}),
    ("attention", "v shorter than k", ShapeError, "seqlen_k is 6 here but 7 in k", {"v": ones(2, 6, 2, 8)}),
    (
        "attention",
        "heads do not divide",
        ShapeError,
        "multiple",
        {"k": ones(2, 7, 3, 8), "v": ones(2, 7, 3, 8)},
    ),
    ("attention", "mixed dtypes", DTypeError, "k is float64 but q is float32", {"k": cast["float64"]}),
    (
        "attention",
        "integers",
        DTypeError,
        "allowed: float16, bfloat16, float32, float64",
        {"q": cast["int32"]},
    ),
    ("attention", "one window bound", OptionError, "window_size", {"window_size": (4,)}),
    (
        "attention",
        "a window below -1",
        OptionError,
        "window_size[0] must be -1, for no limit, or at least 0; got -2",
        {"window_size": (-2, 0)},
    ),
    ("attention", "a window of floats", OptionError, "window_size", {"window_size": (1.5, 0)}),
    ("attention", "negative softcap", OptionError, "softcap must be finite and >= 0", {"softcap": -1.0}),
    ("attention", "softcap is NaN", OptionError, "softcap must be finite", {"softcap": float("nan")}),
    ("attention", "scale is text", OptionError, "softmax_scale must be a number", {"softmax_scale": "0.1"}),
    (
        "attention",
        "scale is infinite",
        OptionError,
        "softmax_scale must be finite",
        {"softmax_scale": np.inf},
    ),
    ("attention", "scale beyond float32", OptionError, "at most 1e+38 in size", {"softmax_scale": 1e300}),
    ("attention", "softcap beyond float32", OptionError, "between 1e-38 and 1e+38", {"softcap": 1e39}),
    ("attention", "softcap without inverse", OptionError, "between 1e-38 and 1e+38", {"softcap": 1e-39}),
    ("attention", "causal is text", OptionError, "causal must be True or False", {"causal": "yes"}),
    (
        "attention",
        "return_lse is a number",
        OptionError,
        "return_lse must be True or False",
        {"return_lse": 1},
    ),
    ("attention", "a misspelt layout", OptionError, "did you mean 'bshd'", {"layout": "bsdh"}),
    ("attention", "sinks per kv head", ShapeError, "sinks", {"sinks": ones(2)}),
    ("attention", "sinks of another dtype", DTypeError, "sinks is int32", {"sinks": ones(4, dtype=I32)}),
    ("attention", "slopes per kv head", ShapeError, "alibi_slopes", {"alibi_slopes": ones(2)}),
    ("attention", "bias does not broadcast", ShapeError, "bias", {"bias": ones(3, 1, 5, 7)}),
    (
        "attention",
        "bias of bools",
        DTypeError,
        "bias is bool, expected float32, as q is; make one of a mask (True: visible) by np.where(mask, 0, -np.inf)",
        {"bias": ones(1, 1, 5, 7, dtype=bool)},
    ),
    (
        "attention",
        "bias of float64",
        DTypeError,
        "bias is float64, expected float32, as q is; cast it: bias.astype(",
        {"bias": ones(1, 1, 5, 7, dtype=F64)},
    ),
    ("attention", "a mask array", GpuOpsError, "BlockMask", {"block_mask": ones(1, 1, 1, 1, dtype=bool)}),
    ("attention", "out of another shape", ShapeError, "out has shape", {"out": ones(2, 4, 5, 8)}),
    ("attention", "out of another dtype", DTypeError, "out is float64", {"out": ones(2, 5, 4, 8, dtype=F64)}),
    ("attention", "out is read-only", ShapeError, "out is read-only", {"out": read_only(ones(2, 5, 4, 8))}),
    ("attention", "out between elements", ShapeError, "not aligned", {"out": misaligned(ones(2, 5, 4, 8))}),
    ("attention", "device misspelt", OptionError, "did you mean 'cpu'", {"device": "cpu0"}),
    ("attention", "device by another name", OptionError, "did you mean 'cuda'", {"device": "gpu"}),
    (
        "attention",
        "a backend of the GPU",
        OptionError,
        "backend='raw' is a backend of 'cuda' and 'emulator', but this call runs on 'cpu', whose are 'numba'",
        {"backend": "raw"},
    ),
    # attention_backward
    ("attention_backward", "lse of float64", DTypeError, "lse is float64", {"lse": cast["float64"]}),
    ("attention_backward", "lse transposed", ShapeError, "lse has shape", {"lse": ones(2, 5, 4)}),
    ("attention_backward", "dout too short", ShapeError, "dout has shape", {"dout": ones(2, 4, 4, 8)}),
    ("attention_backward", "out of another dtype", DTypeError, "out is float16", {"out": cast["float16"]}),
    ("attention_backward", "deterministic is text", OptionError, "deterministic", {"deterministic": "no"}),
    # attention_varlen
    ("attention_varlen", "lengths of floats", DTypeError, "cu_seqlens_q", {"cu_seqlens_q": ones(3)}),
    (
        "attention_varlen",
        "does not start at 0",
        GpuOpsError,
        "cu_seqlens_q",
        {"cu_seqlens_q": ints(1, 5, 12)},
    ),
    ("attention_varlen", "runs backwards", GpuOpsError, "cu_seqlens_k", {"cu_seqlens_k": ints(0, 13, 12)}),
    ("attention_varlen", "ends early", GpuOpsError, "12", {"cu_seqlens_q": ints(0, 5, 11)}),
    ("attention_varlen", "ends late", GpuOpsError, "12", {"cu_seqlens_k": ints(0, 5, 13)}),
    ("attention_varlen", "batches differ", ShapeError, "cu_seqlens_k", {"cu_seqlens_k": ints(0, 3, 5, 12)}),
    ("attention_varlen", "empty lengths", GpuOpsError, "cu_seqlens_q", {"cu_seqlens_q": ints()}),
    ("attention_varlen", "q is not packed", ShapeError, "q has 4 axes", {"q": ones(2, 6, 4, 8)}),
    ("attention_varlen", "a length above the maximum", OptionError, "max_seqlen_q", {"max_seqlen_q": 3}),
    ("attention_varlen_backward", "lse of the dense op", ShapeError, "lse", {"lse": ones(2, 4, 12)}),
    # attention_decode
    ("attention_decode", "beyond the cache", GpuOpsError, "seqused_k", {"seqused_k": ints(3, 17)}),
    ("attention_decode", "negative length", GpuOpsError, "seqused_k", {"seqused_k": ints(-1, 3)}),
    ("attention_decode", "one length for two", ShapeError, "seqused_k", {"seqused_k": ints(3)}),
    ("attention_decode", "lengths of floats", DTypeError, "seqused_k", {"seqused_k": ones(2)}),
    ("attention_decode", "lengths as a list", DTypeError, "seqused_k is list", {"seqused_k": [3, 16]}),
    ("attention_decode", "a page not there", GpuOpsError, "block_table", {"block_table": ints([0], [2])}),
    ("attention_decode", "too few pages", OptionError, "what the cache holds", {"block_table": ints([], [])}),
    ("attention_decode", "negative splits", OptionError, "num_splits", {"num_splits": -1}),
    # rope
    ("rope", "two axes", ShapeError, "q has 2 axes", {"q": ones(5, 8)}),
    ("rope", "an odd rotary_dim", OptionError, "rotary_dim is 3", {"rotary_dim": 3}),
    ("rope", "a rotary_dim too long", OptionError, "rotary_dim", {"rotary_dim": 16}),
    ("rope", "q and k differ in length", ShapeError, "seqlen is 6 here but 5 in q", {"k": ones(2, 6, 2, 8)}),
    ("rope", "a theta of 0", OptionError, "theta must be finite and > 0", {"theta": 0.0}),
    ("rope", "positions of floats", DTypeError, "positions is float32", {"positions": ones(5)}),
    ("rope", "too many positions", ShapeError, "positions has shape", {"positions": np.arange(6)}),
    (
        "rope",
        "a position that is no integer",
        DTypeError,
        "positions is the number 3.0; pass an integer",
        {"positions": 3.0},
    ),
    ("rope", "scaling as a dict", OptionError, "RopeScaling", {"scaling": {"rope_type": "yarn"}}),
    ("rope", "out is one array for two", OptionError, "two arrays, (q, k)", {"out": ones(2, 5, 4, 8)}),
    ("rope_backward", "interleaved is text", OptionError, "must be True", {"interleaved": "half"}),
    # rope_append_kv
    ("rope_append_kv", "no room in the cache", OptionError, "[0, 13]", {"seqused_k": ints(3, 14)}),
    ("rope_append_kv", "nowhere to go", OptionError, "Pass seqused_k=", {"seqused_k": None}),
    ("rope_append_kv", "one weight", OptionError, "k_weight is missing", {"q_weight": ones(8)}),
    ("rope_append_kv", "no cache", DTypeError, "k_cache is NoneType", {"k_cache": None}),
    # rmsnorm
    ("rmsnorm", "weight of two axes", ShapeError, "weight has shape (1, 16)", {"weight": ones(1, 16)}),
    ("rmsnorm", "integers", DTypeError, "x is int64", {"x": cast["int64"], "weight": cast["int64"]}),
    (
        "rmsnorm",
        "residual of float64",
        DTypeError,
        "residual is float64",
        {"residual": ones(3, 16, dtype=F64)},
    ),
    ("rmsnorm", "an eps below 0", OptionError, "eps must be finite and > 0", {"eps": -1e-6}),
    ("rmsnorm", "eps is NaN", OptionError, "eps must be finite", {"eps": float("nan")}),
    ("rmsnorm", "an infinite offset", OptionError, "weight_offset must be finite", {"weight_offset": np.inf}),
    ("rmsnorm", "return_rstd is a number", OptionError, "return_rstd must be True or", {"return_rstd": 1}),
    ("rmsnorm", "one row of residual", ShapeError, "residual has shape (1, 16)", {"residual": ones(1, 16)}),
    ("rmsnorm", "no axis", ShapeError, "x has shape ()", {"x": np.array(1.0, F32)}),
    ("rmsnorm", "an empty row", ShapeError, "must not be empty", {"x": ones(3, 0), "weight": ones(0)}),
    ("rmsnorm", "weight of another length", ShapeError, "expected exactly (16,)", {"weight": ones(15)}),
    (
        "rmsnorm",
        "weight of float64",
        DTypeError,
        "weight is float64 but x is float32",
        {"weight": cast["float64"]},
    ),
    ("rmsnorm", "residual of another shape", ShapeError, "residual has shape", {"residual": ones(16)}),
    ("rmsnorm", "an eps of 0", OptionError, "eps must be finite and > 0", {"eps": 0}),
    ("rmsnorm", "a huge eps", OptionError, "eps must be finite, and float64 cannot hold", {"eps": 10**400}),
    ("rmsnorm", "eps is a time", OptionError, "eps must be a number", {"eps": np.timedelta64(1)}),
    ("rmsnorm", "eps is text", OptionError, "eps must be a number", {"eps": "1e-6"}),
    ("rmsnorm", "casting misspelt", OptionError, "did you mean 'llama'", {"casting": "lama"}),
    (
        "rmsnorm",
        "offset is NaN",
        OptionError,
        "weight_offset must be finite",
        {"weight_offset": float("nan")},
    ),
    ("rmsnorm", "out is a column view", ShapeError, "last axis of out", {"out": ones(16, 3).T}),
    (
        "rmsnorm",
        "out lies in the weight",
        ShapeError,
        "shares memory",
        {"x": ones(1, 16), "out": Of("weight", lambda x: x[None])},
    ),
    ("rmsnorm_backward", "rstd of another shape", ShapeError, "rstd has shape (3, 1)", {"rstd": ones(3, 1)}),
    ("rmsnorm_backward", "rstd of float64", DTypeError, "rstd is float64", {"rstd": cast["float64"]}),
    ("rmsnorm_backward", "dy of float16", DTypeError, "dy is float16", {"dy": cast["float16"]}),
    # layernorm
    ("layernorm", "weight of another length", ShapeError, "expected exactly (16,)", {"weight": ones(15)}),
    ("layernorm", "one row of residual", ShapeError, "residual has shape (1, 16)", {"residual": ones(1, 16)}),
    ("layernorm", "an eps of 0", OptionError, "eps must be finite and > 0", {"eps": 0.0}),
    ("layernorm", "eps is NaN", OptionError, "eps must be finite", {"eps": float("nan")}),
    ("layernorm", "return_stats is a number", OptionError, "return_stats must be True", {"return_stats": 1}),
    ("layernorm", "an empty row", ShapeError, "must not be empty", {"x": ones(3, 0), "weight": ones(0)}),
    ("layernorm", "bias of another length", ShapeError, "bias has shape (15,)", {"bias": ones(15)}),
    ("layernorm", "bias of float64", DTypeError, "bias is float64", {"bias": cast["float64"]}),
    ("layernorm", "an eps below 0", OptionError, "eps must be finite and > 0", {"eps": -1e-5}),
    (
        "layernorm_backward",
        "mean of another shape",
        ShapeError,
        "mean has shape (3, 1)",
        {"mean": ones(3, 1)},
    ),
    ("layernorm_backward", "rstd of float64", DTypeError, "rstd is float64", {"rstd": cast["float64"]}),
    ("rmsnorm_quant_int8", "weight too long", ShapeError, "weight has shape (17,)", {"weight": ones(17)}),
    (
        "rmsnorm_quant_int8",
        "an empty row",
        ShapeError,
        "must not be empty",
        {"x": ones(3, 0), "weight": ones(0)},
    ),
    ("rmsnorm_quant_int8", "weight of float64", DTypeError, "weight is float64", {"weight": cast["float64"]}),
    ("rmsnorm_quant_int8", "a row of residual", ShapeError, "residual has shape", {"residual": ones(16)}),
    ("rmsnorm_quant_int8", "casting unknown", OptionError, "casting='int8'", {"casting": "int8"}),
    ("rmsnorm_quant_int8", "an eps of 0", OptionError, "eps must be finite and > 0", {"eps": 0}),
    ("rmsnorm_quant_int8", "out is one array", OptionError, "three arrays", {"out": ones(3, 16)}),
    # softmax
    ("softmax", "no axes", ShapeError, "no axes", {"x": ones()}),
    ("softmax", "integers", DTypeError, "x is int64", {"x": cast["int64"]}),
    ("softmax", "scale is infinite", OptionError, "scale must be finite", {"scale": np.inf}),
    ("softmax", "a mask of integers", DTypeError, "mask is int32, expected bool", {"mask": ints(1)}),
    ("softmax", "a mask of float64", DTypeError, "mask is float64", {"mask": ones(16, dtype=F64)}),
    ("softmax", "a longer mask", ShapeError, "does not broadcast to x's, (3, 16)", {"mask": ones(17)}),
    ("softmax", "a mask of more axes", ShapeError, "mask has shape (1, 3, 16)", {"mask": ones(1, 3, 16)}),
    ("softmax_backward", "a row of dy", ShapeError, "dy has shape (1, 16)", {"dy": ones(1, 16)}),
    (
        "softmax_backward",
        "dy of float16",
        DTypeError,
        "dy is float16 but y is float32",
        {"dy": cast["float16"]},
    ),
    # swiglu
    ("swiglu", "no axes", ShapeError, "no axes", {"gate": ones(), "up": ones()}),
    ("swiglu", "integers", DTypeError, "gate is int32", {"gate": cast["int32"], "up": cast["int32"]}),
    ("swiglu", "a misspelt activation", OptionError, "did you mean 'silu'", {"activation": "silo"}),
    ("swiglu", "no activation", OptionError, "activation=None", {"activation": None}),
    ("swiglu packed", "out is packed too", ShapeError, "expected exactly (3, 16)", {"out": ones(3, 32)}),
    (
        "swiglu packed",
        "out is half of it",
        ShapeError,
        "memory with gate",
        {"out": Of("gate", lambda x: x[:, :16])},
    ),
    ("swiglu_backward", "a row of dy", ShapeError, "dy has shape (1, 16)", {"dy": ones(1, 16)}),
    ("swiglu_backward", "out is one array", OptionError, "two arrays", {"out": ones(3, 16)}),
    ("swiglu_mlp", "hidden differs", ShapeError, "expected (..., hidden=16)", {"x": ones(3, 15)}),
    ("swiglu_mlp", "w_up too short", ShapeError, "w_up has shape (23, 16)", {"w_up": ones(23, 16)}),
    ("swiglu_mlp", "w_gate of 3 axes", ShapeError, "w_gate has 3 axes", {"w_gate": ones(1, 24, 16)}),
    (
        "swiglu_mlp",
        "w_down of float16",
        DTypeError,
        "w_down is float16 but x is",
        {"w_down": cast["float16"]},
    ),
    ("swiglu_mlp", "an unknown activation", OptionError, "activation='gelu_erf'", {"activation": "gelu_erf"}),
    ("swiglu_mlp_backward", "a row of dy", ShapeError, "dy has shape (1, 16)", {"dy": ones(1, 16)}),
    ("swiglu_mlp_backward", "out is one array", OptionError, "four arrays", {"out": ones(3, 16)}),
    ("swiglu", "packed and odd", ShapeError, "gate", {"gate": ones(3, 15), "up": None}),
    ("swiglu", "shapes differ", ShapeError, "up has shape (3, 15)", {"up": ones(3, 15)}),
    ("swiglu", "an unknown activation", OptionError, "activation='relu'", {"activation": "relu"}),
    ("swiglu", "mixed dtypes", DTypeError, "up is float16 but gate is float32", {"up": cast["float16"]}),
    ("swiglu_backward", "dy is packed", ShapeError, "dy has shape (3, 32)", {"dy": ones(3, 32)}),
    ("swiglu_mlp", "weights transposed", ShapeError, "w_gate", {"w_gate": ones(16, 24)}),
    ("swiglu_mlp", "w_down transposed", ShapeError, "w_down", {"w_down": ones(24, 16)}),
    ("swiglu_mlp_backward", "dy of ffn width", ShapeError, "dy has shape (3, 24)", {"dy": ones(3, 24)}),
    # ternary
    ("ternary_quantize", "three axes", ShapeError, "(N, K)", {"w": ones(2, 4, 8)}),
    ("ternary_quantize", "an unknown method", OptionError, "did you mean 'absmean'", {"method": "absmeen"}),
    ("ternary_quantize", "groups do not divide", ShapeError, "does not divide K=256", {"group_size": 100}),
    ("ternary_quantize", "a threshold that nobody reads", OptionError, "threshold", {"threshold": 0.5}),
    ("ternary_pack", "floats", DTypeError, "trits is float32", {"trits": ones(8, 256)}),
    ("ternary_pack", "a 2", FormatError, "trits[0, 0] is 2", {"trits": np.full((8, 256), 2, np.int8)}),
    ("ternary_pack", "an unknown format", OptionError, "format='base4'", {"format": "base4"}),
    ("ternary_pack", "one axis", ShapeError, "(N, K)", {"trits": np.zeros(256, np.int8)}),
    ("ternary_unpack", "cut short", FormatError, "ternary_unpack", {"packed": On(lambda x: x[:, :-1])}),
    ("ternary_unpack", "int8 codes", DTypeError, "uint8", {"packed": On(lambda x: x.view(np.int8))}),
    (
        "ternary_unpack",
        "codes of no trit",
        FormatError,
        "strict",
        {"packed": On(lambda x: np.full_like(x, 255))},
    ),
    ("ternary_unpack", "a shape of one", ShapeError, "shape must be (N, K)", {"shape": (2048,)}),
    ("ternary_unpack", "a negative shape", OptionError, "shape must lie in", {"shape": (-8, 256)}),
    ("ternary_matmul", "x of integers", DTypeError, "int32; allowed: float16", {"x": cast["int32"]}),
    ("ternary_matmul", "K is named", ShapeError, "expected (..., K=256)", {"x": ones(3, 255)}),
    ("ternary_matmul", "modes are named", OptionError, "'int8', 'native'", {"activations": "int4"}),
    (
        "ternary_matmul",
        "how to make a matrix",
        DTypeError,
        "not a TernaryMatrix; make one with",
        {"w": ones(8, 256)},
    ),
    ("ternary_matmul", "K differs", ShapeError, "K=256", {"x": ones(3, 128)}),
    ("ternary_matmul", "w is an array", DTypeError, "TernaryMatrix", {"w": ones(8, 256)}),
    ("ternary_matmul", "an unknown mode", OptionError, "activations='int4'", {"activations": "int4"}),
    ("ternary_matmul_backward", "K differs", ShapeError, "K=256", {"x": ones(3, 128)}),
    ("ternary_matmul_backward", "dy of x", ShapeError, "expected exactly (3, 8)", {"dy": ones(3, 256)}),
    ("ternary_matmul_backward", "dtypes differ", DTypeError, "dy is float64", {"dy": cast["float64"]}),
    ("ternary_matmul_backward", "w is an array", DTypeError, "TernaryMatrix", {"w": ones(8, 256)}),
    (
        "ternary_matmul_backward",
        "an unknown mode",
        OptionError,
        "activations='int4'",
        {"activations": "int4"},
    ),
]
