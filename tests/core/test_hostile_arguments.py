"""Any object in place of a word, number, dict or array: a typed error that names the argument, never a crash."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask, RopeScaling
from gpu_ops.errors import DeviceError, DTypeError, GpuOpsError, OptionError, ShapeError
from tests.support.calls import OPS, call
from tests.support.laws import refused

ODD = {
    "array": np.array([1, 2]),
    "empty array": np.array([]),
    "bytes": b"cpu",
    "number": 1,
    "NaN": float("nan"),
    "list": ["cpu"],
    "tuple": ("cpu", "numba"),
    "dict": {},
    "class": str,
}
odd = pytest.mark.parametrize("value", ODD.values(), ids=ODD)


@odd
@pytest.mark.parametrize("setting", ["device", "backend"])
@pytest.mark.parametrize("op", OPS)
def test_devices_and_backends_that_are_no_words(op, setting, value):
    case = call(op)
    refused(case.having(**{setting: value}), OptionError, f"{setting}=")
    case()
    refused(case.having(**{setting: value}), OptionError, f"{setting}=")
    both = case.having(**{setting: value, "device" if setting == "backend" else "backend": "cpu"})
    refused(both, OptionError, "=")


@odd
def test_formats_and_names_that_are_no_words(value):
    w = gpu_ops.ternary_quantize(np.eye(4, dtype=np.float32))
    with pytest.raises(OptionError, match=r"^TernaryMatrix.to: format="):
        w.to(value)
    with pytest.raises(OptionError, match=r"^ternary_pack: format="):
        gpu_ops.ternary_pack(w.trits(), value)
    with pytest.raises(DTypeError, match=r"^TernaryMatrix.dequantize: dtype="):
        w.dequantize(value if value is not str else "no dtype")
    with pytest.raises(OptionError, match=r"^explain: op="):
        gpu_ops.explain(value)


SHAPES = {
    "memoryview of two axes": memoryview(np.zeros((2, 2), np.uint8)),
    "memoryview of one": memoryview(b"abc"),
    "0-d array": np.array(4),
    "floats": (4.0, 4.0),
    "text": "44",
    "None": None,
    "huge": (2**70, 4),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_that_are_no_pair_of_integers(shape):
    case = call("ternary_unpack").having(shape=shape)
    with pytest.raises((ShapeError, OptionError), match=r"^ternary_unpack: shape "):
        case()
    with pytest.raises((ShapeError, OptionError), match=r"^TernaryMatrix: shape "):
        gpu_ops.TernaryMatrix(np.zeros((4, 1), np.uint8), 1.0, shape, "w2")


CONFIGS = {
    "array": np.array([1, 2]),
    "list": [1],
    "None": None,
    "rope_scaling is an array": {"rope_scaling": np.array([1, 2])},
    "rope_scaling is a list": {"rope_scaling": [1]},
    "rope_type is an array": {"rope_scaling": {"rope_type": np.array([1, 2])}},
    "rope_type is a list": {"rope_scaling": {"rope_type": ["yarn"]}},
    "factor is an array": {"rope_scaling": {"rope_type": "linear", "factor": np.array([2.0, 1.0])}},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configs_that_are_no_dicts_of_words_and_numbers(config):
    with pytest.raises(OptionError, match=r"^RopeScaling"):
        RopeScaling.from_hf(config)


@odd
def test_layer_types_that_are_no_words(value):
    config = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    with pytest.raises(OptionError, match="layer_type"):
        RopeScaling.from_hf(config, layer_type=value)


@pytest.mark.parametrize("value", [np.array(1), np.ones((2, 2)), 3, None, "12", {1: "x"}.values(), [[1.0]]])
def test_divisors_that_are_no_numbers(value):
    with pytest.raises(OptionError, match=r"^RopeScaling.longrope: short_factor"):
        RopeScaling.longrope(value, [1.0], 4096)


@pytest.mark.parametrize("value", [np.array([1, 2]), "3", None, [1]])
def test_options_of_scaling_that_are_no_numbers(value):
    for make in (RopeScaling.linear, RopeScaling.ntk, lambda x: RopeScaling.dynamic(2.0, x)):
        with pytest.raises(OptionError, match=r"^RopeScaling"):
            make(value)


@pytest.mark.parametrize("visible", [3, None, "x", [[1, 2], [3]], np.array(True), object()])
def test_masks_that_are_no_arrays(visible):
    with pytest.raises(GpuOpsError, match=r"^BlockMask"):
        BlockMask(visible, 4, 4)


# ---- objects that claim to be arrays -----------------------------------------------------------------------


class Odd(Exception):
    """Exception that no library raises."""


def raises(*_, **__):
    raise Odd("on purpose")


def claims(device, capsule=raises, **more):
    claiming = type("Claims", (), {"__dlpack_device__": lambda self: device(), "__dlpack__": capsule, **more})
    return claiming()


class AnswersNothing:
    """Object whose attributes and repr raise."""

    def __getattr__(self, name):
        raise Odd(name)

    def __repr__(self):
        raise Odd("repr")


class AnswersAll:
    """Object that has every attribute, each being the object itself."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self


def used_capsule():
    import ctypes

    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(1, b"used_dltensor", None)


HOSTILE = {
    "its device raises": (claims(raises), DeviceError),
    "its device is None": (claims(lambda: None), DeviceError),
    "its device is a word": (claims(lambda: "cpu"), DeviceError),
    "its device is words": (claims(lambda: ("cpu", 0)), DeviceError),
    "its device is an array": (claims(lambda: np.array([[1, 0], [1, 0]])), DeviceError),
    "its device is endless": (claims(lambda: iter(int, 1)), DeviceError),
    "its device is an iterator": (claims(lambda: iter((7, 0))), DeviceError),
    "its device is huge": (claims(lambda: (2**80, 0)), DeviceError),
    "its data raises": (claims(lambda: (1, 0)), DTypeError),
    "its data is text": (claims(lambda: (1, 0), lambda self, **_: "data"), DTypeError),
    "its data is itself": (claims(lambda: (1, 0), lambda self, **_: self), DTypeError),
    "its data is used up": (claims(lambda: (1, 0), lambda self, **_: used_capsule()), DTypeError),
    "its data takes no arguments": (claims(lambda: (1, 0), lambda: None), DTypeError),
    "its data is no method": (claims(lambda: (1, 0), 3), DTypeError),
    "its gradients raise": (claims(lambda: (1, 0), requires_grad=property(raises)), DTypeError),
    "it is on a GPU, without data": (claims(lambda: (2, 0)), GpuOpsError),
    "a CUDA array without data": (
        type("C", (), {"__cuda_array_interface__": property(raises)})(),
        GpuOpsError,
    ),
    "a CUDA array of nothing": (type("C", (), {"__cuda_array_interface__": {}})(), GpuOpsError),
    "its attributes raise": (AnswersNothing(), DTypeError),
    "it has all attributes": (AnswersAll(), GpuOpsError),
}


@pytest.mark.parametrize(("thing", "error"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("op", OPS)
def test_objects_that_claim_to_be_arrays(op, thing, error):
    """The object replaces each array, before and after a valid call."""
    case = call(op)
    names = [name for name, x in case.arrays.items() if isinstance(x, np.ndarray)]
    names += [name for name in ("out", "residual", "positions", "bias") if name in case.options]
    for name in names:
        for _ in range(2):
            with pytest.raises(error, match=rf"^{op}: "):
                case.having(**{name: thing})()
            case()


@pytest.mark.parametrize("thing", [thing for thing, _ in HOSTILE.values()], ids=HOSTILE)
def test_objects_that_claim_to_be_arrays_with_a_gpu(thing, cupy):
    """Refusals are the same with CuPy installed, which inspects the objects."""
    with pytest.raises(GpuOpsError, match=r"^rmsnorm: x "):
        gpu_ops.rmsnorm(thing, np.ones(4, np.float32))


def test_a_nested_tensor_is_told_of_cu_seqlens():
    x = np.ones((4, 8), np.float32)

    class Nested:
        is_nested = True

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **_):
            return x.__dlpack__()

    with pytest.raises(DTypeError, match=r"x .*NestedTensor.*attention_varlen .*cu_seqlens_q"):
        gpu_ops.softmax(Nested())


def test_objects_in_place_of_options():
    for thing in (AnswersAll(), np.ma.masked):
        for op in OPS:
            case = call(op)
            case()
            with pytest.raises(GpuOpsError, match=rf"^{op}: "):
                case.having(device=thing)()
