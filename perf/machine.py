"""Facts about this machine and this checkout, to be saved with every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_ops.kernels.compiler.progress import several

ROOT = Path(__file__).resolve().parent.parent
CPU_PACKAGES = ("gpu_ops", "numpy", "numba", "llvmlite", "ml_dtypes")
PACKAGES = (*CPU_PACKAGES, "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "torch")
PREFIXES = ("GPU_OPS_", "NUMBA_", "OMP_", "OPENBLAS_", "MKL_")


def describe(device: str = "cpu") -> dict[str, Any]:
    variables = (name for name in sorted(os.environ) if name.startswith(PREFIXES))
    facts: dict[str, Any] = {
        "device": device,
        "cpu": cpu_model(),
        "cores": available_cores(),
        "threads": threads(),
        "caches": caches(),
        "memory_bytes": memory_total(),
        "mhz": clock_mhz(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in variables if not name.endswith("_DIR")},
        "commit": commit(),
    }
    if device == "cuda":
        facts["gpu"] = gpu()
    return facts


def label(facts: dict[str, Any]) -> str:
    """Name of the machine. Runs with different labels say nothing about a change of the code."""
    if facts.get("gpu"):
        return str(facts["gpu"]["name"])
    return f"{facts['cpu']}, {several(facts['threads'], 'thread')}"


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Number of threads that gpu_ops uses on the CPU; the torch peer is set to the same number."""
    from gpu_ops.kernels.common.cpu.parallel import thread_count

    return thread_count()


def cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith(("model name", "cpu model", "hardware")):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def clock_mhz() -> float | None:
    """Current clock of the first core; None if the system does not report it."""
    scaled = _lines("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    if scaled:
        return float(scaled[0]) / 1000
    clocks = (line.split(":", 1)[1] for line in _lines("/proc/cpuinfo") if line.startswith("cpu MHz"))
    return next(map(float, clocks), None)


def caches() -> dict[str, int]:
    """Bytes of each data or unified cache that the first core sees, by level: ``{"L1": 49152, ...}``."""
    sizes: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        cache_type, level, size = (_lines(index / name) for name in ("type", "level", "size"))
        if cache_type and level and size and cache_type[0] != "Instruction":
            sizes[f"L{level[0]}"] = parse_size(size[0])
    return sizes


def last_level_cache() -> int:
    """Bytes of the last-level cache; 32 MiB if the system does not report it."""
    return max(caches().values(), default=32 << 20)


def parse_size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def memory_total() -> int:
    size = _kib("/proc/meminfo", "MemTotal")
    return (
        size if size or sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )


def memory_available() -> int:
    return _kib("/proc/meminfo", "MemAvailable") or memory_total()


def process_memory(field: str) -> int:
    """Bytes of ``VmRSS``, ``VmHWM``, ... of this process; 0 if the system does not report it."""
    return _kib("/proc/self/status", field)


def versions() -> dict[str, str]:
    result = {}
    for name in PACKAGES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def commit() -> str:
    """The checked-out commit, with ``+changes`` when tracked files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def gpu() -> dict[str, Any] | None:
    """Name, driver, memory and clocks from NVML, or less from CuPy; None without a usable GPU."""
    try:
        pynvml, handle = nvml_device()
    except Exception:  # no package, no driver or no permission
        return _gpu_of_cupy()
    name, driver = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    }


def nvml_device() -> tuple[Any, Any]:
    """NVML, and its handle of CuPy's current device; without CuPy the first. NVML numbers devices differently."""
    import pynvml

    pynvml.nvmlInit()
    try:
        import cupy
    except ImportError:
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    bus = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice())
    return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus)


def _gpu_of_cupy() -> dict[str, Any] | None:
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    except Exception:  # as above
        return None
    return {"name": properties["name"].decode(), "memory_bytes": int(properties["totalGlobalMem"])}


def _kib(path: str, field: str) -> int:
    """Bytes of a line like ``MemTotal:  24684088 kB``; 0 without such a line."""
    return next((int(line.split()[1]) << 10 for line in _lines(path) if line.startswith(field + ":")), 0)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
