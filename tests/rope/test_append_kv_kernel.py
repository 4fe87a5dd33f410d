"""CUDA C++ kernel of rope_append_kv: launch for every problem, traffic, accepted inputs, and skipped stores."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator, rope_append_kv
from gpu_ops.kernels.compiler import cubin, jit
from gpu_ops.kernels.rope import rope_append_kv as kernels
from gpu_ops.presets import ARCHES
from tests.rope.test_append_kv import make
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

BF16 = np.dtype(ml_dtypes.bfloat16)

# head_dim and rotary_dim: of models, and of every remainder
DIMS = [
    (64, 64),
    (64, 16),
    (80, 20),
    (80, 32),
    (96, 24),
    (96, 96),
    (128, 128),
    (128, 64),
    (192, 64),
    (256, 256),
    (256, 64),
    (512, 512),
    (1, 0),
    (2, 2),
    (7, 6),
    (60, 44),
    (100, 50),
    (127, 126),
    (200, 132),
]
HEADS = [(32, 8), (32, 32), (28, 4), (40, 8), (9, 3), (1, 1), (71, 1), (0, 2), (8, 0)]


def choices():
    for (head_dim, rotary_dim), interleaved, dtype in itertools.product(
        DIMS, (False, True), ("float16", "float32")
    ):
        can = kernels.raw_cannot(dtype, head_dim, rotary_dim, 1, interleaved=interleaved) is None
        if rotary_dim and can:
            yield head_dim, rotary_dim, interleaved, dtype


def configure(head_dim, rotary_dim, interleaved, dtype, *, tokens=1, heads=(32, 8), alignment=16, sms=132):
    itemsize = np.dtype(dtype).itemsize
    shape = kernels.AppendShape(tokens, *heads, head_dim, rotary_dim, itemsize, interleaved)
    return kernels.select_config(shape, alignment=alignment, sms=sms)


def test_every_launch_covers_the_problem():
    for problem, heads, tokens in itertools.product(choices(), HEADS, (1, 2, 3, 100, 8192, 2**31 - 1)):
        c = configure(*problem, tokens=tokens, heads=heads)
        x, y, z = c.block
        assert x * y * z in (32, 64, 128)
        assert z <= 64
        assert 32 % x == 0, "a head lies in one warp, which adds up its squares"
        assert c.grid[0] * z >= tokens > (c.grid[0] - 1) * z
        assert 1 <= c.grid[1] <= -(-heads[0] // y) + 2 * -(-heads[1] // y) <= 65535
        assert c.units <= x * c.units_per_thread
        assert c.units_per_thread <= 2


def test_vectors_divide_heads_and_halves():
    for head_dim, rotary_dim, interleaved, dtype in choices():
        c = configure(head_dim, rotary_dim, interleaved, dtype)
        assert head_dim % c.vec == 0
        assert (rotary_dim if interleaved and c.vec > 1 else rotary_dim // 2) % c.vec == 0
        in_unit = c.vec if interleaved and c.vec > 1 else 2 * c.vec
        assert c.rotary_units * in_unit == rotary_dim
        assert c.units * in_unit >= head_dim
        for alignment in (8, 4, 2):
            if alignment >= np.dtype(dtype).itemsize:
                other = configure(head_dim, rotary_dim, interleaved, dtype, alignment=alignment)
                assert {**vars(other), "access": 0} == {**vars(c), "access": 0}
                assert alignment % (other.access * np.dtype(dtype).itemsize) == 0


def test_the_usual_heads():
    c = configure(128, 128, False, "float16", tokens=8192)
    assert (c.vec, c.access, c.units_per_thread) == (8, 8, 1)
    assert c.block == (8, 8, 2)
    assert c.grid == (4096, 1, 1), "angles are computed once per token"
    assert configure(128, 128, False, "float16", tokens=16).grid == (8, 6, 1), "few tokens: heads on many SMs"
    for head_dim in (64, 80, 96, 128, 256):
        for dtype, interleaved in (("float16", False), ("float32", False), ("float16", True)):
            assert kernels.raw_cannot(dtype, head_dim, head_dim, 1, interleaved=interleaved) is None


def test_every_kernel_is_listed():
    listed = {v.kernel for v in kernels.variants("sm_90")}
    for head_dim, rotary_dim, interleaved, dtype in choices():
        for alignment in (16, np.dtype(dtype).itemsize):
            c = configure(head_dim, rotary_dim, interleaved, dtype, alignment=alignment)
            for codes in ("", "int8", "uint8"):
                assert kernels._kernel(c, dtype, interleaved, codes) in listed


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [
        ("sm_80", ("bf16",)),
        *(
            pytest.param(arch, ("f16", "bf16", "f32"), marks=pytest.mark.slow)
            for arch in ARCHES
            if arch != "sm_75"
        ),
    ],
)
def test_half_of_the_warps_and_more_and_no_spills(arch, dtypes):
    for variant in kernels.variants(arch):
        if dict(variant.kernel.defines)["DTYPE"] in dtypes:
            compiled = jit.assemble(jit.compile_kernel(variant.kernel, arch), arch)
            needs = cubin.resources(compiled.cubin, variant.kernel.entry, compiled.log)
            assert needs.spill_bytes == 0, variant.kernel.label
            share = cubin.occupancy(needs, variant.threads_per_block, 0, ARCHES[arch]).share
            macros = dict(variant.kernel.defines)
            held = macros["VEC"] * macros["UNITS"] * (1 if macros["INTERLEAVED"] and macros["VEC"] > 1 else 2)
            waiting = macros["PAGE_DTYPE"] in ("s8", "e4m3") and held == 16  # for their scale, in float
            assert share >= 0.5 if waiting else share > 0.5, (variant.kernel.label, share)


# ---- traffic -----------------------------------------------------------------------------------------------


def moved(profiles):
    return sum(p.least_bytes for p in profiles)


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "page_size"),
    [(BF16, (32, 8), 128, None), (BF16, (8, 2), 64, 16), (np.dtype(np.float32), (4, 4), 128, 16)],
    ids=str,
)
def test_half_of_the_bytes_of_the_three_steps(dtype, heads, head_dim, page_size):
    """Each element is read and written once, in whole sectors; the steps move q and k twice, and k again."""
    options = {"dims": (head_dim, head_dim), "heads": heads, "seqlen": 24, "used": (3, 10)}
    arrays, options = make(place=page_size or "rows", dtype=dtype.name, **options)
    q, k, v, *_ = arrays
    raw = {"device": "emulator", "backend": "raw"}
    with emulator.record() as profiles:
        rope_append_kv(*arrays, **options, **raw)
    (fused,) = profiles
    least = 2 * (q.nbytes + k.nbytes + v.nbytes)
    assert least <= moved(profiles) <= 1.02 * least
    data = [i for i in fused.instructions if ".v4.b32" in i.form and i.global_requests]
    data += [i for i in fused.instructions if ".cs." in i.form and i.global_requests]
    assert len(data) >= 4
    assert all(i.sectors_per_128_bytes == 4 for i in data), [(i.ptx, i.sectors_per_128_bytes) for i in data]

    with emulator.record() as profiles:
        norm = {"eps": options["eps"], **raw}
        normalised = [gpu_ops.rmsnorm(x, options[w], **norm) for x, w in ((q, "q_weight"), (k, "k_weight"))]
        gpu_ops.rope(*normalised, positions=np.arange(24), **raw)
    copies = 2 * (k.nbytes + v.nbytes)  # copies of the rotated k and of v into the caches, read and written
    assert moved([fused]) <= 0.55 * (moved(profiles) + copies)


@needs_nvrtc
def test_a_residual_add_before_the_norm_is_not_another_pass(rng):
    """rmsnorm(residual=...) moves 4 arrays: x and residual in, y and s out. An add, then a norm, read s again: 5."""
    x, residual = (rng.standard_normal((64, 1024)).astype(BF16) for _ in range(2))
    weight = np.ones(1024, BF16)
    raw = {"device": "emulator", "backend": "raw"}
    with emulator.record() as fused:
        _, s = gpu_ops.rmsnorm(x, weight, residual=residual, **raw)
    with emulator.record() as norm:
        gpu_ops.rmsnorm(s, weight, **raw)
    add = 3 * x.nbytes
    assert moved(fused) <= 0.81 * (moved(norm) + add)


# ---- places that are known on the device only --------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("by", ["raw", "numba"])
@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("rows", {"seqused_k": np.array([-2, 8], np.int32)}),
        (4, {"block_table": np.array([[1, 99], [2, -7]], np.int32), "seqused_k": np.array([3, 2], np.int32)}),
        (4, {"seqused_k": np.array([11, -1], np.int32)}),
        ("slots", {"slot_mapping": np.array([-1, 99, 3, 1 << 40, 2, -(1 << 40)])}),
    ],
    ids=["rows", "pages", "past the pages", "slots"],
)
def test_what_lies_outside_the_cache_is_not_stored(cupy, place, change, by):
    """The sanitizer would report a write elsewhere. The rotated q is written for every token."""
    (q, k, v, *caches), options = make(place=place, dims=(16, 16), norm=None)
    page_size = caches[0].shape[1]
    options |= change
    slots = options.get("slot_mapping")
    if slots is None:
        slots = np.full(q.shape[:2], -1)
        for (b, s), _ in np.ndenumerate(slots):
            row = options["seqused_k"][b] + s
            table = options.get("block_table", np.arange(2)[:, None])
            page = table[b, row // page_size] if 0 <= row < page_size * table.shape[1] else -1
            slots[b, s] = page * page_size + row % page_size
    inside = (slots >= 0) & (slots < caches[0].shape[0] * page_size)
    assert 0 < inside.sum() < inside.size
    want = [cache.copy() for cache in caches]
    device_arrays = [FakeArray(x) for x in (q, k, v, *caches)]
    device_options = {n: FakeArray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    actual = rope_append_kv(*device_arrays, **device_options, backend=by)
    want[1][np.divmod(slots[inside], page_size)] = v[inside]
    assert caches[1].tobytes() == want[1].tobytes()
    changed = (caches[0].view(np.uint32) != want[0].view(np.uint32)).any(axis=(2, 3))
    expected = np.zeros_like(changed)
    expected[np.divmod(slots[inside], page_size)] = True
    np.testing.assert_array_equal(changed, expected)
    assert not np.array_equal(actual.host, q)


@needs_nvrtc
@pytest.mark.parametrize("by", ["raw", "numba"])
def test_pages_without_rows(cupy, by):
    """Nothing is stored, and no page is looked up: quotients by a page size of 0 are meaningless."""
    (q, k, v, *_), options = make(place=4, dims=(16, 16), norm=None)
    cache = np.zeros((3, 0, 2, 16), np.float32)
    device_arrays = [FakeArray(x) for x in (q, k, v, cache, cache)]
    device_options = {n: FakeArray(options[n]) for n in ("seqused_k", "block_table")}
    actual = rope_append_kv(*device_arrays, **device_options, backend=by)
    assert not np.array_equal(actual.host, q)


# ---- CUDA arrays -------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("place", ["rows", 3, "slots"])
def test_cuda_arrays_are_read_by_the_kernel_alone(cupy, place):
    """The fake CuPy refuses conversion to NumPy: positions and slots stay on the device, and one kernel runs."""
    arrays, options = make(place=place, dims=(32, 32), dtype="bfloat16")
    device_arrays = [FakeArray(x.copy()) for x in arrays]
    device_options = {n: FakeArray(x.copy()) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    want = rope_append_kv(*arrays, **options, device="emulator", backend="raw")
    actual = rope_append_kv(*device_arrays, **device_options)
    assert actual.host.tobytes() == want.tobytes()
    for cache, expected in zip(device_arrays[3:], arrays[3:], strict=True):
        assert cache.host.tobytes() == expected.tobytes()
    assert len(cupy.launched) == 1


@needs_nvrtc
def test_caches_in_host_memory_come_back_from_the_device(cupy):
    arrays, options = make(dims=(32, 32))
    want = [x.copy() for x in arrays[3:]]
    rotated = rope_append_kv(*arrays[:3], *want, **options, device="emulator", backend="raw")
    actual = rope_append_kv(*arrays, **options, device="cuda")
    assert actual.tobytes() == rotated.tobytes()
    for cache, expected in zip(arrays[3:], want, strict=True):
        assert cache.tobytes() == expected.tobytes()


def test_explain():
    arrays, options = make(place=3, dims=(32, 16), interleaved=True)
    text = str(gpu_ops.explain("rope_append_kv", *arrays, **options))
    assert "into pages" in text
    assert "QK-norm, rotary_dim 16 interleaved, scaling default" in text
    assert "tokens per task" in text
    text = str(gpu_ops.explain("rope_append_kv", *arrays, **options, device="emulator"))
    assert "rope_append_kv float32 interleaved vec4 access4: grid" in text
