"""Numba pipelines for kernels, and for device functions, compiled only inside a kernel; entries of the disk cache.

Numba optimises every function that it compiles and makes machine code of it, although the code of a callee is then
linked into its caller and compiled there again. For a kernel made of fifty functions three levels deep that was
half of the compile time. A *device function* stays LLVM IR: IR of all functions in a kernel is linked into the
kernel, and compiled once.

Numba tells functions of the same name and signature apart by a number, counted per process. Machine code from the
disk cache comes from several processes, and of two functions with one symbol the first that is loaded would serve
both: silu in a kernel that should compute gelu. So functions that a kernel calls are internal to it, and kernels have
unique names (jit.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.entry import KernelLower
from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    AnnotateTypes,
    Compiler,
    CompilerBase,
    CompileResult,
    Environment,
    FixupArgs,
    GenericRewrites,
    IRLegalization,
    IRProcessing,
    JITCodeLibrary,
    Linkage,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PassManager,
    PreLowerStripPhis,
    PythonFunctionDescriptor,
    ReconstructSSA,
    TranslateByteCode,
    njit,
    normalize_signature,
    register_pass,
    signature,
    types,
)
from gpu_ops.kernels.compiler.cache import Entry


class KernelLibrary(JITCodeLibrary):
    """Code of which only the entry is visible outside."""

    def _finalize_final_module(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal
        super()._finalize_final_module()


class KernelCompiler(Compiler):
    """Compiler of kernels for ``numba.njit(pipeline_class=...)``."""

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        if library is None:
            library = KernelLibrary(target.codegen(), "kernel")
            library.enable_object_caching()
        super().__init__(typing, target, library, *state)

    def compile_extra(self, func: Any) -> Any:
        """Compile a kernel, with Numba's own functions (``min``, ``np.zeros``) as IR too.

        Each would get machine code that nothing runs. Numba keeps them for other callers, which link the IR as well.
        Its lock is held.
        """
        codegen = self.state.targetctx.codegen()
        machine_code, codegen._library_class = codegen._library_class, _DeviceLibrary
        try:
            return super().compile_extra(func)
        finally:
            codegen._library_class = machine_code


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(NativeLowering):
    _name = "kernel_lowering"
    lowering_class = KernelLower


class EntryCompiler(KernelCompiler):
    """Compiler of kernels ``f(state, n_tasks, *arguments)``, which get an entry."""

    def define_pipelines(self) -> Any:
        (passes,) = super().define_pipelines()
        passes.passes = [(_KernelLowering if each is NativeLowering else each, text) for each, text in passes.passes]
        passes.finalize()
        return [passes]


class InnerCompiler(Compiler):
    """Compiler of functions that are optimised by themselves before they become a part of a kernel."""

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        super().__init__(typing, target, library or JITCodeLibrary(target.codegen(), "inner"), *state)


class _DeviceLibrary(JITCodeLibrary):
    """Unoptimised IR, to be linked into a kernel."""

    @property
    def codegen(self) -> _DeviceLibrary:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: the environment holds Python objects, which only code that runs by itself uses."""

    def _optimize_functions(self, module: Any) -> None: ...

    def finalize(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                # several kernels may hold a copy, and none has to keep it
                function.linkage = Linkage.linkonce_odr
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Module with all device functions that it reaches, each once, for a library of machine code."""
        reached = [self]
        for library in reached:
            if isinstance(library, _DeviceLibrary):
                reached += [
                    other for other in dict.fromkeys(library._linking_libraries) if other not in reached
                ]
        module = self._final_module.clone()
        for library in reached[1:]:
            device = isinstance(library, _DeviceLibrary)
            module.link_in(
                library._final_module if device else library._get_module_for_linking(), preserve=True
            )
        return module


class _NoinlineLibrary(_DeviceLibrary):
    """Library of a device function that is never inlined into a caller."""

    def add_ir_module(self, module: Any) -> None:
        for function in module.functions:
            if not function.is_declaration:
                function.attributes.add("noinline")
        super().add_ir_module(module)


class _Passes(PassManager):
    """Pass manager without the checks of each pass's result."""

    _ENFORCING = False


# Numba's passes that a device function needs: it has no closures, ``with`` or branches on constants.
_FRONT = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    GenericRewrites,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
)
_BACK = AnnotateTypes, NativeLowering, NoPythonBackend


class DeviceCompiler(CompilerBase):
    """Compiler of device functions for ``numba.njit(pipeline_class=...)``."""

    library_class = _DeviceLibrary

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        super().__init__(typing, target, library or self.library_class(target.codegen(), "device"), *state)

    def define_pipelines(self) -> Any:
        # IRLegalization inserts the deletions that release references
        legalise = (IRLegalization,) if self.state.flags.nrt else ()
        passes = _Passes("device")
        for each in (*_FRONT, *legalise, *_BACK):
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


class NoinlineCompiler(DeviceCompiler):
    """Compiler for a function that stays separate in the kernel."""

    library_class = _NoinlineLibrary


def njit_once(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit(**options)`` that compiles no extra version for a constant argument."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        fold = dispatcher._compiler.fold_argument_types

        def fold_argument_types(*given: Any) -> tuple[Any, tuple[Any, ...]]:
            signature, arguments = fold(*given)
            return signature, tuple(types.unliteral(each) for each in arguments)

        dispatcher._compiler.fold_argument_types = fold_argument_types
        return dispatcher

    return decorate


# Conversion of compiled functions to disk-cache entries and back: machine code, bitcode, and their symbol names.
#
# Numba's own form is a pickle of the compile result. This one holds no Python objects: the function and its
# types are the caller's.

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
