"""Inputs of layers in host memory: copies and their synchronisation, on fakes of CuPy and its streams."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import memory, models
from gpu_ops.models import offload
from gpu_ops.models.elementwise import copied
from tests.support.fake_cupy import FakeArray


class Streams:
    """Fake streams that copy at once, and record the order of requests."""

    def __init__(self):
        self.log = []

    def pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def copies_wait_for_compute(self):
        self.log.append("copies wait")

    def compute_waits_for(self, event):
        self.log.append(f"compute waits for {event}")

    def copy(self, target, source, nbytes, arrays):
        ctypes.memmove(target, source, nbytes)
        self.log.append("copy")
        return self.log.count("copy")


def array(n=12):
    return FakeArray(np.arange(n, dtype=np.float32))


def test_what_is_still_on_the_device_is_not_copied_back(cupy):
    streams, x = Streams(), array()
    kept = offload.OnHost(x, streams)
    offload.prefetch(kept)
    assert offload.fetched(kept) is x
    assert streams.log == ["copies wait", "copy"]


def test_there_and_back(cupy):
    streams, x = Streams(), array()
    kept, values = offload.OnHost(x, streams), x.host.copy()
    offload.release(kept)
    x.host[:] = -1  # its memory is reused now
    back = offload.fetched(kept)
    assert back is not x
    assert np.array_equal(back.host, values)
    # before the memory is reused, and before the array is used, the compute stream waits for the copy
    assert streams.log == [
        *("copies wait", "copy", "compute waits for 1"),
        *("copies wait", "copy", "compute waits for 2"),
    ]


def test_a_prefetched_array_is_copied_once(cupy):
    streams = Streams()
    kept = offload.OnHost(array(), streams)
    offload.release(kept)
    offload.release(kept)
    offload.prefetch(kept)
    offload.prefetch(kept)
    assert offload.fetched(kept) is offload.fetched(kept)
    assert streams.log.count("copy") == 2


def test_heads_of_a_gpu_are_copied_as_bits(cupy):
    """CuPy does not support bfloat16."""
    heads = FakeArray(np.arange(24).astype(ml_dtypes.bfloat16).reshape(2, 4, 3))
    part = heads[:, 1:3]
    made = copied(part)
    assert made.flags.c_contiguous
    assert np.array_equal(made.host, part.host)
    copied(made, to=heads[:, :2])
    assert np.array_equal(heads.host[:, :2], made.host)


def test_arrays_of_the_host_stay(monkeypatch):
    x = np.zeros(4)
    assert offload.offloaded(x) is x
    offload.release(x)
    assert offload.fetched(x) is x


@pytest.mark.parametrize("nlayers", [1, 4])
def test_a_plan_for_a_card_leaves_the_inputs_out(nlayers):
    config = models.LlamaConfig(vocab=64, hidden=64, ffn=96, nlayers=nlayers, nheads=4)
    sizes = {"batch": 4, "seqlen": 64, "dtype": "float16"}
    for device in ("cpu", "H100 SXM"):
        layer, offloads = (
            memory.estimate(config, **sizes, policy=policy, device=device).parts["activations"]
            for policy in ("layer", "offload")
        )
        inputs = 4 * 64 * 64 * 2
        saved = layer - offloads
        if device == "cpu" or nlayers == 1:
            assert saved == 0
        else:
            assert 0 < saved <= (nlayers - 1) * inputs
