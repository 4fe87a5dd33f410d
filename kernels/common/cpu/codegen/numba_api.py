# ruff: noqa: F401
"""Parts of Numba and llvmlite that this package builds on: the only place to update when a release moves them.

Numba documents ``njit``, ``intrinsic``, ``overload`` and ``register_model``. The rest is internal and may change with
any release, which is why ``pyproject.toml`` bounds Numba's version.
"""

from __future__ import annotations

import llvmlite
import numba
from llvmlite import ir
from llvmlite.binding import Linkage, llvm_version_info
from numba import njit
from numba.core import cgutils, config, types
from numba.core.caching import _Cache as Cache
from numba.core.cgutils import alloca_once, get_or_insert_function, unpack_tuple
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.datamodel import PrimitiveModel
from numba.core.environment import Environment
from numba.core.funcdesc import PythonFunctionDescriptor
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.lowering import Lower
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.typing.templates import AttributeTemplate, infer_getattr, signature
from numba.core.untyped_passes import (
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)
from numba.extending import intrinsic, overload, register_model
from numba.np.arrayobj import make_array, populate_array

VERSIONS = numba.__version__, llvmlite.__version__


def target() -> tuple[str, str, str]:
    """The LLVM triple, CPU name and CPU features (``"+avx,-amx-tile,..."``) that Numba compiles for."""
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, name, features
