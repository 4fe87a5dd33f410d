"""Loss scaling: state machine of torch step by step, its floor, and training with tiny losses."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.core import device
from gpu_ops.errors import DeviceError, DTypeError, LossScaleError, OptionError, ShapeError, StateError
from gpu_ops.training import scaler as module
from gpu_ops.training.scaler import GradScaler, clip_coefficient

F32 = np.float32


class OnDevice(np.ndarray):
    """Array whose values the host may not read, since that would wait for the device."""

    def __bool__(self):
        raise AssertionError("the host waited for a value")

    __float__ = __int__ = __index__ = __bool__
    item = tolist = __bool__


def to_device(x):
    return np.asarray(x).view(OnDevice)


@pytest.fixture
def on_device(monkeypatch):
    """Fake of CuPy: array expressions in NumPy."""
    fake = SimpleNamespace(
        __name__="cupy",
        ndarray=OnDevice,
        asarray=to_device,
        isfinite=lambda x: to_device(np.isfinite(np.asarray(x))),
        where=lambda *args: to_device(np.where(*map(np.asarray, args))),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(module, "cuda_missing", lambda: None)


def trace(scaler, overflows):
    scales, trackers = [], []
    for overflow in overflows:
        scaler.update(np.asarray(overflow, F32))
        scales.append(float(np.asarray(scaler.scale)))
        trackers.append(int(np.asarray(scaler.growth_tracker)))
    return scales, trackers


def by_definition(overflows, scale, growth, backoff, interval):
    """Scales and trackers by the rules of the torch kernel: products in double, stored as float."""
    scale, tracker, scales, trackers = F32(scale), 0, [], []
    for overflow in overflows:
        if overflow:
            scale, tracker = F32(float(scale) * backoff), 0
        else:
            tracker += 1
            if tracker == interval:
                with np.errstate(over="ignore"):
                    grown = F32(float(scale) * growth)
                scale, tracker = grown if np.isfinite(grown) else scale, 0
        scales.append(float(scale))
        trackers.append(tracker)
    return scales, trackers


def draw(rng):
    """Factors that are not powers of two, and runs of finite or infinite steps."""
    options = {
        "init_scale": float(rng.choice([1.0, 65536.0, 3.7, 1e30])),
        "growth_factor": float(rng.choice([2.0, 1.1, 1000.0])),
        "backoff_factor": float(rng.choice([0.5, 0.3, 0.9])),
        "growth_interval": int(rng.integers(1, 6)),
    }
    return options, rng.random(int(rng.integers(1, 40))) < rng.choice([0.0, 0.1, 0.5])


def test_the_documented_trace():
    overflows = [0] * 5 + [1] + [0] * 5
    scales, trackers = trace(GradScaler(8.0, growth_interval=4), overflows)
    assert scales == [8, 8, 8, 16, 16, 8, 8, 8, 8, 16, 16]
    assert trackers == [1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]


def test_any_trace(rng):
    for _ in range(1000):
        options, overflows = draw(rng)
        assert trace(GradScaler(**options, min_scale=0.0), overflows) == by_definition(
            overflows, *options.values()
        )


def test_a_trace_on_a_device(on_device, rng):
    """Updates are in place, and the host does not read the arrays."""
    for _ in range(30):
        options, overflows = draw(rng)
        scaler = GradScaler(**options, min_scale=0.0, device="cuda")
        scale, tracker = scaler.scale, scaler.growth_tracker
        assert isinstance(scale, OnDevice)
        assert trace(scaler, map(to_device, overflows)) == by_definition(overflows, *options.values())
        assert scaler.scale is scale
        assert scaler.growth_tracker is tracker


@pytest.mark.peers
def test_any_trace_of_torch(rng):
    torch = pytest.importorskip("torch")
    for _ in range(1000):
        options, overflows = draw(rng)
        theirs = torch.amp.GradScaler("cpu", **options)
        theirs.scale(torch.ones(()))
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.0)
        ours = GradScaler(**options, min_scale=0.0)
        for overflow in overflows:
            weight.grad = torch.tensor([math.inf if overflow else 1.0])
            assert float(theirs._get_scale_async().double().reciprocal().float()) == float(ours.inv_scale)
            theirs.step(optimizer)
            theirs.update()
            ours.update(overflow)
            assert ours.state_dict() == theirs.state_dict()
        fresh = GradScaler(min_scale=0.0)
        fresh.load_state_dict(theirs.state_dict())
        assert fresh.state_dict() == theirs.state_dict()


def test_a_scale_that_would_overflow_stays():
    scales, trackers = trace(GradScaler(2.0**126, growth_interval=1), [0, 0, 0])
    assert scales == [2.0**127] * 3
    assert trackers == [0, 0, 0]


def test_the_floor():
    scaler = GradScaler(4.0, growth_interval=3)
    assert trace(scaler, [0, 1, 1, 0]) == ([4, 2, 1, 1], [1, 0, 0, 1])
    before = scaler.state_dict()
    for _ in range(2):
        with pytest.raises(
            LossScaleError, match=r"falls to 0\.5, below min_scale 1.*float16 does not fit this model"
        ):
            scaler.update(1)
        assert scaler.state_dict() == before
    scaler.check()
    scaler.update(0)
    assert trace(GradScaler(2.0**-148, min_scale=0.0), [1, 1, 1])[0] == [2.0**-149, 0, 0]


def test_the_floor_on_a_device(on_device, monkeypatch):
    """The host learns of the floor when it calls check()."""
    scaler = GradScaler(2.0, device="cuda")
    scaler.update(to_device(1.0))
    scaler.update(to_device(1.0))
    monkeypatch.setattr(OnDevice, "__float__", np.ndarray.__float__)
    with pytest.raises(LossScaleError, match=r"falls to 0\.5, below min_scale 1"):
        scaler.check()


def test_unscale(rng):
    scaler = GradScaler(3.0)
    assert scaler.inv_scale == F32(1 / 3)
    assert scaler.inv_scale.shape == ()
    grads = [
        rng.standard_normal(s).astype(d)
        for s, d in (((3, 2), F32), ((5,), ml_dtypes.bfloat16), ((), np.float64))
    ]
    grads[2] = np.asarray(grads[2])
    before = [x.copy() for x in grads]
    assert scaler.unscale(grads) == 0
    for x, old in zip(grads, before, strict=True):
        assert x.tobytes() == (old * scaler.inv_scale).astype(old.dtype).tobytes()
    scaler.update()
    assert scaler.growth_tracker == 1
    grads[1][3] = np.nan
    assert scaler.unscale(tuple(grads)) == 1
    scaler.update()
    assert scaler.scale == 1.5
    assert scaler.unscale(grads[0]) == 0


def test_out_of_order():
    scaler, grads = GradScaler(), [np.ones(3, F32)]
    for _ in range(2):
        with pytest.raises(StateError, match="nothing was checked since the last update"):
            scaler.update()
    scaler.unscale(grads)
    for _ in range(2):
        with pytest.raises(StateError, match="unscaled before"):
            scaler.unscale(grads)
    assert (grads[0] == F32(1 / 65536)).all()
    scaler.update()
    with pytest.raises(StateError, match="nothing was checked"):
        scaler.update()


def test_gradients_that_cannot_be_unscaled():
    x, frozen = np.ones((4, 4), F32), np.ones(3, F32)
    frozen.flags.writeable = False
    for grads, error, message in (
        (
            [x, np.ones(2, np.float16)],
            DTypeError,
            r"grads\[1\] is float16, in which unscaled gradients vanish",
        ),
        ([x, np.ones(2, np.int32)], DTypeError, r"arrays\[1\] is int32"),
        ([x, frozen], ShapeError, r"grads\[1\] is read-only"),
        ([x, x], ShapeError, "two of grads share memory"),
        ([x[1:], np.ones(2, F32), x[:2]], ShapeError, "two of grads share memory"),
    ):
        scaler = GradScaler()
        for _ in range(2):
            with pytest.raises(error, match=message):
                scaler.unscale(grads)
        assert (x == 1).all()
        with pytest.raises(StateError):
            scaler.update()
    scaler.unscale([x[:2], x[2:]])
    assert (x == scaler.inv_scale).all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arrays_of_another_device(on_device, monkeypatch, device):
    scaler = GradScaler(device=device)
    if device == "cuda":
        with pytest.raises(DTypeError, match=r"grads\[0\] is numpy.ndarray, expected cupy.ndarray for dev"):
            scaler.unscale([np.ones(3, F32)])
        return
    monkeypatch.setattr(module, "on_cuda", lambda x: x == "on a GPU")
    with pytest.raises(DeviceError, match=r"found_inf is on a CUDA device; make GradScaler\(device='cuda'\)"):
        scaler.update("on a GPU")


def test_bad_options():
    for options, message in (
        ({"growth_factor": 1.0}, "growth_factor must be finite and > 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor must lie in \(0, 1\)"),
        ({"backoff_factor": 0.0}, "backoff_factor must be finite and > 0"),
        ({"growth_interval": 0}, "growth_interval must lie in"),
        ({"growth_interval": 2.5}, "growth_interval must be an integer"),
        ({"init_scale": 0.5}, "init_scale must be finite and >= 1"),
        ({"init_scale": 0.0, "min_scale": 0.0}, "init_scale must be finite and >= 1.4"),
        ({"init_scale": 1e39}, "init_scale must be finite"),
        ({"init_scale": np.nan}, "init_scale must be finite"),
        ({"min_scale": -1.0}, "min_scale must be finite and >= 0"),
        ({"min_scale": 1e39}, r"min_scale must be at most 1e\+38"),
        ({"device": "gpu"}, "device='gpu' is unknown"),
    ):
        with pytest.raises(OptionError, match=message):
            GradScaler(**options)
    with pytest.raises(ShapeError, match=r"found_inf has shape \(2,\), expected \(\)"):
        GradScaler().update(np.zeros(2))
    with pytest.raises(DTypeError, match="found_inf is <U2, expected a number"):
        GradScaler().update("no")
    if device.cuda_missing():
        with pytest.raises(DeviceError, match="there is no usable CUDA device"):
            GradScaler(device="cuda")


def test_state():
    scaler = GradScaler(1024.0, 3.0, 0.25, 7)
    trace(scaler, [0, 0, 1, 0, 0])
    state = scaler.state_dict()
    keys = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    assert list(state) == keys
    assert state == dict(zip(keys, (256.0, 3.0, 0.25, 7, 2), strict=True))
    other = GradScaler()
    scale = other.scale
    for wrong, message in (
        ({}, "scale, growth_factor, backoff_factor, growth_interval, _growth_tracker missing"),
        ({**state, "_growth_tracker": -1}, "_growth_tracker must lie in"),
        ({**state, "scale": 0.25}, "init_scale must be finite and >= 1"),
    ):
        with pytest.raises(OptionError, match=message):
            other.load_state_dict(wrong)
        assert other.state_dict() == GradScaler().state_dict()
    other.load_state_dict(state)
    assert other.scale is scale
    overflows = [0, 0, 0, 0, 0, 1, 1, 0]
    assert trace(other, overflows) == trace(scaler, overflows)


def test_clip_coefficient():
    for norm, expected in ((0.0, 1.0), (1.0, 1.0), (4.0, 0.5), (math.inf, 0.0)):
        for dtype in (F32, np.float64):
            coefficient = clip_coefficient(np.asarray(norm, dtype), 2.0)
            assert isinstance(coefficient, np.ndarray)
            assert coefficient.dtype == dtype
            assert coefficient == min(dtype(1), dtype(2.0) / (dtype(norm) + dtype(1e-6)))
            assert coefficient == pytest.approx(expected, rel=1e-6)
        assert clip_coefficient(norm, 2.0) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(clip_coefficient(np.asarray(math.nan, F32), 2.0))
    assert clip_coefficient(np.asarray(3.0, F32), 0.0) == 0
    for norm, limit, message in (
        (F32(1), -1.0, "max_norm must be finite and >= 0"),
        (F32(1), 1e39, r"max_norm must be at most 1e\+38"),
        (np.array("x"), 1.0, "norm is <U1, expected a number"),
        (-1.0, 1.0, "norm must be at least 0, got -1.0"),
        (F32(-1), 1.0, "norm must be at least 0, got -1.0"),
    ):
        with pytest.raises((OptionError, DTypeError), match=message):
            clip_coefficient(norm, limit)


def learned(scaler, steps=30):
    """Mean error of two float16 linear layers that fit a line, before and after training with a tiny loss."""
    rng = np.random.default_rng(3)
    x, target = rng.standard_normal((64, 8)).astype(np.float16), rng.standard_normal((64, 4)).astype(F32)
    masters = [0.5 * rng.standard_normal(s).astype(F32) for s in ((16, 8), (4, 16))]
    errors = []
    for _ in range(steps):
        low, high = (w.astype(np.float16) for w in masters)
        h = gpu_ops.linear(x, low)
        difference = gpu_ops.linear(h, high).astype(F32) - target
        errors.append(float(np.abs(difference).mean()))
        with np.errstate(over="ignore"):
            dy = (1e-10 * difference * scaler.scale).astype(np.float16)
        dh, dhigh = gpu_ops.linear_backward(dy, h, high)
        _, dlow = gpu_ops.linear_backward(dh, x, low)
        if not scaler.unscale([dlow, dhigh]):
            for w, dw in zip(masters, (dlow, dhigh), strict=True):
                w -= 3e6 * dw
        scaler.update()
    return errors[0], errors[-1]


def test_gradients_that_vanish_without_a_scale():
    """If the first scale is too large, some steps are skipped, and the others learn."""
    before, after = learned(GradScaler(1.0))
    assert after == before
    scaler = GradScaler(2.0**20, growth_interval=5)
    before, after = learned(scaler)
    assert after < 0.4 * before
    assert scaler.scale > 2.0**20
    scaler = GradScaler(2.0**60)
    before, after = learned(scaler, 60)
    assert after < 0.4 * before
    assert scaler.scale < 2.0**50


def test_a_tracker_at_its_limit_does_not_wrap():
    scaler = GradScaler(init_scale=8.0, growth_interval=5)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 2**31 - 1})
    scaler.update(0)
    assert (float(scaler.scale), int(scaler.growth_tracker)) == (16.0, 0)
