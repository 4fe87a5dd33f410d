"""Conversion of compiled functions to disk-cache entries and back: machine code, bitcode, and their symbol names.

Numba's own form is a pickle of the compile result. This one holds no Python objects: the function and its types are
the caller's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    CompileResult,
    Environment,
    PythonFunctionDescriptor,
    normalize_signature,
    signature,
)
from gpu_ops.kernels.compiler.cache import Entry

_FIELDS = ("library", "function", "environment")


def reduce(result: Any) -> Entry:
    """Entry of a compile result. ValueError if machine code alone would not restore it."""
    if result.objectmode or result.lifted or result.reload_init or result.environment.consts:
        raise ValueError(f"{result.fndesc.qualname} holds Python objects, which are not kept")
    name, _, (code, bitcode) = result.library.serialize_using_object_code()
    names = (name, result.fndesc.mangled_name, result.environment.env_name)
    return Entry(dict(zip(_FIELDS, names, strict=True)), {"code": code, "bitcode": bitcode})


def restore(function: Callable[..., Any], sig: Any, target_context: Any, entry: Entry) -> Any:
    """Compile result of ``function`` for the signature ``sig``, which includes the result's type."""
    arguments, result = normalize_signature(sig)
    if result is None:
        raise ValueError("a signature without the type of its result")
    library_name, mangled, environment_name = (str(entry.fields[name]) for name in _FIELDS)
    state = (library_name, "object", (entry.parts["code"], entry.parts["bitcode"]))
    library = target_context.codegen().unserialize_library(state)
    described = PythonFunctionDescriptor(
        native=True,
        modname=function.__module__,
        qualname=function.__qualname__,
        unique_name=function.__qualname__,
        doc="",
        typemap=None,
        restype=result,
        calltypes=None,
        args=tuple(inspect.signature(function).parameters),
        kws=(),
        argtypes=arguments,
        env_name=environment_name,
    )
    described.mangled_name = mangled
    environment = Environment.from_fndesc(described)
    return CompileResult(
        target_context=target_context,
        typing_context=target_context.typing_context,
        library=library,
        environment=environment,
        entry_point=target_context.get_executable(library, described, environment),
        fndesc=described,
        type_annotation="",
        signature=signature(result, *arguments),
        objectmode=False,
        lifted=(),
        typing_error=None,
        call_helper=None,
        metadata=None,
        reload_init=(),
        referenced_envs=(),
    )
