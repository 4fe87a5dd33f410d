"""AdamW with 8-bit moments: the bits of the reference on every backend, the codes, and convergence."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.rows import adamw as reference
from tests.rows.cases import F32, FORMS, made, same_bits

DEVICES = ("cpu", "emulator", "cuda")
# each other form compiles for seconds
QUICK = (
    "float32",
    "bfloat16 of master, stochastic",
    "bfloat16 alone",
)


def is_slow(case):
    emulated = case["backend"]["device"] == "emulator" and (case["form"] != QUICK[2] or case["size"] != 1300)
    return case["form"] not in QUICK or emulated


def in_bytes(arrays):
    """Arrays with moments quantized to 8 bits."""
    m, v = reference.quantize(arrays["m"], np.int8), reference.quantize(np.sqrt(arrays["v"]), np.uint8)
    return {**arrays, "m": m, "v": v}


def all_arrays(named):
    return [y for x in named for y in (x if isinstance(x, tuple) else (x,))]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "float64"])
@pytest.mark.parametrize("size", [1, 1300, 5000])
def test_bits_of_moments_in_8_bits(backend, form, size, rng):
    arrays, rounding = made(rng, form, size)
    tiny = slice(7, None, 50)  # from 0 to roots below half of the smallest code
    arrays["v"][tiny], arrays["grads"][tiny] = 0, 1e-7
    start = in_bytes(arrays)
    options = {"step": 7, "lr": 1e-3, "weight_decay": 0.1, "grad_scale": 0.5, "seed": 7, **rounding}
    expected = all_arrays(reference.adamw_step(**start, **options, precision="naive"))
    for skip in (0, 1):
        copies = {
            n: tuple(y.copy() for y in x) if isinstance(x, tuple) else x.copy() for n, x in start.items()
        }
        gpu_ops.adamw_step(**copies, **options, skip=np.array(skip, F32), **backend)
        copies.pop("grads")
        if skip:
            expected = all_arrays(x for name, x in start.items() if name != "grads")
        if backend["backend"] == "reference" and not skip:
            same_bits(all_arrays(copies.values())[1::2][:2], expected[1::2][:2])  # the codes
        else:
            same_bits(all_arrays(copies.values()), expected)


def test_codes(rng):
    """Codes err by half a step of squares, are exact at the scale, and keep 0; in uint8 only 0 becomes 0."""
    x = rng.standard_normal(3000).astype(F32) * np.repeat([1e-20, 1.0, 1e20], 1000).astype(F32)
    x[5:9] = 0
    for dtype, values in ((np.int8, x), (np.uint8, np.abs(x))):
        codes, scale = reference.quantize(values, dtype)
        assert codes.dtype == dtype
        assert scale.shape == (12,)
        back, largest = reference.dequantize(codes, scale), np.iinfo(dtype).max
        part, decoded = (np.sqrt(np.abs(y) / np.repeat(scale, 256)[:3000]) * largest for y in (values, back))
        tiny = (codes == 1) & (part < 0.5)
        assert np.abs(part - decoded)[~tiny].max() < 0.51
        assert ((codes == 0) == (values == 0)).all() if dtype == np.uint8 else not codes[values == 0].any()
        np.testing.assert_allclose(np.abs(back).max(), np.abs(values).max(), rtol=1e-6)
        assert (np.sign(back) * np.sign(values) >= 0).all()
    codes, scale = reference.quantize(np.array([1.0, np.nan, 0.0], F32), np.int8)
    assert np.isnan(reference.dequantize(codes, scale)).all()


@pytest.mark.parametrize("by", ["numba", "reference"])
def test_a_small_second_moment_is_not_zero(by):
    """The next step divides by it."""
    params, grads = np.zeros(300, F32), np.zeros(300, F32)
    grads[:4] = 1, -1e-7, 0, 3e-9
    m, v = ((np.zeros(300, codes), np.zeros(2, F32)) for codes in (np.int8, np.uint8))
    gpu_ops.adamw_step(params, grads, m, v, step=1, lr=0.1, device="cpu", backend=by)
    assert v[0][:5].tolist() == [255, 1, 0, 1, 0]
    assert m[0][:5].tolist() == [127, 0, 0, 0, 0]


def test_moments_in_8_bits_find_the_minimum(rng):
    """The loss of least squares falls as with float32 moments."""
    x, solution = rng.standard_normal((64, 40)), rng.standard_normal((40, 30))
    losses = []
    for bits in (32, 8):
        weights = np.zeros((40, 30), F32)
        if bits == 32:
            m, v = np.zeros_like(weights), np.zeros_like(weights)
        else:
            m, v = ((np.zeros((40, 30), codes), np.zeros(5, F32)) for codes in (np.int8, np.uint8))
        for t in range(1, 301):
            error = x @ (weights - solution)
            gpu_ops.adamw_step(weights, (x.T @ error / 64).astype(F32), m, v, step=t, lr=0.1 * (1 - t / 301))
        losses.append(np.mean((x @ (weights - solution)) ** 2))
    assert losses[0] < 0.01 * np.mean((x @ solution) ** 2)
    assert losses[1] < 1.5 * losses[0]


def test_moments_in_8_bits_that_will_not_do(rng):
    arrays = in_bytes(made(rng, "float32", 300)[0])
    m, v = arrays["m"], arrays["v"]
    before = [x.tobytes() for x in all_arrays(arrays.values())]
    errors = gpu_ops.errors
    for change, error, message in (
        ({"m": np.zeros(300, F32)}, errors.OptionError, "m and v must be two arrays, or two pairs"),
        ({"m": (m[0],)}, errors.OptionError, "m and v must be two arrays, or two pairs"),
        ({"m": (m[0].view(np.uint8), m[1])}, errors.DTypeError, "m codes is uint8, expected exactly int8"),
        ({"v": (v[0], v[1][:1])}, errors.ShapeError, r"v scale has shape \(1,\), expected exactly \(2,\)"),
        ({"v": (v[0][:299], v[1])}, errors.ShapeError, r"v codes has shape \(299,\)"),
        ({"v": (v[0], m[1])}, errors.ShapeError, "v scale shares memory with m scale"),
        ({"params": np.zeros(300), "grads": np.zeros(300)}, errors.OptionError, "at most 32 bits"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=message):
                gpu_ops.adamw_step(**{**arrays, **change}, step=1, lr=0.1)
    assert [x.tobytes() for x in all_arrays(arrays.values())] == before
