"""Device presets: numbers of each card, for launch configurations and estimates.

There is one frozen row per card and one generic row per compute capability. Rows check themselves when
made: a number that contradicts the architecture's limits or the card's clock raises an error on import.

Units: bytes, GB/s (1e9 bytes), TFLOPS (1e12, dense: without 2:4 sparsity; a multiply-add is two), MHz.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass

from gpu_ops.errors import OptionError

__all__ = ["ARCHES", "PRESETS", "Arch", "DevicePreset", "Peaks", "find_preset", "select_preset"]

KIB, MIB = 1024, 1024**2


@dataclass(frozen=True)
class Arch:
    """Limits of one compute capability: CUDA Programming Guide, appendix Compute Capabilities."""

    compute_capability: tuple[int, int]
    smem_per_sm: int
    smem_per_block_optin: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    fp32_per_sm_clk: int  # multiply-adds per SM and clock, CUDA cores
    fp16_per_sm_clk: int  # multiply-adds per SM and clock, tensor cores at full rate
    has_bfloat16: bool
    has_float8: bool
    registers_per_sm: int = 65536
    max_threads_per_block: int = 1024

    def __post_init__(self) -> None:
        # From 8.0 on, the driver reserves 1 KiB of every block's shared memory.
        reserved = KIB if self.compute_capability >= (8, 0) else 0
        if self.smem_per_block_optin != self.smem_per_sm - reserved:
            raise ValueError(f"{self.name}: a block can opt in to {self.smem_per_sm - reserved} bytes")
        if self.max_threads_per_sm % 32 or not self.max_threads_per_block <= self.max_threads_per_sm:
            raise ValueError(f"{self.name}: threads per SM must be whole warps, and one block must fit")
        if self.has_float8 and not self.has_bfloat16:
            raise ValueError(f"{self.name}: no architecture has float8 without bfloat16")

    @property
    def name(self) -> str:
        """Name for compilers, such as ``sm_86``."""
        return "sm_{}{}".format(*self.compute_capability)


ARCHES = {
    arch.name: arch
    for arch in (
        #    cc        smem/SM     opt-in     threads blocks fp32 fp16   bf16   fp8
        Arch((7, 5), 64 * KIB, 64 * KIB, 1024, 16, 64, 512, False, False),
        Arch((8, 0), 164 * KIB, 163 * KIB, 2048, 32, 64, 1024, True, False),
        Arch((8, 6), 100 * KIB, 99 * KIB, 1536, 16, 128, 512, True, False),
        Arch((8, 7), 164 * KIB, 163 * KIB, 1536, 16, 128, 1024, True, False),
        Arch((8, 9), 100 * KIB, 99 * KIB, 1536, 24, 128, 512, True, True),
        Arch((9, 0), 228 * KIB, 227 * KIB, 2048, 32, 128, 2048, True, True),
        Arch((10, 0), 228 * KIB, 227 * KIB, 2048, 32, 128, 4096, True, True),
        Arch((12, 0), 100 * KIB, 99 * KIB, 1536, 24, 128, 512, True, True),
    )
}


@dataclass(frozen=True)
class Peaks:
    """Dense peaks in TFLOPS (int8: TOPS). ``None``: the hardware has no such instruction.

    ``float32`` is for CUDA cores; the rest are for tensor cores. ``float16`` and ``bfloat16`` accumulate in
    float32, which GeForce cards do at half rate; ``float16_acc16`` accumulates in float16.
    """

    float32: float
    tf32: float | None
    float16: float
    float16_acc16: float
    bfloat16: float | None
    int8: float
    float8: float | None = None


@dataclass(frozen=True)
class DevicePreset:
    """One card, or the generic row of an architecture."""

    name: str
    arch: Arch
    sms: int
    boost_mhz: int
    l2_bytes: int
    memory_gbps: float
    memory_gb: float
    peaks: Peaks
    source: str
    generic: bool = False
    like: str = ""  # card whose speeds and cache a generic row has

    def __post_init__(self) -> None:
        def demand(holds: bool, what: str) -> None:
            if not holds:
                raise ValueError(f"preset {self.name}: {what}")

        arch, peaks = self.arch, self.peaks
        demand(0 < self.sms <= 192, f"{self.sms} SMs")
        demand(MIB <= self.l2_bytes <= 256 * MIB, f"L2 of {self.l2_bytes} bytes")
        demand(100 <= self.memory_gbps <= 10_000, f"memory bandwidth {self.memory_gbps} GB/s")
        demand(4 <= self.memory_gb <= 300, f"memory {self.memory_gb} GB")
        demand(bool(self.source), "no source given")
        for what, peak, has in (
            ("bfloat16", peaks.bfloat16, arch.has_bfloat16),
            ("tf32", peaks.tf32, arch.has_bfloat16),  # both were introduced with 8.0
            ("float8", peaks.float8, arch.has_float8),
        ):
            demand((peak is not None) == has, f"{arch.name} {'has' if has else 'has no'} {what}")
        # A peak is SMs x multiply-adds x 2 x clock. Data sheets quote tensor peaks of big chips at a lower
        # clock (H100: 1830 of 1980 MHz), but never one above boost.
        for what, tflops, rate in (
            ("float32", peaks.float32, arch.fp32_per_sm_clk),
            ("float16_acc16", peaks.float16_acc16, arch.fp16_per_sm_clk),
        ):
            mhz = tflops * 1e12 / (2 * self.sms * rate) / 1e6
            demand(0.9 * self.boost_mhz <= mhz <= 1.01 * self.boost_mhz, f"{what} peak implies {mhz:.0f} MHz")
        demand(peaks.float16_acc16 / peaks.float16 in (1.0, 2.0), "float32 accumulation is full or half rate")
        demand(peaks.bfloat16 in (None, peaks.float16), "bfloat16 runs at float16's rate")
        demand(peaks.tf32 is None or 0.48 < peaks.tf32 / peaks.float16 < 0.51, "tf32 is half of float16")
        demand(1.9 < peaks.int8 / peaks.float16_acc16 < 2.1, "int8 runs at twice float16's full rate")


def _card(
    name: str, arch: str, sms: int, boost: int, l2_mib: int, gbps: float, gb: float, peaks: Peaks, source: str
) -> DevicePreset:
    return DevicePreset(name, ARCHES[arch], sms, boost, l2_mib * MIB, gbps, gb, peaks, source)


def _geforce(fp32: float, tf32: float, fp16: float, int8: float, float8: float | None = None) -> Peaks:
    """Peaks of a GeForce card: float32 accumulation (tf32, float16, bfloat16) at half rate."""
    return Peaks(fp32, tf32, fp16, 2 * fp16, fp16, int8, float8)


def _datacentre(fp32: float, tf32: float, fp16: float, int8: float, float8: float | None = None) -> Peaks:
    """Peaks of a data-centre card: full rate with any accumulator."""
    return Peaks(fp32, tf32, fp16, fp16, fp16, int8, float8)


_GA102 = "NVIDIA Ampere GA102 whitepaper v2.1, appendix A"
_ADA = "NVIDIA Ada whitepaper v2.1, appendix A"
_RTX50 = "NVIDIA RTX Blackwell whitepaper, appendices A and B"
_A100 = "NVIDIA A100 data sheet (2021), Ampere whitepaper"
_H100 = "NVIDIA H100 data sheet (its sparse figures halved), Hopper whitepaper"

_CARDS = (
    # GeForce. float8 in the last column is with float32 accumulation, half of the headline figure.
    _card("RTX 3090 Ti", "sm_86", 84, 1860, 6, 1008, 24, _geforce(40, 40, 80, 320), _GA102),
    _card("RTX 4090", "sm_89", 128, 2520, 72, 1008, 24, _geforce(82.6, 82.6, 165.2, 660.6, 330.3), _ADA),
    _card("RTX 5080", "sm_120", 84, 2617, 64, 960, 16, _geforce(56.3, 56.3, 112.6, 450.2, 225.1), _RTX50),
    _card("RTX 5090", "sm_120", 170, 2407, 96, 1792, 32, _geforce(104.8, 104.8, 209.5, 838, 419), _RTX50),
    # Data centre.
    _card("T4", "sm_75", 40, 1590, 4, 320, 16, Peaks(8.1, None, 65, 65, None, 130), "NVIDIA T4 data sheet"),
    _card("A100-40", "sm_80", 108, 1410, 40, 1555, 40, _datacentre(19.5, 156, 312, 624), _A100),
    _card("A100-80", "sm_80", 108, 1410, 40, 2039, 80, _datacentre(19.5, 156, 312, 624), _A100 + "; SXM"),
    _card("L40S", "sm_89", 142, 2520, 96, 864, 48, _datacentre(91.6, 183, 362.05, 733, 733),
          "NVIDIA L40S data sheet"),
    _card("H100 SXM", "sm_90", 132, 1980, 50, 3350, 80, _datacentre(66.9, 494.7, 989.4, 1978.9, 1978.9),
          _H100),
    _card("H100 PCIe", "sm_90", 114, 1755, 50, 2000, 80, _datacentre(51.2, 378, 756, 1513, 1513), _H100),
    # The driver reports 60 MB of L2 on an H200 (50 MB on an H100).
    _card("H200", "sm_90", 132, 1980, 60, 4800, 141, _datacentre(66.9, 494.7, 989.4, 1978.9, 1978.9),
          "NVIDIA H200 data sheet; L2 as reported by cudaGetDeviceProperties"),
    _card("B200", "sm_100", 148, 1980, 126, 8000, 180, _datacentre(75, 1125, 2250, 4500, 4500),
          "NVIDIA HGX B200 data sheet per GPU; SMs and L2 as reported by cudaGetDeviceProperties"),
)  # fmt: skip

# The generic row of a compute capability takes its limits from the architecture and its speeds from a small
# card of that generation: a conservative estimate. GTX 16 cards are 7.5 too, but without tensor cores.
_GENERIC = {
    "sm_75": ("RTX 2060", 30, 1680, 3, 336, 6, Peaks(6.5, None, 25.8, 51.6, None, 103.2),
              "NVIDIA Turing whitepaper"),
    "sm_80": ("A30", 56, 1440, 24, 933, 24, _datacentre(10.3, 82, 165, 330), "NVIDIA A30 data sheet"),
    "sm_86": ("RTX 3060", 28, 1777, 3, 360, 12, _geforce(12.7, 12.7, 25.5, 101.9), _GA102),
    "sm_87": ("Jetson AGX Orin 64GB", 16, 1300, 4, 204.8, 64, _datacentre(5.32, 21.3, 42.6, 85.2),
              "Jetson AGX Orin technical brief (its sparse figure halved)"),
    "sm_89": ("RTX 4060", 24, 2460, 24, 272, 8, _geforce(15.1, 15.1, 30.2, 120.9, 60.4), _ADA),
    "sm_90": ("H100 PCIe", 114, 1755, 50, 2000, 80, _datacentre(51.2, 378, 756, 1513, 1513), _H100),
    "sm_100": ("B200", 148, 1980, 126, 8000, 180, _datacentre(75, 1125, 2250, 4500, 4500),
               "NVIDIA HGX B200 data sheet"),
    "sm_120": ("RTX 5060", 30, 2497, 24, 448, 8, _geforce(19.2, 19.2, 38.3, 153.4, 76.7),
               "NVIDIA RTX 5060 specifications"),
}  # fmt: skip


def _generic(arch: str) -> DevicePreset:
    like, sms, boost, l2_mib, gbps, gb, peaks, source = _GENERIC[arch]
    source = f"limits: CUDA Programming Guide; speeds: {like} ({source})"
    return DevicePreset(arch, ARCHES[arch], sms, boost, l2_mib * MIB, gbps, gb, peaks, source, True, like)


#: Every preset by name: cards first, then the generic rows (``sm_75`` ... ``sm_120``).
PRESETS: dict[str, DevicePreset] = {p.name: p for p in (*_CARDS, *map(_generic, _GENERIC))}

# Words in the names drivers report: "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090 Ti".
_DRIVER_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("RTX 3090 Ti", ("RTX 3090 TI",)),
    ("RTX 4090", ("GEFORCE RTX 4090",)),
    ("RTX 5080", ("GEFORCE RTX 5080",)),
    ("RTX 5090", ("GEFORCE RTX 5090",)),
    ("A100-40", ("A100", "40GB")),
    ("A100-80", ("A100", "80GB")),
    ("L40S", ("L40S",)),
    ("T4", ("TESLA T4",)),
    ("H100 PCIe", ("H100", "PCIE")),
    ("H100 SXM", ("H100", "HBM3")),
    ("H200", ("H200",)),
    ("B200", ("B200",)),
)
_NOT_THE_CARD = ("LAPTOP", "MAX-Q", "MIG", "NVL", "4090 D", "5090 D", "5080 D", "GB200", "GH200")


def _letters(name: str) -> str:
    """Letters and digits of a name."""
    return "".join(filter(str.isalnum, name.casefold()))


def select_preset(device: str | tuple[int, int] | None = None) -> DevicePreset:
    """Select the preset of a device.

    Parameters
    ----------
    device : str or tuple of int, optional
        Name of a preset (``"H200"``), an architecture (``"sm_86"``, ``"8.6"``, ``(8, 6)``), or the name that
        the driver reports (``"NVIDIA GeForce RTX 4090"``). ``None``: the environment variable
        ``GPU_OPS_ARCH``, which takes the same spellings, to try selection without the card.

    Raises
    ------
    OptionError
        Nothing matches, or no device was given and ``GPU_OPS_ARCH`` is not set.

    Examples
    --------
    >>> select_preset("RTX 3090 Ti").sms, select_preset("rtx-3090ti").sms
    (84, 84)
    >>> select_preset("sm_90").arch.smem_per_block_optin
    232448
    >>> select_preset("NVIDIA A100-SXM4-80GB").memory_gbps
    2039
    """
    what = "select_preset"
    if device is None:
        what, device = "GPU_OPS_ARCH", os.environ.get("GPU_OPS_ARCH")
        if not device:
            raise OptionError(
                "select_preset: no device given and GPU_OPS_ARCH is not set; "
                "pass a name, or set GPU_OPS_ARCH=sm_86"
            )
    if isinstance(device, tuple):
        return _by_arch(device, what)
    if not isinstance(device, str):
        raise OptionError(
            f"{what}: a device is a name such as 'H200' or 'sm_86', or a tuple (8, 6); got {type(device).__name__}"
        )
    wanted = device.strip()
    for name, preset in PRESETS.items():
        if _letters(name) == _letters(wanted):
            return preset
    version = wanted.casefold().removeprefix("sm_").rstrip("af")
    major, dot, minor = version.partition(".")
    if dot and major.isdigit() and minor.isdigit():
        return _by_arch((int(major), int(minor)), what)
    if version.isdigit() and len(version) >= 2:
        return _by_arch((int(version[:-1]), int(version[-1])), what)
    upper = wanted.upper()
    if not any(word in upper for word in _NOT_THE_CARD):
        for name, words in _DRIVER_NAMES:
            if all(word in upper for word in words):
                return PRESETS[name]
    letters = {_letters(name): name for name in PRESETS}
    near = [key for key in letters if _letters(wanted) and _letters(wanted) in key]
    near = near or difflib.get_close_matches(_letters(wanted), letters)
    hint = f"did you mean {', '.join(repr(letters[key]) for key in near)}? " if near else ""
    raise OptionError(f"{what}: no preset for {device!r}; {hint}presets: {', '.join(PRESETS)}")


def find_preset(card: str, capability: str) -> DevicePreset | None:
    """Find the row of a real card: by the name its driver reports, else the generic row of its compute capability."""
    for device in (card, (int(capability[:-1]), int(capability[-1]))):
        try:
            return select_preset(device)
        except OptionError:
            continue
    return None


def _by_arch(capability: tuple[int, int], what: str) -> DevicePreset:
    """Generic row of a compute capability, or of the nearest older minor one, whose binaries also run."""
    older = [
        p
        for p in PRESETS.values()
        if p.generic
        and p.arch.compute_capability[0] == capability[0]
        and p.arch.compute_capability[1] <= capability[1]
    ]
    if not older:
        raise OptionError(
            f"{what}: no preset for compute capability {capability}; there are: {', '.join(ARCHES)}"
        )
    return max(older, key=lambda p: p.arch.compute_capability)
