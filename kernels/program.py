"""Calls as data: the problem (:class:`Spec`) and the work that solves it (:class:`Program`).

``lower`` turns one into the other: pure Python, no device, no arrays. Each ``kernels/<room>/<op>.py`` registers its
functions with :func:`lowers`, one per op and backend. Only ``gpu_ops/core/run.py`` runs programs.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.compiler.kernel import CudaKernel, NumbaKernel, short_label
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.tensor import Layout, Tensor

__all__ = [
    "Builder",
    "Constant",
    "Dynamic",
    "HostCall",
    "Launch",
    "LaunchTooLarge",
    "Layout",
    "LibraryCall",
    "Limits",
    "Memset",
    "Program",
    "Spec",
    "Tensor",
    "Workspace",
    "lower",
    "lower_module",
    "lowers",
]


@dataclass(frozen=True)
class Spec:
    """A validated call without its arrays. Equal specs have equal programs."""

    op: str
    arrays: tuple[tuple[str, Layout], ...]
    options: tuple[tuple[str, Any], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    """Results that share the memory of an input."""

    def __getitem__(self, option: str) -> Any:
        """The value of an option."""
        return self._options[option]

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        return dict(self.options)

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tensors = {name: Tensor.of(name, layout) for name, layout in self.arrays}
        return tensors | {output: tensors[source] for output, source in self.aliases}

    def tensor(self, name: str) -> Tensor:
        """An array of the call, by name."""
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """An array of the call; None where it has none of this name."""
        return self._tensors.get(name)


@dataclass(frozen=True)
class Workspace:
    """Memory that a program needs in addition to the call's arrays while it runs."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Dynamic:
    """Kernel argument that changes between calls of one program, such as the first position of ``rope``.

    ``struct``: the argument is this structure with the field ``name`` replaced; None: the value itself, of ``dtype``.
    """

    name: str
    dtype: np.dtype[Any]
    struct: Any = None


Argument: TypeAlias = "Tensor | Dynamic | np.generic | int | float"


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Tensors among the arguments name the arrays that they are views of."""

    kernel: CudaKernel | NumbaKernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Argument, ...]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    tensor_maps: tuple[Any, ...] = ()

    @property
    def cooperative(self) -> bool:
        return isinstance(self.kernel, CudaKernel) and self.kernel.cooperative

    def __str__(self) -> str:
        grid, block = (" x ".join(map(str, _without_ones(size))) for size in (self.grid, self.block))
        shared = f", {self.shared} bytes of dynamic shared memory" if self.shared else ""
        return f"{short_label(self.kernel.label)}: grid {grid}, block {block}{shared}"


def _without_ones(size: tuple[int, ...]) -> tuple[int, ...]:
    """A grid or block without its trailing axes of length one."""
    return _without_ones(size[:-1]) if len(size) > 1 and size[-1] == 1 else size


MAX_GRID = (2**31 - 1, 65535, 65535)  # blocks, by axis: the same for every GPU


class LaunchTooLarge(ValueError):
    """Error for a grid that no GPU accepts: the arrays are too large for one launch."""


@dataclass(frozen=True)
class Memset:
    """Step that fills an array or workspace with zeros."""

    name: str


@dataclass(frozen=True)
class HostCall:
    """Call of a CPU function, which takes the call's arrays by name."""

    function: Callable[[dict[str, Any]], None]
    text: str
    scratch: int | Callable[[], int] = 0
    """Bytes that it allocates while it runs, if more than some KB; or a function that computes
    them, for what takes time."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class LibraryCall:
    """Call of a CUDA library function, which takes the device's arrays in place of tensors."""

    function: Callable[..., None]
    arguments: tuple[Argument, ...]
    label: str

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Constant:
    """Array that is part of the program. A device keeps its copy."""

    name: str
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class Program:
    """Workspaces, then steps in order."""

    steps: tuple[Launch | LibraryCall | Memset | HostCall, ...]
    workspaces: tuple[Workspace, ...] = ()
    constants: tuple[Constant, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all workspaces, each at a multiple of 256 bytes."""
        return sum(-(-w.nbytes // ALIGNMENT) * ALIGNMENT for w in self.workspaces)

    @functools.cached_property
    def scratch_bytes(self) -> int:
        """Bytes that CPU functions allocate themselves; the functions run one after the other."""
        sizes = (step.scratch for step in self.steps if isinstance(step, HostCall))
        return max((n if isinstance(n, int) else n() for n in sizes), default=0)

    def __str__(self) -> str:
        lines = [str(step) for step in self.steps if not isinstance(step, Memset)]
        return "\n".join([*lines, *self.notes])


ALIGNMENT = 256  # of workspaces: that of cudaMalloc, more than any kernel requires


@dataclass(frozen=True)
class Limits:
    """Properties of the device that a program may depend on."""

    arch: str = ""
    sms: int = 0
    smem_per_block_optin: int = 0
    card: str = ""
    """Name that the driver reports; empty where nothing can be measured, as on the emulator."""
    preset: str = ""
    """The row of ``gpu_ops.presets`` for the device."""


class Builder:
    """Collector of the steps of a program, and a lowering function's view of its device."""

    def __init__(self, limits: Limits, candidate: str | None = None) -> None:
        self.limits = limits
        self.arch, self.sms, self.card = limits.arch, limits.sms, limits.card
        self.smem_per_block_optin = limits.smem_per_block_optin
        self.candidate = candidate
        """Label of the tuning candidate to use; None: the tuned or the model's choice."""
        self.choices: list[Any] = []
        self._steps: list[Launch | LibraryCall | Memset | HostCall] = []
        self._workspaces: dict[str, Workspace] = {}
        self._constants: dict[str, Constant] = {}
        self._notes: list[str] = []

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Tensor:
        """An uninitialised workspace."""
        return self._workspace(shape, dtype, name, False)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Tensor:
        """A workspace that is zero when the program starts."""
        return self._workspace(shape, dtype, name, True)

    def _workspace(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str, zeroed: bool) -> Tensor:
        if name in self._workspaces:
            name = f"{name} {len(self._workspaces) + 1}"
        self._workspaces[name] = Workspace(name, shape, np.dtype(dtype), zeroed)
        return Tensor.of(name, Layout.contiguous(shape, dtype))

    def scratch(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "scratch") -> Tensor:
        """An uninitialised workspace shared by steps: all requests with one name get the same memory."""
        need, known = Layout.contiguous(shape, dtype).nbytes, self._workspaces.get(name)
        nbytes = max(need, known.nbytes if known else 0)
        self._workspaces[name] = Workspace(name, (nbytes,), np.dtype(np.uint8))
        whole = Tensor.of(name, Layout.contiguous((nbytes,), np.uint8))
        return whole[:need].view(dtype).reshape(shape)

    def constant(self, values: npt.NDArray[Any], name: str) -> Tensor:
        """An array whose values are part of the program."""
        self._constants[name] = Constant(name, values)
        return Tensor.of(name, Layout.contiguous(values.shape, values.dtype))

    def launch(
        self,
        kernel: CudaKernel | NumbaKernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Any,
        *,
        shared: int = 0,
    ) -> None:
        """Add a kernel launch; a grid without blocks launches nothing."""
        if any(n > limit for n, limit in zip(grid, MAX_GRID, strict=False)):
            blocks = " x ".join(map(str, grid))
            raise LaunchTooLarge(
                f"{kernel.label} would take {blocks} blocks, more than a GPU launches at once"
            )
        if 0 not in grid:
            self._steps.append(Launch(kernel, grid, block, tuple(args), shared))

    def zero(self, tensor: Tensor) -> None:
        """Fill a whole array of the call with zeros."""
        if tensor.size:
            self._steps.append(Memset(tensor.name))

    def library(self, function: Callable[..., None], arguments: Any, label: str) -> None:
        """Add a call of a CUDA library, with its text for ``explain``."""
        self._steps.append(LibraryCall(function, tuple(arguments), label))

    def call(
        self,
        function: Callable[[dict[str, Any]], None],
        text: str,
        scratch: int | Callable[[], int] = 0,
    ) -> None:
        """Add a CPU function, with its text for ``explain`` and the bytes that it allocates itself."""
        self._steps.append(HostCall(function, text, scratch))

    def note(self, text: str) -> None:
        """Add a line for ``explain``, once."""
        if text not in self._notes:
            self._notes.append(text)

    def program(self) -> Program:
        return Program(
            tuple(self._steps),
            tuple(self._workspaces.values()),
            tuple(self._constants.values()),
            tuple(self._notes),
        )


Lower: TypeAlias = "Callable[[Spec, Builder], None]"

_lowers: dict[tuple[str, str], Lower] = {}
_modules: dict[str, str] = {}
_lowered: set[tuple[str, str]] = set()


def lowers(op: str, *backends: str) -> Callable[[Lower], Lower]:
    """Register how a backend runs an op. Backends: ``raw``, ``numba`` (GPUs), ``cpu``, ``reference``."""

    def register(function: Lower) -> Lower:
        for backend in backends:
            _lowers[op, backend] = function
        return function

    return register


def lower_module(op: str, module: str) -> None:
    """Set the module that registers an op; it is imported when the op is first lowered."""
    _modules[op] = module


def lower(spec: Spec, backend: str, limits: Limits, candidate: str | None = None) -> tuple[Program, Builder]:
    """Return the program of a spec, and its builder, which records tuned choices."""
    if (spec.op, backend) not in _lowers and spec.op in _modules:
        uninterrupted(importlib.import_module)(_modules[spec.op])
    builder = Builder(limits, candidate)
    run = _lowers[spec.op, backend]
    if (spec.op, backend) in _lowered:
        run(spec, builder)
    else:
        uninterrupted(run)(spec, builder)  # imports the kernels
        _lowered.add((spec.op, backend))
    return builder.program(), builder
