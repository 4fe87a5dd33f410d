"""LayerNorm with a bias: forward, forward with residual, backward.

``python perf/bench_layernorm.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: rows of hidden 4096)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import gpu_ops
from gpu_ops.reference.norm import layernorm as reference
from perf.case import Case, RunOptions
from perf.norm_cases import HIDDEN, Norm, backward, forward

NORM = Norm(
    op="layernorm",
    parameters=("weight", "bias"),
    eps=1e-5,
    centred=True,
    functions=(gpu_ops.layernorm, gpu_ops.layernorm_backward),
    definitions=(reference.layernorm, reference.layernorm_backward),
    return_stats="return_stats",
    torch_name="layer_norm",
    flops=(7.0, 12.0),
)


TOUR = (("forward", "bfloat16"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((2048,) if config.quick else (512, 4096)):
            shape = rows, HIDDEN
            result.append(forward(NORM, shape, dtype))
            result.append(forward(NORM, shape, dtype, residual=True))
            result.append(backward(NORM, shape, dtype))
    return result


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("layernorm")
