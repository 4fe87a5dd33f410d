"""Mistakes of the attention ops; see bad_input_cases.py."""

from __future__ import annotations

import numpy as np

from gpu_ops.errors import DTypeError, GpuOpsError, OptionError, ShapeError
from tests.bad_input_make import F64, I32, cast, ints, ones

CASES = [
    # attention
    ("attention", "an axis is missing", ShapeError, "q has 3 axes", {"q": ones(5, 4, 8)}),
    ("attention", "batches differ", ShapeError, "batch is 3 here but 2 in q", {"k": ones(3, 7, 2, 8)}),
    ("attention", "head_dim differs", ShapeError, "head_dim is 4 here but 8 in q", {"k": ones(2, 7, 2, 4)}),
    ("attention", "v shorter than k", ShapeError, "seqlen_k is 6 here but 7 in k", {"v": ones(2, 6, 2, 8)}),
    ("attention", "heads do not divide", ShapeError, "multiple", {"k": ones(2, 7, 3, 8), "v": ones(2, 7, 3, 8)}),
    ("attention", "integers", DTypeError, "allowed: float16, bfloat16, float32, float64", {"q": cast["int32"]}),
    ("attention", "one window bound", OptionError, "window_size", {"window_size": (4,)}),
    ("attention", "a window below -1", OptionError, "window_size[0] must be -1, for no limit, or at least 0; got -2",
     {"window_size": (-2, 0)}),
    ("attention", "a window of floats", OptionError, "window_size", {"window_size": (1.5, 0)}),
    ("attention", "a position before 0", OptionError, "q_start must lie in [0, 1073741823], got -1", {"q_start": -1}),
    ("attention", "a position of float", OptionError, "k_start must be an integer", {"k_start": 1.0}),
    ("attention", "negative softcap", OptionError, "softcap must be finite and >= 0", {"softcap": -1.0}),
    ("attention", "softcap is NaN", OptionError, "softcap must be finite", {"softcap": float("nan")}),
    ("attention", "scale is text", OptionError, "softmax_scale must be a number", {"softmax_scale": "0.1"}),
    ("attention", "scale is infinite", OptionError, "softmax_scale must be finite", {"softmax_scale": np.inf}),
    ("attention", "scale beyond float32", OptionError, "at most 1e+38 in size", {"softmax_scale": 1e300}),
    ("attention", "softcap beyond float32", OptionError, "between 1e-38 and 1e+38", {"softcap": 1e39}),
    ("attention", "softcap without inverse", OptionError, "between 1e-38 and 1e+38", {"softcap": 1e-39}),
    ("attention", "causal is text", OptionError, "causal must be True or False", {"causal": "yes"}),
    ("attention", "return_lse is a number", OptionError, "return_lse must be True or False", {"return_lse": 1}),
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
    ("attention", "bias of float64", DTypeError, "bias is float64, expected float32, as q is; cast it: bias.astype(",
     {"bias": ones(1, 1, 5, 7, dtype=F64)}),
    ("attention", "a mask array", GpuOpsError, "BlockMask", {"block_mask": ones(1, 1, 1, 1, dtype=bool)}),
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
    ("attention_backward", "lse transposed", ShapeError, "lse has shape", {"lse": ones(2, 5, 4)}),
    ("attention_backward", "dout too short", ShapeError, "dout has shape", {"dout": ones(2, 4, 4, 8)}),
    ("attention_backward", "deterministic is text", OptionError, "deterministic", {"deterministic": "no"}),
    # attention_varlen
    ("attention_varlen", "lengths of floats", DTypeError, "cu_seqlens_q", {"cu_seqlens_q": ones(3)}),
    ("attention_varlen", "does not start at 0", GpuOpsError, "cu_seqlens_q", {"cu_seqlens_q": ints(1, 5, 12)}),
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
]  # fmt: skip
