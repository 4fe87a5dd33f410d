"""Search for parts of the CUDA toolkit, in NVIDIA's wheels or on the machine; the command to install an extra."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

from gpu_ops.errors import KernelCompileError

__all__ = ["assemble", "header_version", "headers", "install_command", "install_hint", "tool"]

# Wheels for CUDA 12 have one folder per component; those for CUDA 13 share one.
_WHEEL_FOLDERS = ("cu13", "cuda_runtime", "cuda_nvcc")


def install_hint() -> str:
    """Advice for a missing compiler."""
    return f"install the compilers: {install_command('emulator')}"


def _install_ptxas() -> str:
    return f"{install_hint()}, or with CUDA 13: pip install nvidia-cuda-nvcc"


def _roots() -> list[Path]:
    """Folders with ``include`` or ``bin`` in them, best first."""
    nvidia = importlib.util.find_spec("nvidia")  # the namespace package of the wheels
    wheels = [Path(p) for p in nvidia.submodule_search_locations or ()] if nvidia else []
    roots = [wheel / folder for wheel in wheels for folder in _WHEEL_FOLDERS]
    roots += [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    return [*roots, Path("/usr/local/cuda")]


@cache
def headers(major: int) -> Path | None:
    """The folder of ``cuda_fp16.h`` and related headers, in the compiler's own major version."""
    for root in _roots():
        folder = root / "include"
        if (folder / "cuda_fp16.h").is_file() and header_version(folder) // 1000 == major:
            return folder
    return None


def header_version(folder: Path) -> int:
    """``CUDA_VERSION`` of a folder of toolkit headers, such as 12090; 0 if unknown."""
    try:
        match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(errors="replace"))
    except OSError:
        return 0
    return int(match.group(1)) if match else 0


@cache
def tool(name: str) -> Path | None:
    """The path of ``ptxas``, ``nvdisasm`` or ``cuobjdump``."""
    for root in _roots():
        if (path := root / "bin" / name).is_file():
            return path
    executable = shutil.which(name)
    return Path(executable) if executable else None


def assemble(ptx: str, arch: str) -> tuple[bytes, str]:
    """Assemble PTX to a cubin with ``ptxas``; the log lists registers and spills."""
    import subprocess

    ptxas = tool("ptxas")
    if ptxas is None:
        raise KernelCompileError(f"ptxas is not installed; {_install_ptxas()}")
    with tempfile.TemporaryDirectory(prefix="gpu_ops-") as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(ptxas), f"-arch={arch}", "-v", str(source), "-o", str(target)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        log = run.stdout + run.stderr
        if run.returncode:
            older = f"; it is too old: {_install_ptxas()}" if "Unsupported .version" in log else ""
            raise KernelCompileError(f"{ptxas} refuses the PTX for {arch}{older}", log)
        return target.read_bytes(), log


_CHECKOUT = Path(__file__).resolve().parents[2]


def install_command(extra: str) -> str:
    """``pip install`` of an extra, such as ``emulator``: in the running checkout, or of the installed package.

    The package index does not have gpu-ops: pip reads the extras of the package that is installed.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f'pip install ".[{extra}]" (in {_CHECKOUT})'
    return f'pip install "gpu_ops[{extra}]"'
