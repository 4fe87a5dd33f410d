"""What compiles kernels, and the functions that only kernels call, which become machine code there and nowhere else.

Numba finishes every function that it compiles on its own: all optimisation passes and machine code, also of what
the function itself calls. A function that is called from another one is then linked into it, optimised and made
machine code once more. Of a kernel made of fifty functions three levels deep that was half of the compile time.
A *part* waits: the code of all parts that a kernel reaches is linked into the kernel's as it is, and all of it is
finished once.

Numba tells functions of one name and signature apart by a number, counted in each process. Machine code from the disk
was made in several processes, and of two functions of one symbol the first that is loaded serves both: silu in a
kernel that is to compute gelu. So all that a kernel calls is its own, and kernels have names of their own (jit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)

__all__ = ["ApartCompiler", "KernelCompiler", "PartCompiler", "part"]


class _Kernel(JITCodeLibrary):
    """Code that others see the entry of, and nothing else."""

    def _finalize_final_module(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal
        super()._finalize_final_module()


class KernelCompiler(Compiler):
    """For ``numba.njit(pipeline_class=...)``."""

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        if library is None:
            library = _Kernel(target.codegen(), "kernel")
            library.enable_object_caching()
        super().__init__(typing, target, library, *state)


class _Part(JITCodeLibrary):
    """Code to be linked into other code."""

    @property
    def codegen(self) -> _Part:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """The environment holds Python objects of code that runs by itself."""

    def _optimize_functions(self, module: Any) -> None: ...

    def finalize(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = Linkage.linkonce_odr  # there may be more copies of it, and none need stay
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """With all parts that it reaches, each once: only code that is no part asks for this."""
        reached = [self]
        for library in reached:
            if isinstance(library, _Part):
                reached += [
                    other for other in dict.fromkeys(library._linking_libraries) if other not in reached
                ]
        module = self._final_module.clone()
        for library in reached[1:]:
            part = isinstance(library, _Part)
            module.link_in(
                library._final_module if part else library._get_module_for_linking(), preserve=True
            )
        return module


class _Apart(_Part):
    """The same, but never mixed with the code of a caller."""

    def add_ir_module(self, module: Any) -> None:
        for function in module.functions:
            if not function.is_declaration:
                function.attributes.add("noinline")
        super().add_ir_module(module)


class _Passes(PassManager):
    """Without the checks of what each pass leaves."""

    _ENFORCING = False


# Of Numba's passes those that a part has something for: it has no closures, ``with`` or branches on constants.
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


class PartCompiler(CompilerBase):
    """For ``numba.njit(pipeline_class=...)``."""

    code = _Part

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        super().__init__(typing, target, library or self.code(target.codegen(), "part"), *state)

    def define_pipelines(self) -> Any:
        passes = _Passes("part")
        # IRLegalization inserts the deletions that release references
        for each in (*_FRONT, *([IRLegalization] if self.state.flags.nrt else []), *_BACK):
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


class ApartCompiler(PartCompiler):
    """A function that stays one in the kernel."""

    code = _Apart


def part(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit(**options)`` that compiles no further version for an argument that is a constant."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        fold = dispatcher._compiler.fold_argument_types

        def fold_argument_types(*given: Any) -> tuple[Any, tuple[Any, ...]]:
            signature, arguments = fold(*given)
            return signature, tuple(types.unliteral(each) for each in arguments)

        dispatcher._compiler.fold_argument_types = fold_argument_types
        return dispatcher

    return decorate
