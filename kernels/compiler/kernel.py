"""Names of GPU kernels: what to compile, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CUDA_FOLDER", "CudaKernel", "Define", "NumbaKernel", "Variant", "spelled"]

CUDA_FOLDER = Path(__file__).resolve().parents[1] / "cuda"

Define = tuple[str, str | int]


@dataclass(frozen=True)
class CudaKernel:
    """One entry of ``<folder>/<stem>.cu``, specialised by ``-D`` macros. Headers are in ``<folder>/include``.

    Macros also apply to NVRTC's own headers: a name such as ``T``, a template parameter there, breaks them.
    """

    stem: str
    entry: str
    defines: tuple[Define, ...] = ()
    folder: Path = field(default=CUDA_FOLDER, repr=False)
    cooperative: bool = False  # blocks wait for each other, so all must be resident

    @property
    def label(self) -> str:
        """For example ``rmsnorm_forward[DTYPE=bf16,VEC=8]``."""
        return self.entry + spelled(self.defines)


@dataclass(frozen=True)
class NumbaKernel:
    """A plain Python function written for ``numba.cuda``. Variables of its closure are compile-time constants."""

    function: Callable[..., None]
    signature: str
    name: str

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True)
class Variant:
    """A kernel as an op launches it, to be compiled and inspected on every architecture."""

    kernel: CudaKernel | NumbaKernel
    threads_per_block: int
    dynamic_shared_bytes: int = 0


def spelled(defines: tuple[Define, ...]) -> str:
    """Macros as labels and cache entries have them."""
    return f"[{','.join(f'{name}={value}' for name, value in defines)}]" if defines else ""
