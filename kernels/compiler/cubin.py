"""Reads a kernel's resources from its cubin, without a GPU: registers, spills, shared memory; and its occupancy.

A cubin is an ELF file. ``.nv.info`` and ``.nv.info.<kernel>`` are lists of records (format u8, attribute u8, u16).
With format 4 the u16 is the length of the payload that follows, otherwise it is the value.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "REGISTERS_PER_SM",
    "RESERVED",
    "DeviceLimits",
    "Limits",
    "Occupancy",
    "Resources",
    "architecture",
    "kernel_names",
    "occupancy",
    "parameter_sizes",
    "resources",
    "smem_per_block_optin",
]

_FRAME_SIZE, _REGCOUNT = 0x11, 0x2F  # in .nv.info: (symbol, value) each
_MAX_THREADS, _KPARAM_INFO, _NUM_BARRIERS = 0x05, 0x17, 0x4C  # in .nv.info.<kernel>
_SIZED = 4


@dataclass(frozen=True)
class Resources:
    """Resources per thread or per block of a kernel."""

    registers: int  # per thread
    local_bytes: int  # stack frame per thread: arrays in local memory, and spills
    spill_bytes: int | None  # stores plus loads per thread, from the ptxas log; None without one
    static_shared_bytes: int
    barriers: int
    max_threads: int | None  # from __launch_bounds__


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that fit on one SM, and the resource that limits them."""

    blocks: int
    warps: int
    share: float  # of the warps an SM can hold
    limiter: str  # "registers", "warps", "shared memory", "barriers", "blocks"


class Limits(Protocol):
    """Limits of one compute capability, as in ``gpu_ops.presets.Arch``."""

    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def smem_per_sm(self) -> int: ...
    @property
    def smem_per_block_optin(self) -> int: ...
    @property
    def max_threads_per_sm(self) -> int: ...
    @property
    def max_blocks_per_sm(self) -> int: ...
    @property
    def registers_per_sm(self) -> int: ...
    @property
    def max_threads_per_block(self) -> int: ...


def smem_per_block_optin(arch: str) -> int:
    """Limit of shared memory (static plus dynamic, in bytes) per block, for an architecture such as ``"sm_90a"``."""
    kib = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
    return 1024 * kib.get(int(arch[3:].rstrip("af")), 99)  # 99: sm_86, 89, 120


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    size: int
    data: bytes
    link: int


def _sections(image: bytes) -> list[_Section]:
    """Sections of a 64-bit little-endian ELF file."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a cubin: want a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    sections = []
    for name, section_type, flags, _, offset, size, link, *_ in headers:
        text = image[names + name : image.index(b"\0", names + name)].decode()
        data = b"" if section_type == 8 else image[offset : offset + size]  # 8: NOBITS, such as shared memory
        sections.append(_Section(text, section_type, flags, size, data, link))
    return sections


def _records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(attribute, value, payload) of an ``.nv.info`` section."""
    at = 0
    while at + 4 <= len(data):
        format, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = data[at : at + value] if format == _SIZED else b""
        at += len(payload)
        yield attribute, value, payload


def _symbols(sections: list[_Section]) -> list[str]:
    """Names by symbol index."""
    table = next(s for s in sections if s.kind == 2)  # SYMTAB
    strings = sections[table.link].data
    names = []
    for at in range(0, len(table.data), 24):
        (name,) = struct.unpack_from("<I", table.data, at)
        names.append(strings[name : strings.index(b"\0", name)].decode())
    return names


def _named(sections: list[_Section], name: str) -> _Section | None:
    return next((s for s in sections if s.name == name), None)


def architecture(image: bytes) -> int:
    """The compute capability of a cubin, such as 90. Its byte in the ELF flags depends on the ABI version."""
    return image[0x31] if image[8] >= 8 else image[0x30]


def kernel_names(image: bytes) -> list[str]:
    """The kernels of a cubin."""
    prefix = ".nv.info."
    return [s.name.removeprefix(prefix) for s in _sections(image) if s.name.startswith(prefix)]


def _info(sections: list[_Section], kernel: str) -> list[tuple[int, int, bytes]]:
    section = _named(sections, f".nv.info.{kernel}")
    if section is None:
        raise ValueError(f"the cubin has no kernel {kernel!r}")
    return list(_records(section.data))


def parameter_sizes(image: bytes, kernel: str) -> list[int]:
    """Bytes of each parameter, in order."""
    sizes = {}
    for attribute, _, payload in _info(_sections(image), kernel):
        if attribute == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            sizes[ordinal] = packed >> 18
    return [sizes[i] for i in sorted(sizes)]


def resources(image: bytes, kernel: str, log: str = "") -> Resources:
    """Read one kernel's resources. ``log`` is the verbose output of ptxas, the only source for spills."""
    sections = _sections(image)
    info = _info(sections, kernel)
    symbols = _symbols(sections)
    totals = {}
    general = _named(sections, ".nv.info")
    for attribute, _, payload in _records(general.data if general else b""):
        if attribute in (_FRAME_SIZE, _REGCOUNT):
            symbol, value = struct.unpack("<II", payload)
            if symbols[symbol] == kernel:
                totals[attribute] = value
    text = _named(sections, f".text.{kernel}")
    shared = _named(sections, f".nv.shared.{kernel}")
    hidden = RESERVED if architecture(image) >= 90 else 0  # sm_90 and up: part of the section
    max_threads = barriers = None
    for attribute, value, payload in info:
        if attribute == _MAX_THREADS:
            x, y, z = struct.unpack("<III", payload)
            max_threads = x * y * z
        elif attribute == _NUM_BARRIERS:
            barriers = value & 0xFF
    if barriers is None:
        barriers = (text.flags >> 20) & 0x1F if text else 0
    return Resources(
        registers=totals[_REGCOUNT],
        local_bytes=totals.get(_FRAME_SIZE, 0),
        spill_bytes=_spills(log, kernel),
        static_shared_bytes=max(0, shared.size - hidden) if shared else 0,
        barriers=barriers,
        max_threads=max_threads,
    )


def _spills(log: str, kernel: str) -> int | None:
    match = re.search(
        rf"Function properties for {re.escape(kernel)}\s.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
        re.DOTALL,
    )
    return int(match.group(1)) + int(match.group(2)) if match else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(needs: Resources, threads: int, dynamic_shared: int, limits: Limits) -> Occupancy:
    """Blocks of ``threads`` threads that fit on one SM. 0 blocks: the kernel cannot be launched."""
    capability = limits.compute_capability
    reserved = RESERVED if capability >= (8, 0) else 0
    granule = 128 if capability >= (8, 0) else 256
    warps = -(-threads // 32)
    max_warps = limits.max_threads_per_sm // 32

    per_warp = _round_up(32 * needs.registers, 256)
    # Each of an SM's four schedulers owns a quarter of its registers, and a warp stays with one scheduler.
    fits_at_all = per_warp * _round_up(warps, 4) <= limits.registers_per_sm
    by_registers = limits.registers_per_sm // 4 // per_warp * 4 // warps if fits_at_all else 0

    shared = _round_up(needs.static_shared_bytes + dynamic_shared + reserved, granule)
    fits = shared <= limits.smem_per_block_optin + reserved
    by_shared = (limits.smem_per_sm // shared if shared else limits.max_blocks_per_sm) if fits else 0

    candidates = {
        "blocks": limits.max_blocks_per_sm,
        "warps": max_warps // warps if threads <= limits.max_threads_per_block else 0,
        "registers": by_registers,
        "shared memory": by_shared,
    }
    if capability >= (9, 0) and needs.barriers:
        pool = limits.max_blocks_per_sm * (2 if max_warps > 48 else 1)
        candidates["barriers"] = pool // needs.barriers
    limiter = min(candidates, key=candidates.__getitem__)
    blocks = candidates[limiter]
    return Occupancy(blocks, blocks * warps, blocks * warps / max_warps, limiter)


REGISTERS_PER_SM = 65536
RESERVED = 1024  # bytes of shared memory per block that the driver keeps, from compute capability 8.0 on


@dataclass(frozen=True)
class DeviceLimits:
    """Limits that differ between cards."""

    sms: int
    smem_per_block_optin: int
