"""Compilation of CUDA C++ to PTX and machine code with NVRTC: no driver, no GPU, no nvcc.

NVRTC is called through ``cuda.bindings`` directly, because ``cuda.core`` queries the driver's version when PTX is
requested. Versions 12 and 13 behave alike here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler import toolkit
from gpu_ops.kernels.compiler.toolkit import install_hint

__all__ = ["Output", "build_key", "compile_cuda", "nearest_arch", "version"]

# Precise arithmetic, on purpose. --use_fast_math (and -ftz=true, which CuPy adds) would flush denormals and
# approximate division, square root and exp, so that kernels would differ from their references near 1e-38. Kernels
# request approximations where they need them. -lineinfo changes no instructions; ptxas -v logs spills.
OPTIONS = ("-std=c++17", "-lineinfo", "--ptxas-options=-v")


@dataclass(frozen=True)
class Output:
    """The output of one NVRTC program."""

    ptx: str
    cubin: bytes
    log: str


@cache
def _library() -> Any:
    """``cuda.bindings.nvrtc`` with its shared library loaded, or a typed error."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads libnvrtc
    except Exception as error:  # ImportError, or one of the loader's errors for a missing library
        raise KernelCompileError(
            f"NVRTC, the CUDA C++ compiler, is not available; {install_hint()}", str(error)
        ) from error
    return nvrtc


def version() -> tuple[int, int]:
    """(major, minor) of NVRTC."""
    _, major, minor = _library().nvrtcVersion()
    return major, minor


def build_key() -> str:
    """Key of the compiler: everything that decides the output in addition to the source and its options."""
    headers = toolkit.headers(version()[0])
    return repr((version(), headers and toolkit.header_version(headers), OPTIONS))


def nearest_arch(capability: tuple[int, int]) -> str:
    """The architecture to compile for, given a device's compute capability.

    That is the device's own, with arch-specific instructions (``a``) if it has any. If this NVRTC does not know the
    capability yet, it is the newest older one of the same generation, whose binaries run there.
    """
    major, minor = capability
    _, known = _library().nvrtcGetSupportedArchs()
    fitting = [arch for arch in known if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        raise KernelCompileError(
            f"NVRTC {'.'.join(map(str, version()))} does not know compute capability {major}.{minor}; "
            "install a newer one (pip install --upgrade nvidia-cuda-nvrtc)"
        )
    exact = max(fitting) == 10 * major + minor
    return f"sm_{max(fitting)}" + ("a" if exact and major >= 9 else "")


def compile_cuda(source: str, name: str, arch: str, options: tuple[str, ...]) -> Output:
    """Compile a program for a real architecture. ``name`` appears in messages and in the line table."""
    nvrtc = _library()
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    _check(nvrtc, result, name, "")
    headers = toolkit.headers(version()[0])
    flags = [f"-arch={arch}", *OPTIONS, *options, *([f"-I{headers}"] if headers else [])]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = (
            _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            .rstrip(b"\0 \n")
            .decode(errors="replace")
        )
        if headers is None and "cannot open source file" in log:
            log += f"\nno CUDA {version()[0]} headers found (pip, CUDA_PATH, CUDA_HOME); {install_hint()}"
        _check(nvrtc, result, f"{name} for {arch}", log)
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Output(ptx, bytes(cubin), log)


def _fetch(size: Any, get: Any, program: Any) -> bytearray:
    """A result of NVRTC, in a bytearray: NVRTC writes into it, and Python shares one-byte ``bytes`` objects."""
    _, length = size(program)
    buffer = bytearray(length)
    get(program, buffer)
    return buffer


def _check(nvrtc: Any, result: Any, what: str, log: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, message = nvrtc.nvrtcGetErrorString(result)
        raise KernelCompileError(f"cannot compile {what}: {message.decode()}", log)
