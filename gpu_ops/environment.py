"""Environment of gpu_ops on this machine: processors, CUDA devices, backends, versions, cache folders.

It is plain data; ``python -m gpu_ops`` prints it. Every probe is safe on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_ops.core.dispatch import BACKENDS, unavailable
from gpu_ops.errors import OptionError
from gpu_ops.kernels.compiler import cache
from gpu_ops.presets import DevicePreset, select_preset

__all__ = ["VARIABLES", "Backend", "Cpu", "CudaDevice", "Environment", "cache_folder", "environment"]

# Distributions to name in a bug report. cupy and numba-cuda are optional; torch is never used, but may be installed.
_PACKAGES = (
    "gpu-ops",
    "numpy",
    "numba",
    "llvmlite",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba-cuda",
    "cuda-bindings",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "nvidia-ml-py",
    "torch",
)

VARIABLES = {
    "NUMBA_NUM_THREADS": "threads that compute on the CPU",
    "GPU_OPS_DEVICE": "default of device=",
    "GPU_OPS_BACKEND": "default of backend=",
    "GPU_OPS_POOL_MB": "memory of freed results that is kept for the next ones, in MiB",
    "GPU_OPS_CACHE_DIR": "folder of compiled kernels",
    "GPU_OPS_QUIET": "1: no progress on stderr, and no notice that kernels are compiled",
    "GPU_OPS_COMM_CHECK": "1: ranks compare their calls before each one",
    "GPU_OPS_LAUNCH_NOTES": "set by scripts/launch.sh: file in which ranks note that they start and leave",
    "GPU_OPS_ARCH": "card of the emulator, such as sm_90",
    "GPU_OPS_SANITIZE": "0: the emulator checks nothing; collect: it reports all faults of a launch",
    "GPU_OPS_TENSOR_CORES": "truncate: the emulator's tensor cores add as those of A100 and H100",
    "GPU_OPS_DUMP": "folder that gets the sources and machine code of GPU kernels",
}
"""Variables that gpu_ops reads, with the effect of each. CONTRIBUTING.md has the details."""

# Folders that hold compiled kernels: the writer, the variable that sets the folder, the default.
_CACHES = (("CuPy", "CUPY_CACHE_DIR", "~/.cupy/kernel_cache"),)


@dataclass(frozen=True)
class Cpu:
    """Host processor; ``threads`` is the number that this process may use (affinity), not that of the chip."""

    model: str
    threads: int
    memory_bytes: int


@dataclass(frozen=True)
class CudaDevice:
    """CUDA device as the driver reports it, and its preset (``None``: older than any preset)."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    preset: str | None


@dataclass(frozen=True)
class Backend:
    """One cell of the dispatch table; ``missing`` is the reason why it cannot run here, ``None`` if it can."""

    device: str
    backend: str
    missing: str | None


@dataclass(frozen=True)
class Environment:
    """Data that ``python -m gpu_ops`` shows."""

    cpu: Cpu
    cuda_devices: tuple[CudaDevice, ...]
    cuda_missing: str | None
    driver: str | None
    preset: str | None
    preset_reason: str
    backends: tuple[Backend, ...]
    versions: dict[str, str]
    caches: dict[str, str]
    variables: dict[str, str]
    """Variables of :data:`VARIABLES` that are set, and any others that begin with ``GPU_OPS_``."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain containers, for JSON."""
        return dataclasses.asdict(self)


def environment() -> Environment:
    """Probe the machine. Imports NVML's binding if it is installed; starts no CUDA context.

    Examples
    --------
    >>> from gpu_ops.environment import environment
    >>> environment().cpu.threads >= 1
    True
    """
    devices, missing, driver = _cuda_devices()
    preset, reason = _preset(devices)
    return Environment(
        cpu=Cpu(_cpu_model(), _threads(), _memory()),
        cuda_devices=devices,
        cuda_missing=missing,
        driver=driver,
        preset=None if preset is None else preset.name,
        preset_reason=reason,
        backends=_backends(),
        versions=_versions(),
        caches=_caches(),
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith("GPU_OPS_") or k in VARIABLES},
    )


def _cuda_devices() -> tuple[tuple[CudaDevice, ...], str | None, str | None]:
    """Devices, the reason if there are none, and the driver's version. NVML needs no CUDA context and no toolkit."""
    if importlib.util.find_spec("pynvml") is None:
        return (), "NVML's binding is not installed (pip install nvidia-ml-py)", None
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"no NVIDIA driver answers ({error})", None
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = f"{nvml.nvmlSystemGetDriverVersion()} (CUDA {version // 1000}.{version % 1000 // 10})"
        devices = tuple(_nvml_device(nvml, i) for i in range(nvml.nvmlDeviceGetCount()))
        return devices, None if devices else "the NVIDIA driver reports no device", driver
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver refuses ({error})", None
    finally:
        nvml.nvmlShutdown()


def _nvml_device(nvml: Any, index: int) -> CudaDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = str(nvml.nvmlDeviceGetName(handle))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    preset = _preset_of(name, (major, minor))
    return CudaDevice(index, name, (major, minor), memory, None if preset is None else preset.name)


def _preset_of(name: str, capability: tuple[int, int]) -> DevicePreset | None:
    """Preset of the card, else the generic one of its compute capability, else None."""
    for key in (name, capability):
        try:
            return select_preset(key)
        except OptionError:
            continue
    return None


def _preset(devices: tuple[CudaDevice, ...]) -> tuple[DevicePreset | None, str]:
    if wanted := os.environ.get("GPU_OPS_ARCH"):
        try:
            return select_preset(), f"GPU_OPS_ARCH={wanted}"
        except OptionError as error:
            return None, str(error)
    if not devices:
        return None, "no CUDA device; GPU_OPS_ARCH=sm_86 selects one without the card"
    first = devices[0]
    if first.preset is None:
        return None, "compute capability {}.{} is older than any preset".format(*first.compute_capability)
    return select_preset(first.preset), f"device 0 is a {first.name}"


def _backends() -> tuple[Backend, ...]:
    pairs = [(device, name) for device, names in BACKENDS.items() for name in names]
    return tuple(Backend(device, name, unavailable(device, name)) for device, name in pairs)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "gpu-ops" not in versions:  # run from a checkout that is not installed
        import gpu_ops

        versions["gpu-ops"] = f"{gpu_ops.__version__} (not installed)"
    return versions


def _caches() -> dict[str, str]:
    no_compiler = unavailable("cpu", "numba")  # then the folder's name, a hash of versions, is unknown too
    cpu = f"nowhere: {no_compiler}" if no_compiler else str(cache_folder() or _nowhere(cache.CPU))
    rows = {"CPU": cpu}
    gpu = cache.cache_folder(cache.CUDA, quiet=True)
    rows["GPU"] = str(gpu or _nowhere(cache.CUDA))
    for owner, variable, default in _CACHES:
        if importlib.util.find_spec(owner.lower()) is not None:
            rows[owner] = str(Path(os.environ.get(variable) or default).expanduser())
    return rows


def _nowhere(folder: str) -> str:
    return f"nowhere: compiled anew in every process ({cache.folder_problem(folder)})"


def cache_folder() -> Path | None:
    """Folder of compiled CPU kernels; ``None`` if no folder is writable."""
    from gpu_ops.kernels.common.cpu.jit import cache_dir

    return cache_dir(quiet=True)


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "cpu model", "hardware"):
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
