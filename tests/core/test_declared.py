"""Wrong arguments above the ops: each call works or raises a typed error, by the single rule of core/declared.py."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import re
import sys

import numpy as np
import pytest

from gpu_ops import distributed, emulator, formats, inference, memory, models
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.errors import GpuOpsError, OptionError
from gpu_ops.inference import Engine
from gpu_ops.models import Llama, LlamaConfig
from tests.support.public_calls import TOLD, Parts, parameters, public, run

SIZES = {"vocab": 8, "hidden": 8, "ffn": 8, "nlayers": 1, "nheads": 1}


def _cache(**changes):
    return inference.PagedKVCache(1, 1, 8, **{"num_pages": 4} | changes)


WRONG = {
    "None": None,
    "word": "no",
    "empty list": [],
    "list": ["no"],
    "array": np.array([1.5, 2.5]),
    "NaN": float("nan"),
    "huge": 1e30,
    "huge integer": 2**70,
    "negative": -1,
    "object": object(),
    "dict": {1: 2},
}
FEW = ("None", "word", "array", "negative")


@pytest.mark.parametrize("label", public())
def test_a_valid_call(label, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "reference")
    told = TOLD.get(label)
    with pytest.raises(GpuOpsError, match=told) if told else contextlib.nullcontext():
        run(label, Parts(tmp_path))


@pytest.mark.parametrize("kinds", [FEW, pytest.param([*WRONG], marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("label", public())
def test_wrong_arguments_are_typed_errors(label, kinds, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "reference")
    monkeypatch.chdir(tmp_path)  # "no" is a path of some calls
    bare = []
    for name in parameters(label):
        for key in kinds:
            value = WRONG[key]
            folder = tmp_path / f"{name} {key}"
            folder.mkdir()
            try:
                run(label, Parts(folder), {name: value})
            except GpuOpsError:
                pass
            except Exception as error:
                bare.append(f"{name}={key}: {type(error).__name__}: {error}")
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("LlamaConfig: tied must be True or False, got str 'no'", lambda: LlamaConfig(**SIZES, tied="no")),
        ("LlamaConfig: biases must be a sequence, got NoneType", lambda: LlamaConfig(**SIZES, biases=None)),
        (
            "LlamaConfig: unknown argument 'bias'; did you mean 'biases'",
            lambda: LlamaConfig(**SIZES, bias=()),
        ),
        ("LlamaConfig: eps must be a number, got str", lambda: LlamaConfig(**SIZES, eps="1e-5")),
        ("Llama.of: arrays must be a dict, got NoneType", lambda: Llama.of(None, LlamaConfig(**SIZES))),
        ("Arena: trace must be a Traced, got NoneType", lambda: memory.Arena(None)),
        ("PagedKVCache: dtype='ndarray' is no dtype", lambda: _cache(dtype=np.ones(2))),
        ("PagedKVCache: num_pages must be an integer, got float 4.0", lambda: _cache(num_pages=4.0)),
        ("Engine.submit: stop must be a sequence", lambda: Engine.submit(None, [1], stop="ab")),
        ("estimate: dtype='no' is no dtype", lambda: memory.estimate(LlamaConfig(**SIZES), dtype="no")),
        (
            "fit: budget must be an integer, got float 1.5; or fit: budget must be a string",
            lambda: memory.fit(LlamaConfig(**SIZES), 1.5),
        ),
        (
            "DataParallel: model must be a LlamaConfig or TensorParallel, got int",
            lambda: distributed.DataParallel(1, SingleProcess()),
        ),
        (
            "logits: weights must be a Llama, got dict; models.Llama.of makes",
            lambda: models.logits([], {}, 1),
        ),
        (
            "merged: a is NoneType, expected an array",
            lambda: models.merged(models.Lora(np.ones((2, 2)), None, np.ones((2, 1)))),
        ),
        ("select_preset: a device is a name such as 'H200'", lambda: memory.Trace(3).__enter__()),
        (
            "schedule: unknown argument 'rank'; did you mean 'ranks'",
            lambda: distributed.schedule("1f1b", rank=2),
        ),
    ],
)
def test_what_a_wrong_argument_is_told(message, call):
    with pytest.raises(GpuOpsError) as caught:
        call()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"eps": 1e39}, "eps"),
        ({"weight_offset": -1e39}, "weight_offset"),
        ({"softcap": 1e39}, "softcap"),
        ({"softcap": 1e-50}, "softcap"),
        ({"logits_softcap": 1e39}, "logits_softcap"),
        ({"logits_softcap": 1e-50}, "logits_softcap"),
        ({"softmax_scale": 1e39}, "softmax_scale"),
        ({"embedding_scale": 1e39}, "embedding_scale"),
        ({"residual_scale": 1e39}, "residual_scale"),
        ({"residual_scale": 1e-50}, "residual_scale"),
        ({"residual_scale": 1e-30}, "eps / residual_scale**2"),
        ({"residual_scale": 1e-20, "embedding_scale": 1e20}, "embedding_scale / residual_scale"),
        ({"logits_scaling": 1e39}, "logits_scaling"),
        ({"logits_scaling": 1e-50}, "logits_scaling"),
    ],
)
def test_numbers_that_float32_cannot_compute_with_are_refused_by_name(change, name):
    with pytest.raises(OptionError, match=rf"^LlamaConfig: {re.escape(name)} must be .*1e\+38"):
        LlamaConfig(**SIZES, **change)


def test_one_pass_iterators_where_one_pass_is_made():
    config = LlamaConfig(**SIZES)
    weights = Llama.of(models.initial_weights(config), config)
    assert list(models.lora_shapes(config, 4, iter(["qkv"]))) == ["layers.0.qkv.a", "layers.0.qkv.b"]
    assert isinstance(models.with_latent(weights, iter(["qkv"])).layers[0].qkv, models.Latent)
    sizes = [
        inference.cache_for(weights, config, lengths=lengths).stats.total
        for lengths in ([40, 1], map(len, [[0] * 40, [0]]))
    ]
    assert sizes[0] == sizes[1] > 1


@pytest.mark.parametrize(
    ("package", "name", "hint"),
    [
        (models, "logit", "; did you mean 'logits'?"),
        (emulator, "lauch", "; did you mean 'launch'?"),
        (formats, "safetensor", "; did you mean 'safetensors'?"),
        (formats, "nothing_like_it", ""),
    ],
)
def test_a_name_that_a_package_lacks(package, name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(package, name)
    assert str(caught.value) == f"module {package.__name__!r} has no attribute {name!r}{hint}"


def test_every_annotation_is_read():
    """An annotation that only type checkers can resolve would leave its arguments unchecked."""
    for label, (_, function) in public().items():
        function = vars(function).get("__init__", function) if inspect.isclass(function) else function
        scope = vars(sys.modules[inspect.unwrap(function).__module__])
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.annotation, str):
                eval(parameter.annotation, scope), label


def test_calls_within_the_package_are_not_checked():
    """Functions import each other from their modules; only names exported by packages are checked."""
    assert models.logits is not models.llama.logits
    assert inspect.unwrap(models.logits) is models.llama.logits
    assert pickle.loads(pickle.dumps(models.logits)) is models.logits
    assert inspect.signature(models.logits) == inspect.signature(models.llama.logits)


def test_a_wait_longer_than_threads_can_wait():
    weights = models.Llama.of(models.initial_weights(LlamaConfig(**SIZES)), LlamaConfig(**SIZES))
    engine = Engine(
        weights, LlamaConfig(**SIZES), inference.cache_for(weights, LlamaConfig(**SIZES), num_pages=2)
    )
    with inference.Service(engine) as service, service.submit([1], max_new_tokens=1) as reply:
        assert reply.get(1e30).finished == "length"


def test_earlier_names_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"distributed\.Row is now .*\.ScheduleStep"):
        assert distributed.Row is distributed.ScheduleStep
    assert "Row" not in dir(distributed)
