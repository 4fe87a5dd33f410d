"""RMSNorm: forward, forward with residual and with or without its sum, backward.

``python perf/bench_rmsnorm.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: rows of hidden 4096)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.norm import rmsnorm as reference
from perf.build import backends, calls, torch_view
from perf.case import Call, Case, Inputs, RunOptions
from perf.norm_cases import HIDDEN, Norm, Shape, backward, forward, naive_call, traffic

NORM = Norm(
    op="rmsnorm",
    parameters=("weight",),
    eps=1e-6,
    centred=False,
    functions=(gpu_ops.rmsnorm, gpu_ops.rmsnorm_backward),
    definitions=(reference.rmsnorm, reference.rmsnorm_backward),
    return_stats="return_rstd",
    torch_name="rms_norm",
    flops=(4.0, 8.0),
)


TOUR = (("forward", "bfloat16"), ("backward", "bfloat16"))  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((2048,) if config.quick else (512, 4096)):
            shape = rows, HIDDEN
            plain, with_residual = (forward(NORM, shape, dtype, residual) for residual in (False, True))
            result.append(plain)
            if not config.quick:
                result += [into_buffers(plain, "out"), into_buffers(with_residual, "out", "residual_out")]
            result += [with_residual, last_norm(with_residual, shape), backward(NORM, shape, dtype)]
    return result


def into_buffers(case: Case, *names: str) -> Case:
    """Case with ``out=``, so that no contender has page faults of fresh memory."""

    def ours(x: Inputs, **how: str) -> Call:
        buffers = {name: np.zeros_like(x["x"]) for name in names}
        return functools.partial(case.ours(x, **how), **buffers)

    def naive(x: Inputs) -> Call:
        return naive_call(NORM, x, out=np.zeros_like(x["x"]))

    return replace(
        case,
        name=f"{case.name}, out=",
        **backends(ours),
        naive=None if "residual_out" in names else naive,
        torch=torch_out,
        note="torch: step by step, since its rms_norm takes no out=",
    )


def last_norm(case: Case, shape: Shape) -> Case:
    """Last norm of a model, which does not need x + residual: three arrays move instead of four."""

    def first(call: Call) -> Call:
        return lambda: call()[0]

    options: dict[str, Any] = {"eps": NORM.eps, "return_sum": False}
    return replace(
        case,
        name="forward + residual, no sum",
        bytes=traffic(shape, case.dtype, matrices=3),
        **calls(gpu_ops.rmsnorm, reference.rmsnorm, ("x", "weight"), ("residual",), **options),
        naive=lambda x: first(case.naive(x)),
        torch=lambda x: first(case.torch(x)),
    )


def torch_out(x: Inputs) -> Call:
    import torch

    rows, weight = torch_view(x["x"]), torch_view(x["weight"])
    residual = torch_view(x["residual"]) if "residual" in x else None
    out, work, total = (torch.zeros_like(rows) for _ in range(3))

    def call() -> Any:
        source = rows if residual is None else torch.add(rows, residual, out=total)
        torch.mul(source, source, out=work)
        rstd = torch.rsqrt(work.mean(-1, keepdim=True) + NORM.eps)
        return torch.mul(source, rstd, out=out).mul_(weight), source

    return call


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("rmsnorm")
