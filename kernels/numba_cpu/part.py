"""Functions that only kernels call, made machine code there and nowhere else.

Numba finishes every function that it compiles on its own: all optimisation passes and machine code, also of what
the function itself calls. A function that is called from another one is then linked into it, optimised and made
machine code once more. Of a kernel made of fifty functions three levels deep that was half of the compile time.
A *part* waits: its code is linked into its callers' as it is, and with that of the kernel all of it is finished once.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

__all__ = ["PartCompiler"]


class _Part(JITCodeLibrary):
    """Code to be linked into other code."""

    @property
    def codegen(self) -> _Part:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """The environment holds Python objects of code that runs by itself."""

    def _optimize_functions(self, module: Any) -> None: ...

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = Linkage.linkonce_odr  # there may be more copies of it, and none need stay
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        self._ensure_finalized()
        return self._final_module


class PartCompiler(Compiler):
    """For ``numba.njit(pipeline_class=...)``."""

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        super().__init__(typing, target, library or _Part(target.codegen(), "part"), *state)
