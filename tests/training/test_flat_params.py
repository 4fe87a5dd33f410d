"""FlatParams: views of flat arrays; a step of all parameters equals a step of each alone."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import training
from gpu_ops.errors import DeviceError, DTypeError, OptionError, OutOfMemoryError, ShapeError
from gpu_ops.training.flat import FlatParams
from gpu_ops.training.scaler import GradScaler, clip_coefficient
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

SHAPES = {"norm": (7,), "up": (5, 60), "scale": (), "embedding": (300, 2), "nothing": (0, 4)}
BF16 = np.dtype(ml_dtypes.bfloat16)


def values(rng):
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def host(x):
    return x.host if isinstance(x, FakeArray) else x


def filled(flat, start, gradients):
    flat.assign(start)
    for name, g in gradients.items():
        host(flat.grads[name])[...] = g


FORMS = [("float32", True), ("float64", True), ("bfloat16", True), ("float16", True), ("bfloat16", False)]


@pytest.mark.parametrize(("dtype", "master"), FORMS)
def test_a_step_is_one_of_each_parameter(dtype, master, rng):
    """Matrices decay, others do not. Stochastic rounding depends on the position: values are then close only."""
    flat = FlatParams.from_shapes(SHAPES, dtype=dtype, master=master, device="cpu")
    start, gradients = values(rng), values(rng)
    filled(flat, start, gradients)
    master_dtype = np.float64 if dtype == "float64" else np.float32
    for _ in range(3):
        flat.step(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), grad_scale=0.5)
    assert flat.steps == 3
    for name, shape in SHAPES.items():
        alone = (
            start[name].astype(flat.params[name].dtype).astype(master_dtype)
            if not master
            else start[name].astype(master_dtype)
        )
        g, m, v = (
            gradients[name].astype(master_dtype),
            np.zeros(shape, master_dtype),
            np.zeros(shape, master_dtype),
        )
        for t in range(1, 4):
            decay = 0.1 if len(shape) > 1 else 0.0
            numbers = {"step": t, "lr": 0.01, "weight_decay": decay, "betas": (0.8, 0.9), "grad_scale": 0.5}
            gpu_ops.adamw_step(alone, g, m, v, **numbers)
        param = flat.params[name]
        assert param.shape == shape
        if master:
            assert param.tobytes() == alone.astype(param.dtype).tobytes(), name
        else:
            unit = 2.0**-7 * (np.abs(start[name]) + 0.03)  # of bfloat16, at most
            assert (np.abs(param.astype(master_dtype) - alone) <= 3 * unit).all()


def test_layout(rng):
    flat = FlatParams.from_shapes(SHAPES, dtype="bfloat16", grad_dtype="bfloat16")
    size = flat.buffers["params"].size
    assert size == 5 * 256 + 2 * 256  # up 2 x 256, embedding 3 x 256, norm, scale
    assert flat.nbytes == {
        "params": 2 * size,
        "grads": 2 * size,
        "m": 4 * size,
        "v": 4 * size,
        "master": 4 * size,
    }
    for x in (*flat.params.values(), *flat.grads.values()):
        assert x.ctypes.data % 512 == 0 or not x.size
        assert x.flags.c_contiguous
    starts = {name: x.ctypes.data for name, x in flat.params.items() if x.size}
    assert sorted(starts, key=starts.__getitem__) == ["up", "embedding", "norm", "scale"]
    assert all(np.shares_memory(x, flat.buffers["grads"]) for x in flat.grads.values() if x.size)


def test_padding_stays_zero(rng):
    """Padding stays zero with eps=0, where 0 / 0 would be NaN, with stochastic rounding, and next to infinity."""
    for form in (dict(dtype="float32"), dict(dtype="bfloat16", master=False)):
        flat = FlatParams.from_shapes(SHAPES, **form)
        filled(flat, values(rng), values(rng))
        flat.grads["up"][0, 0] = np.inf
        with np.errstate(all="ignore"):
            for _ in range(2):
                flat.step(lr=0.1, weight_decay=0.1, eps=0.0)
        for x in (*flat.params.values(), *flat.grads.values()):
            x[...] = 0
        assert not flat.buffers["params"].astype(np.float32).any()
        assert not flat.buffers["grads"].any()
        for name in ("m", "v"):
            outside = flat.buffers[name].copy()
            for view in flat.params.values():
                at = (view.ctypes.data - flat.buffers["params"].ctypes.data) // view.itemsize
                outside[at : at + view.size] = 0
            assert not outside.any()


def test_both_parts_draw_different_bits_for_rounding(rng):
    """Equal bfloat16 parameters and gradients, one of them decaying by 0, round to different numbers."""
    flat = FlatParams.from_shapes({"matrix": (64, 64), "vector": (4096,)}, dtype="bfloat16", master=False)
    start, gradient = rng.uniform(1, 2, 4096), rng.standard_normal(4096)
    for name, x in flat.params.items():
        flat.assign({name: start.reshape(x.shape)})
        flat.grads[name][...] = gradient.reshape(x.shape)
    flat.step(lr=1e-3, seed=5)
    moved = [x.reshape(-1) != start.astype(BF16) for x in flat.params.values()]
    # a step of 1e-3 is 0.128 of a unit: 525 of 4096 move, and 67 in both parts
    assert 440 < moved[0].sum() < 610
    assert 440 < moved[1].sum() < 610
    assert (moved[0] & moved[1]).sum() < 120


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=needs_nvrtc)])
def test_moments_in_8_bits(device, rng):
    """Moments take 2.03 bytes per parameter instead of 8, with the bits of separate calls for each part."""
    flat = FlatParams.from_shapes(SHAPES, dtype="float32", moment_bits=8, device=device)
    filled(flat, values(rng), values(rng))
    size, decayed = flat.buffers["params"].size, 5 * 256
    assert sum(flat.nbytes[name] for name in ("m", "v", "m_scale", "v_scale")) == 2 * size + 8 * size // 256
    before = {name: x.copy() for name, x in flat.buffers.items()}
    for _ in range(2):
        flat.step(lr=0.01, weight_decay=0.1)
    for part, decay in ((slice(0, decayed), 0.1), (slice(decayed, size), 0.0)):
        tiles = slice(part.start // 256, part.stop // 256)
        params, grads = before["params"][part], before["grads"][part]
        m, v = ((before[n][part], before[f"{n}_scale"][tiles]) for n in ("m", "v"))
        for step in (1, 2):
            gpu_ops.adamw_step(params, grads, m, v, step=step, lr=0.01, weight_decay=decay)
    for name, x in before.items():
        assert x.tobytes() == flat.buffers[name].tobytes(), name


def test_zero_grad_assign_and_decay_by_name(rng):
    flat = FlatParams.from_shapes(SHAPES, dtype="float16", decay=["norm"])
    start = values(rng)
    filled(flat, start, values(rng))
    flat.zero_grad()
    assert not any(g.any() for g in flat.grads.values())
    flat.step(lr=0.5, weight_decay=1.0)
    for name in SHAPES:
        expected = start[name].astype(np.float32) * np.float32(0.5 if name == "norm" else 1.0)
        assert flat.params[name].tobytes() == expected.astype(np.float16).tobytes()


def test_a_skipped_step_does_not_count(rng):
    flat = FlatParams.from_shapes(SHAPES, dtype="float32")
    filled(flat, values(rng), values(rng))
    before = {name: x.tobytes() for name, x in flat.buffers.items()}
    flat.step(lr=0.1, skip=np.array(1, np.float32))
    assert {name: x.tobytes() for name, x in flat.buffers.items()} == before
    assert flat.steps == 0
    flat.step(lr=0.1, skip=np.array(0, np.float32))
    assert flat.steps == 1
    assert flat.buffers["params"].tobytes() != before["params"]


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(cupy, dtype, rng):
    """CuPy arrays give the bits of the CPU, and the host does not wait for a step."""
    start, gradients = values(rng), values(rng)
    flats = [FlatParams.from_shapes(SHAPES, dtype=dtype, device=device) for device in ("cuda", "cpu")]
    for flat in flats:
        filled(flat, start, gradients)
    gpu, cpu = flats
    for skip in (0.0, 1.0, 0.0):
        gpu.step(lr=0.01, weight_decay=0.1, skip=FakeArray(np.array(skip, np.float32)))
        cpu.step(lr=0.01, weight_decay=0.1, skip=np.array(skip, np.float32))
    assert gpu.steps == cpu.steps == 2
    for name, x in gpu.buffers.items():
        assert x.host.tobytes() == cpu.buffers[name].tobytes(), name
    gpu.zero_grad()
    assert not gpu.buffers["grads"].host.any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "int8"}, OptionError, "FlatParams: dtype='int8' is unknown"),
        ({"dtype": np.int32}, OptionError, "FlatParams: dtype must be one of float16"),
        ({"dtype": "float16", "master": False}, OptionError, "float16 parameters need master=True"),
        ({"master": 1}, OptionError, "master must be True or False"),
        ({"moment_bits": 4}, OptionError, "moment_bits must be 8 or 32, got 4"),
        ({"moment_bits": 8, "dtype": "float64"}, OptionError, "not float64"),
        ({"decay": ["upp"]}, OptionError, "did you mean 'up'"),
        ({"device": "gpu"}, OptionError, "did you mean 'cuda'"),
        ({"device": "cuda"}, DeviceError, "no usable CUDA device"),
        ({"shapes": {"w": (2, -1)}}, OptionError, "a length of w must lie in"),
        (
            {"shapes": {"w": (2**50, 2**50)}},
            ShapeError,
            "w has shape .* more than the 281474976710656 elements",
        ),
        ({"shapes": {"w": (2**50, 2**50, 0)}}, ShapeError, "w has shape .* more than the 281474976710656"),
        ({"shapes": {"w": (2**48,)}, "dtype": "float64"}, OutOfMemoryError, "parameters and their states"),
        ({"decay": (name for name in ["up"])}, OptionError, "decay must be a sequence, got generator"),
    ],
)
def test_mistakes(change, error, message):
    options = {"shapes": SHAPES, "dtype": "float32", **change}
    with pytest.raises(error, match=message):
        FlatParams.from_shapes(options.pop("shapes"), **options)


def test_names_that_decay_are_any_collection():
    segments = FlatParams.from_shapes(SHAPES, dtype="float32", decay={"norm"})._segments
    for decay in ({"norm": 1}, {"norm": 1}.keys(), ["norm"]):
        assert training.FlatParams.from_shapes(SHAPES, dtype="float32", decay=decay)._segments == segments


def test_assign_checks_all_before_it_writes(rng):
    flat = FlatParams.from_shapes(SHAPES, dtype="float32")
    with pytest.raises(ShapeError, match=r"norm has shape \(6,\), expected \(7,\)"):
        flat.assign({"up": np.ones((5, 60)), "norm": np.ones(6)})
    with pytest.raises(OptionError, match="did you mean 'norm'"):
        flat.assign({"up": np.ones((5, 60)), "norms": np.ones(7)})
    assert not flat.buffers["params"].any()


@pytest.mark.parametrize("overflow", [math.inf, math.nan])
def test_a_step_that_overflows_is_skipped(overflow):
    """Recipe of training.scaler on NumPy arrays, where the product of two arrays () is a number."""
    flat = FlatParams.from_shapes({"weight": (3, 5)}, dtype="float16", device="cpu")
    scaler = GradScaler(init_scale=1024.0)
    gradients = [1.0, overflow, 1.0]
    for step, value in enumerate(gradients):
        before = {name: x.copy() for name, x in flat.state().items()}
        flat.grads["weight"][...] = value * float(scaler.scale)
        norm, found_inf = gpu_ops.global_norm(flat.buffers["grads"])
        factor = scaler.inv_scale * clip_coefficient(norm * scaler.inv_scale, 1.0)
        flat.step(lr=0.1, grad_scale=factor, skip=found_inf)
        scaler.update(found_inf)
        same = all(np.array_equal(x, before[name]) for name, x in flat.state().items())
        assert same == (step == 1)
        assert np.isfinite(flat.params["weight"]).all()
    assert (flat.steps, float(scaler.scale)) == (2, 512.0)
    with pytest.raises(OptionError, match="grad_scale must be finite"):
        flat.step(lr=0.1, grad_scale=overflow)


@pytest.mark.parametrize(
    "wrong", [np.array(["x", "y"]), [1, [2]], np.array([None, 1]), np.array([1j, 2])], ids=repr
)
def test_assign_takes_real_numbers(wrong):
    """All values are checked before any is assigned."""
    flat = FlatParams.from_shapes({"a": (2,), "b": (2,)}, dtype="float32")
    with pytest.raises(DTypeError, match="b is "):
        flat.assign({"a": np.ones(2), "b": wrong})
    assert not flat.params["a"].any()
