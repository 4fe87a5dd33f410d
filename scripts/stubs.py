"""Writes ``gpu_ops/__init__.pyi``, which tells editors and type checkers what the public functions return.

The names and parameters are those of ``gpu_ops/__init__.py`` and of the functions' signatures. ``RETURNS`` adds the
results of each op, and the options that change them; ``PARAMETERS`` adds the types of parameters annotated ``Any``.

    python scripts/stubs.py [--check]

A result has the type of the array in the argument that ``RETURNS`` names. NumPy's arrays have their dtype and their
number of axes in their type: if a result differs from the argument in either, NumPy gets a separate overload.
The last overload is for options whose values a type checker does not know, such as ``return_lse=flag``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path

import gpu_ops

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "gpu_ops" / "__init__.pyi"
WIDTH = 110

# op: the argument whose library the results have, and the results by options.
#
# Results: "like": dtype and axes of that argument; "any": of another dtype or number of axes; "int8": of this dtype;
# "extra": a dict of arrays. Others are literal types.
# Options: "name": True, or given; "name=value": this value; "?name": any value. An option that only other
# lines of the op name has its default.
RETURNS: dict[str, tuple[str, dict[str, str]]] = {
    "adamw_step": ("params", {"": "None"}),
    "attention": ("q", {"": "any", "return_lse": "any, any"}),
    "attention_backward": ("q", {"": "any, any, any", "return_extra": "any, any, any, extra"}),
    "attention_decode": ("q", {"": "any", "return_lse": "any, any"}),
    "attention_merge": ("out1", {"": "like, any"}),
    "attention_varlen": ("q", {"": "any", "return_lse": "any, any"}),
    "attention_varlen_backward": ("q", {"": "any, any, any", "return_extra": "any, any, any, extra"}),
    "cross_entropy": ("logits", {"": "any", "return_lse": "any, any"}),
    "cross_entropy_backward": ("logits", {"": "like"}),
    "dropout": ("x", {"": "like"}),
    "dropout_backward": ("dy", {"": "like"}),
    "embedding": ("ids", {"": "any"}),
    "embedding_backward": ("dx", {"": "any"}),
    "global_norm": ("arrays", {"": "any, any"}),
    "layernorm": (
        "x",
        {
            "?return_sum": "like",
            "?return_sum return_stats": "like, any, any",
            "residual": "like, like",
            "residual return_stats": "like, like, any, any",
            "residual return_sum=False": "like",
            "residual return_sum=False return_stats": "like, any, any",
        },
    ),
    "layernorm_backward": ("x", {"": "like, any, any"}),
    "linear": ("x", {"": "like"}),
    "linear_backward": (
        "x",
        {
            "": "like, any",
            "has_bias": "like, any, any",
            "only='dx'": "like",
            "only='weights'": "any",
            "has_bias only='weights'": "any, any",
        },
    ),
    "linear_cross_entropy": (
        "x",
        {
            "?bias ?only": "any",
            "?bias ?only return_lse": "any, any",
            "grads": "any, like, any",
            "grads return_lse": "any, like, any, any",
            "bias grads": "any, like, any, any",
            "bias grads return_lse": "any, like, any, any, any",
            "?bias grads only='dx'": "any, like",
            "?bias grads only='dx' return_lse": "any, like, any",
        },
    ),
    "rmsnorm": (
        "x",
        {
            "?return_sum": "like",
            "?return_sum return_rstd": "like, any",
            "residual": "like, like",
            "residual return_rstd": "like, like, any",
            "residual return_sum=False": "like",
            "residual return_sum=False return_rstd": "like, any",
        },
    ),
    "rmsnorm_backward": ("x", {"": "like, any"}),
    "rmsnorm_quant_int8": ("x", {"": "int8, any, int32", "residual": "int8, any, int32, like"}),
    "rope": ("q", {"": "like", "k": "like, like"}),
    "rope_append_kv": ("q", {"": "like"}),
    "rope_backward": ("dq", {"": "like", "dk": "like, like"}),
    "sample": ("logits", {"": "int32", "return_logprob": "int32, any"}),
    "softmax": ("x", {"": "like"}),
    "softmax_backward": ("dy", {"": "like"}),
    "swiglu": ("gate", {"": "like"}),
    "swiglu_backward": ("gate", {"": "like", "up": "like, like"}),
    "swiglu_mlp": ("x", {"": "like", "keep='gate_up'": "like, like"}),
    "swiglu_mlp_backward": ("x", {"": "like, any, any, any"}),
    "ternary_matmul": ("x", {"": "any"}),
    "ternary_matmul_backward": ("x", {"": "like, any", "only='dx'": "like", "only='dw'": "any"}),
    "ternary_pack": ("trits", {"": "uint8"}),
    "ternary_quantize": ("w", {"": "TernaryMatrix"}),
    "ternary_unpack": ("packed", {"": "int8"}),
}

# Types of parameters annotated Any that are no plain arrays: by "op.name", or by name in every op. {}: an array.
PARAMETERS = {
    "adamw_step.m": "{0} | tuple[{0}, {0}]",
    "adamw_step.v": "{0} | tuple[{0}, {0}]",
    "attention_backward.out": "{0} | None",
    "attention_varlen_backward.out": "{0} | None",
    "attention_backward.grads": "tuple[{0}, {0}, {0}]",
    "attention_varlen_backward.grads": "tuple[{0}, {0}, {0}]",
    "block_mask": "BlockMask",
    "denominator": "float | {0}",
    "dloss": "float | {0}",
    "frequency_penalty": "float | {0}",
    "global_norm.arrays": "{0} | Sequence[{0}]",
    "grad_scale": "float | {0}",
    "lr": "float | {0}",
    "lse_dtype": "DTypeLike",
    "min_p": "float | {0}",
    "out": "{0} | tuple[{0}, ...]",
    "out_dtype": "DTypeLike",
    "positions": "int | {0}",
    "presence_penalty": "float | {0}",
    "repetition_penalty": "float | {0}",
    "seed": "int | {0}",
    "step": "int | {0}",
    "temperature": "float | {0}",
    "ternary_matmul.x": "{0} | TernaryMatrix",
    "ternary_pack.scale": "float | {0}",
    "top_k": "int | {0}",
    "top_p": "float | {0}",
}

HEAD = '''\
# fmt: off
"""Written by scripts/stubs.py: do not edit. The functions' docstrings are in gpu_ops/ops.

An op's result has the type of one of its arrays (NumPy's, CuPy's, torch's), and options such as return_lse change the
number of results. The type of a decorator cannot say that; overloads can, and each repeats all parameters.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

'''


def stub() -> str:
    """Text of ``gpu_ops/__init__.pyi``."""
    ops = [name for name in gpu_ops.__all__ if hasattr(getattr(gpu_ops, name), "op")]
    if ops != sorted(RETURNS):
        differ = ", ".join(sorted(set(ops) ^ set(RETURNS)))
        sys.exit(f"stubs: RETURNS must have one row for each op of gpu_ops.__all__; differ: {differ}")
    lines = [*imports(), "", "__version__: str", ""]
    lines += ["__all__ = [", *filled(map(repr, gpu_ops.__all__)), "]"]
    for name in ops:
        lines += ["", *definitions(name)]
    return HEAD + "\n".join(lines) + "\n"


def imports() -> list[str]:
    """Imports of ``gpu_ops/__init__.py`` except ops, which the stub defines itself."""
    own_line = "from gpu_ops.core.arrays import AnyArray, ArrayT, NumPyT"
    tree = ast.parse((ROOT / "gpu_ops" / "__init__.py").read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    lines = [
        f"from {node.module} import {alias.name} as {alias.name}"
        for node in nodes
        for alias in node.names
        if alias.name not in RETURNS
    ]
    return sorted([own_line, *lines], key=lambda line: line.split()[1::2])


def definitions(op: str) -> list[str]:
    """Overloads of an op, or its single definition."""
    like, cases = RETURNS[op]
    result = []
    for options, results in cases.items():
        kinds = results.split(", ")
        if {"like"} != set(kinds) and results[0].islower():
            array = "NumPyT" if "like" in kinds else "NDArray[Any]"
            result.append(
                definition(op, like, array, options, [numpy_type(result_type) for result_type in kinds])
            )
        types = {"extra": "dict[str, ArrayT]"}
        generic = [
            result_type if result_type[0].isupper() else types.get(result_type, "ArrayT")
            for result_type in kinds
        ]
        result.append(
            definition(op, like, "ArrayT" if results[0].islower() else "AnyArray", options, generic)
        )
    if len(cases) > 1:
        everything = " ".join(f"?{name}" for name in deciding(op))
        result.append(definition(op, like, "AnyArray", everything, ["Any"]))
    if len(result) == 1:
        return result[0]
    return [line for lines in result for line in ("@overload", *lines)]


def numpy_type(kind: str) -> str:
    """Type of a result for NumPy arrays."""
    types = {"like": "NumPyT", "any": "NDArray[Any]", "extra": "dict[str, NDArray[Any]]"}
    return types.get(kind, f"NDArray[np.{kind}]")


def deciding(op: str) -> list[str]:
    """Options that decide what an op returns."""
    named = {word.strip("?").partition("=")[0] for options in RETURNS[op][1] for word in options.split()}
    return sorted(named)


def definition(op: str, like: str, array: str, options: str, results: list[str]) -> list[str]:
    """One ``def``, for arguments of type ``array`` in ``like`` and these options."""
    values = {}
    for word in options.split():
        name, _, value = word.partition("=")
        values[name] = value
    parts, marked = [], False
    for name, parameter in inspect.signature(getattr(gpu_ops, op)).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            parts.append("*")
            marked = True
        decides = name in deciding(op) and f"?{name}" not in values
        as_array = array if name == like else "AnyArray"
        type_, default = parameter_type(op, parameter, as_array), f" = {parameter.default!r}"
        if name in values:
            chosen = values[name] or ("True" if isinstance(parameter.default, bool) else "")
            type_ = f"Literal[{chosen}]" if chosen else type_.removesuffix(" | None")
            default = ""
        elif decides:
            type_ = f"Literal[{parameter.default}]" if isinstance(parameter.default, bool) else "None"
        parts.append(f"{name}: {type_}{'' if parameter.default is parameter.empty else default}")
    result = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
    return [f"def {op}(", *filled(parts), f") -> {result}: ..."]


def filled(items: Iterable[str]) -> list[str]:
    """Indented lines with as many items as fit, each with a comma."""
    lines = ["   "]
    for item in items:
        if len(lines[-1]) + len(item) + 2 > WIDTH:
            lines.append("   ")
        lines[-1] += f" {item},".replace("'", '"')
    return lines


def parameter_type(op: str, parameter: inspect.Parameter, array: str) -> str:
    """Annotation of a parameter, or its row of ``PARAMETERS``."""
    if parameter.annotation != "Any":
        return str(parameter.annotation)
    name = parameter.name
    type_ = PARAMETERS.get(f"{op}.{name}", PARAMETERS.get(name, "{0}")).format(array)
    return f"{type_} | None" if parameter.default is None else type_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the file is not current"
    )
    if not parser.parse_args().check:
        STUB.write_text(stub(), encoding="utf-8")
    elif not STUB.is_file() or STUB.read_text(encoding="utf-8") != stub():
        sys.exit(f"stubs: {STUB.relative_to(ROOT)} is not current; run: python scripts/stubs.py")


if __name__ == "__main__":
    main()
