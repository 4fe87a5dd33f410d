"""Saved states and checkpoints: bit for bit, complete or not saved at all; an error leaves arrays unchanged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.errors import (
    DeviceError,
    DTypeError,
    FileError,
    FormatError,
    GpuOpsError,
    OptionError,
    ShapeError,
)
from gpu_ops.formats.safetensors import NUMPY_DTYPES, header_of
from gpu_ops.training import Checkpoints, load_state, save_state
from tests.formats.test_file_mutations import mutant
from tests.models.model_files import INSTALL
from tests.support.fake_cupy import FakeArray
from tests.support.processes import PATIENCE, ROOT

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (13, 11), (2, 3, 5)]


def random_bits(rng, shape, dtype):
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(shape, tmp_path, rng):
    """Random bits include NaN of any payload."""
    arrays = {name: random_bits(rng, shape, dtype) for name, dtype in NUMPY_DTYPES.items()}
    save_state(tmp_path / "s", arrays)
    read, meta = load_state(tmp_path / "s")
    assert meta == {}
    assert read.keys() == arrays.keys()
    assert all(same(read[name], arrays[name]) for name in arrays)
    assert all(x.flags.writeable and x.flags.aligned for x in read.values())
    like = {name: np.zeros_like(x) for name, x in arrays.items()}
    again, _ = load_state(tmp_path / "s", like=like)
    assert all(again[name] is like[name] and same(like[name], arrays[name]) for name in like)


def test_strides_do_not_matter(tmp_path, rng):
    x = rng.standard_normal((6, 8, 10))
    views = {
        "t": x.T,
        "reversed": x[::-1, :, ::-2],
        "column": x[:, :, 3],
        "zero": np.broadcast_to(x[0, 0], (4, 10)),
    }
    save_state(tmp_path / "s", views)
    buffers = {name: np.zeros((2, *view.shape)[::-1], view.dtype).T[0] for name, view in views.items()}
    load_state(tmp_path / "s", like=buffers)
    for name, view in views.items():
        assert not buffers[name].flags.c_contiguous or view.ndim < 2
        np.testing.assert_array_equal(buffers[name], view)


def test_names_of_any_kind(tmp_path):
    names = ["", " ", "ü/π", "a\0b", "\ud800", "x" * 5000, "gpu_ops.kind", "data_offsets"]
    save_state(tmp_path / "s", {name: np.full(3, i) for i, name in enumerate(names)})
    read, _ = load_state(tmp_path / "s")
    assert [int(read[name][0]) for name in names] == [*range(len(names))]


def test_nothing_to_save(tmp_path):
    save_state(tmp_path / "s", {}, {})
    assert load_state(tmp_path / "s", like={}) == ({}, {})


def test_meta_comes_back(tmp_path):
    rng = np.random.default_rng(5)
    meta = {
        "step": 7,
        "rng": rng.bit_generator.state,  # integers of 128 bits
        "floats": [0.1, 1e-320, float("inf"), -0.0, 2.0**1000],
        "deep": {"a": {"b": [None, True, "ü\ud800"]}},
        "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.float64(0.3)],
        "tuple": (1, 2),
    }
    save_state(tmp_path / "s", {}, meta)
    _, read = load_state(tmp_path / "s")
    assert read == meta | {"numpy": [float(np.float32(0.1)), -3, True, 0.3], "tuple": [1, 2]}
    restored = np.random.default_rng()
    restored.bit_generator.state = read["rng"]
    np.testing.assert_array_equal(restored.random(9), rng.random(9))
    save_state(tmp_path / "s", {}, {"loss": float("nan")})
    assert np.isnan(load_state(tmp_path / "s")[1]["loss"])


def circular():
    x = {}
    x["x"] = x
    return x


BAD_META = {
    "a list": ([1], "meta must be a dict, got list"),
    "a set": ({"a": {1}}, "set .* is no value of JSON"),
    "an array": ({"a": np.ones(3)}, "pass it among the arrays"),
    "a number as a key": ({"a": [{1: 2}]}, "the key 1 is no string"),
    "circular": (circular(), "JSON"),
    "bytes": ({"a": b"x"}, "bytes .* is no value"),
    "complex": ({"a": np.complex64(1)}, "complex64 .* is no value"),
    "too long": ({"a": "x" * (1 << 24)}, "names and meta take 16"),
    "an endless integer": ({"a": 10**5000}, "JSON"),
}


@pytest.mark.parametrize("what", BAD_META)
def test_meta_that_would_not_come_back_is_refused(what, tmp_path):
    meta, message = BAD_META[what]
    with pytest.raises(OptionError, match=message):
        save_state(tmp_path / "s", {}, meta)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ([np.ones(3)], OptionError, "arrays must be a dict, got list"),
        ({1: np.ones(3)}, OptionError, "a key of arrays must be a string, got int 1"),
        ({"__metadata__": np.ones(3)}, OptionError, "for itself"),
        ({"w": [1.0]}, DTypeError, "w is list, not an array"),
        ({"w": 1.0}, DTypeError, "w is float"),
        ({"w": np.ones(3, ">f4")}, DTypeError, "byte order"),
        ({"w": np.array(["x"])}, DTypeError, "allowed: bool, uint8"),
        ({"w": np.array([None])}, DTypeError, "w is dtype.'O'"),
        ({"w": np.ones(3, "m8[s]")}, DTypeError, "allowed"),
        ({"w": np.ones(3, np.complex128)}, DTypeError, "allowed"),
    ],
)
def test_arrays_that_no_file_holds_are_refused(arrays, error, message, tmp_path):
    with pytest.raises(error, match=message):
        save_state(tmp_path / "s", arrays)
    assert not list(tmp_path.iterdir())


def test_like_is_checked_before_anything_is_written(tmp_path):
    path = tmp_path / "s"
    save_state(path, {"a": np.ones(3), "b": np.ones((2, 2), np.float32)}, {"step": 1})
    frozen = np.zeros((2, 2), np.float32)
    frozen.flags.writeable = False
    cases = [
        ({}, OptionError, "only in the file \\['b'\\]"),
        ({"b": np.zeros((2, 2), np.float32), "c": np.zeros(3)}, OptionError, "only in like= \\['c'\\]"),
        ({"b": np.zeros(4, np.float32)}, ShapeError, r"like\['b'\] has shape \(4,\), but \(2, 2\)"),
        ({"b": np.zeros((2, 2))}, DTypeError, r"like\['b'\] is float64, but float32"),
        ({"b": frozen}, ShapeError, "read-only"),
        (
            {"b": np.lib.stride_tricks.as_strided(np.zeros(2, np.float32), (2, 2), (0, 4))},
            ShapeError,
            "share memory",
        ),
        ({"b": [[0, 0], [0, 0]]}, DTypeError, "is list, not an array"),
    ]
    for rest, error, message in cases:
        a = np.zeros(3)
        with pytest.raises(error, match=message):
            load_state(path, like={"a": a, **rest})
        assert not a.any()
    with pytest.raises(OptionError, match="like must be a dict"):
        load_state(path, like=[np.zeros(3)])
    with pytest.raises(OptionError, match="device= is for new arrays"):
        load_state(path, like={}, device="cpu")
    with pytest.raises(OptionError, match="'gpu' is unknown"):
        load_state(path, device="gpu")


def test_a_damaged_file_writes_nothing(tmp_path, rng):
    """A flipped bit of the last array is detected before the first array is written."""
    path = tmp_path / "s"
    save_state(path, {"a": rng.random(30), "b": rng.random(30).astype(np.float32)})
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 64]), whole[:-1], whole + b"\0", whole[:100], b""):
        path.write_bytes(damaged)
        like = {"a": np.zeros(30), "b": np.zeros(30, np.float32)}
        with pytest.raises(FormatError, match="load_state: "):
            load_state(path, like=like)
        assert not like["a"].any()
        assert not like["b"].any()


def test_files_damaged_at_random(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {"a": rng.random(10), "b": rng.integers(0, 9, (2, 3)), "c": np.ones(4, ml_dtypes.bfloat16)}
    save_state(tmp_path / "s", arrays, {"step": 3, "words": ["x", "yy"]})
    whole, outcomes = (tmp_path / "s").read_bytes(), []
    longest = 0
    for _ in range(300):
        (tmp_path / "s").write_bytes(mutant(whole, rng))
        try:
            read, _ = load_state(tmp_path / "s")
        except GpuOpsError as error:
            outcomes.append(type(error))
            longest = max(longest, len(str(error)))
        else:  # the damage was in a name or number, or replaced bytes by equal ones
            assert sum(x.size for x in read.values()) == 20
            outcomes.append(None)
    assert longest < 1000
    assert outcomes.count(FormatError) > 200
    assert set(outcomes) <= {FormatError, None}


def test_foreign_files(tmp_path):
    path = tmp_path / "s"
    contents = {
        "is no file of save_state": header_of({}, {}),
        "training state 2": header_of({}, {"gpu_ops.kind": "training state 2"}),
        "is no JSON": header_of({}, {"gpu_ops.kind": "training state 1"}),
        "is no object": header_of({}, {"gpu_ops.kind": "training state 1", "gpu_ops.meta": "[]"}),
        "recursion": header_of({}, {"gpu_ops.kind": "training state 1", "gpu_ops.meta": "[" * 99_999}),
        "checksum": header_of({}, {"gpu_ops.kind": "training state 1", "gpu_ops.meta": "{}"}),
        "cannot be read as a safetensors file": b"PK\3\4" + bytes(2000),
    }
    for message, data in contents.items():
        path.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            load_state(path)
    metadata = {"gpu_ops.kind": "training state 1", "gpu_ops.meta": "{}"}
    text = json.dumps({"__metadata__": metadata, "w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}})
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"x")
    with pytest.raises(FormatError, match="'w' has the dtype 'F4'"):
        load_state(path)


def test_the_package_safetensors_reads_the_file(tmp_path, rng):
    safetensors = pytest.importorskip("safetensors.numpy", reason=INSTALL)
    arrays = {"u8": np.arange(3, dtype=np.uint8), "w": rng.random((2, 3)), "step": np.array(5)}
    save_state(tmp_path / "s", arrays)
    read = safetensors.load_file(tmp_path / "s")
    assert all(same(read[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_, np.int64])
def test_cuda_arrays_are_copied_through_the_host(dtype, cupy, tmp_path, rng):
    x = (rng.random((3, 4)) * 2).astype(dtype)
    device_arrays = {
        "w": FakeArray(x.copy(), 1),
        "t": FakeArray(np.asfortranarray(x)),
        "n": FakeArray(x[0, 0].reshape(())),
    }
    save_state(tmp_path / "s", device_arrays | {"host": x})
    read, _ = load_state(tmp_path / "s")
    assert same(read["w"], x)
    assert same(read["t"], x)
    assert same(read["n"], x[0, 0].reshape(()))
    on_device, _ = load_state(tmp_path / "s", device="cuda")
    assert all(isinstance(a, FakeArray) and same(a.host, read[name]) for name, a in on_device.items())
    like = {name: FakeArray(np.zeros_like(a.host, order="F"), 1) for name, a in on_device.items()}
    load_state(tmp_path / "s", like=like)
    assert all(same(a.host, read[name]) for name, a in like.items())


@pytest.mark.skipif(sys.platform != "linux", reason="the message is of a machine without a GPU")
def test_no_gpu_is_said_before_the_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_ops.core.state_arrays.cuda_missing", lambda: "none here")
    save_state(tmp_path / "s", {"w": np.ones(3)})
    with pytest.raises(DeviceError, match=r"load_state: device='cuda', .*: none here"):
        load_state(tmp_path / "s", device="cuda")


def adamw(arrays, step, seed):
    """Run a step of a toy problem: the gradient has a random direction that depends on seed and step only."""
    w, m, v = (arrays[name] for name in "wmv")
    g = np.random.default_rng((seed, step)).standard_normal(w.shape).astype(np.float32) + np.float32(0.1) * w
    m += np.float32(0.1) * (g - m)
    v += np.float32(0.05) * (g * g - v)
    hat = np.float32(1 - 0.9 ** (step + 1)), np.float32(1 - 0.95 ** (step + 1))
    w -= np.float32(0.01) * (m / hat[0] / (np.sqrt(v / hat[1]) + np.float32(1e-8)) + np.float32(0.1) * w)


def fresh():
    return {name: np.full((4, 5), value, np.float32) for name, value in (("w", 1), ("m", 0), ("v", 0))}


@pytest.mark.parametrize("stop", [1, 7, 19])
def test_a_resumed_run_has_the_same_bits(stop, tmp_path):
    whole = fresh()
    for step in range(20):
        adamw(whole, step, seed=4)
    first = fresh()
    for step in range(stop):
        adamw(first, step, seed=4)
    save_state(tmp_path / "s", first, {"step": stop, "seed": 4})
    resumed = {name: np.empty_like(x) for name, x in first.items()}
    _, meta = load_state(tmp_path / "s", like=resumed)
    for step in range(meta["step"], 20):
        adamw(resumed, step, meta["seed"])
    assert all(same(resumed[name], whole[name]) for name in whole)


# Last states of a run: they survive kills, full disks and foreign files.


def test_the_last_states_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []
    for step in (0, 5, 5, 12):
        path = checkpoints.save(step, {"w": np.full(3, step)}, {"step": step})
        assert path == checkpoints.latest()
    assert checkpoints.steps() == [5, 12]
    assert [p.name for p in sorted(path.parent.iterdir())] == [
        "step-000000000005.safetensors",
        "step-000000000012.safetensors",
    ]
    assert load_state(Checkpoints(str(tmp_path / "a" / "b")).latest())[1] == {"step": 12}
    single = Checkpoints(tmp_path / "one", keep=1)
    for step in (1, 2, 3):
        single.save(step, {})
    assert single.steps() == [3]


def test_a_step_back_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(9, {})
    with pytest.raises(OptionError, match="step 8 comes before step 9"):
        checkpoints.save(8, {})
    for step in (-1, 10**12, 1.0, "1", True):
        with pytest.raises(OptionError, match="step must"):
            checkpoints.save(step, {})
    for keep in (0, -1, 1.5, None):
        with pytest.raises(OptionError, match="keep must"):
            Checkpoints(tmp_path, keep=keep)
    assert checkpoints.steps() == [9]


def test_half_written_and_foreign_files_do_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    good = checkpoints.save(3, {"w": np.ones(100)})
    (tmp_path / ".gpu_ops-0123.tmp").write_bytes(b"half")
    (tmp_path / "step-000000000009.safetensors").write_bytes(good.read_bytes()[:-8])
    (tmp_path / "step-000000000010.safetensors").write_bytes(b"")
    (tmp_path / "step-11.safetensors").write_bytes(good.read_bytes())
    (tmp_path / "notes").write_text("x")
    assert checkpoints.latest() == good
    checkpoints.save(9, {})  # replaces the partial file
    assert checkpoints.steps() == [3, 9]
    left = {path.name for path in tmp_path.iterdir()}
    assert {"notes", "step-11.safetensors"} < left
    assert not {name for name in left if name.endswith(".tmp")}


def test_a_failed_save_keeps_the_states_there_were(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": np.ones(9)})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="save_state: No space left on device"):
        checkpoints.save(2, {"w": np.ones(9)})
    assert checkpoints.steps() == [1]
    assert len([*tmp_path.iterdir()]) == 1


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").touch()
    for use in (lambda c: c.save(1, {}), lambda c: c.latest()):
        with pytest.raises(FileError, match=r"Checkpoints.*: '.*f'"):
            use(Checkpoints(tmp_path / "f"))


SAVES = """
import sys, numpy as np
from gpu_ops.training import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in range(int(sys.argv[2]), 10**6):
    checkpoints.save(step, {"w": np.full(400_000, step)}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_resumes(how, tmp_path):
    """SIGTERM works also in the background of a shell, where SIGINT is ignored."""
    rng, start = np.random.default_rng(1), 0
    for _ in range(2):
        command = [sys.executable, "-c", SAVES, str(tmp_path), str(start)]
        if how == signal.SIGTERM:
            command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert child.stdout.readline()  # at least one state is saved
            time.sleep(rng.random() * 0.05)
            child.send_signal(how)
            said = child.communicate(timeout=PATIENCE)[0].split()
        finally:
            child.kill()
        arrays, meta = load_state(Checkpoints(tmp_path).latest())
        assert meta["step"] >= (int(said[-1]) if said else start)
        assert (arrays["w"] == meta["step"]).all()
        start = meta["step"] + 1
    Checkpoints(tmp_path).save(start, {})
    assert len([*tmp_path.iterdir()]) == 2
