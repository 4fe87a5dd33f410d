"""Arguments of wrong types to functions of several ranks and of models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpu_ops import distributed, inference, models
from gpu_ops.core.device import cuda_missing
from gpu_ops.distributed.comm import SingleProcess
from gpu_ops.errors import DeviceError, OptionError, ShapeError

CONFIG = models.LlamaConfig(vocab=16, hidden=16, ffn=16, nlayers=1, nheads=2)
ARRAYS = models.initial_weights(CONFIG)
WEIGHTS = models.Llama.of(ARRAYS, CONFIG)
IDS = np.zeros((1, 4), np.int32)
Q = np.ones((1, 4, 2, 8), np.float32)
STARTS = np.array([0, 4], np.int32)
COMM = SingleProcess()
NOTHING = (None, "world", 4)

OF_A_COMMUNICATOR = {
    "Mesh": lambda comm: distributed.Mesh(comm or 0),
    "sequence_positions": lambda comm: distributed.sequence_positions(comm, 4),
    "ContextParallel": lambda comm: distributed.ContextParallel(comm, 4),
    "DataParallel": lambda comm: distributed.DataParallel(CONFIG, comm),
    "TensorParallel": lambda comm: distributed.TensorParallel(CONFIG, comm),
    "Pipeline": lambda comm: distributed.Pipeline(CONFIG, comm),
    "VocabularyRows": lambda comm: distributed.VocabularyRows(comm, ARRAYS["embed"], 16),
    "ShardedCheckpoints": lambda comm: distributed.ShardedCheckpoints("states", comm),
    "ring_attention": lambda comm: distributed.ring_attention(comm, Q, Q, Q),
    "ring_attention_backward": lambda comm: distributed.ring_attention_backward(comm, Q, Q, Q, Q, Q, Q),
    "ulysses_attention": lambda comm: distributed.ulysses_attention(comm, Q, Q, Q),
    "gathered_attention_varlen": lambda comm: distributed.gathered_attention_varlen(
        comm, Q[0], Q[0], Q[0], STARTS
    ),
}


@pytest.mark.parametrize("name", OF_A_COMMUNICATOR)
def test_no_communicator(name):
    for comm in NOTHING:
        with pytest.raises(OptionError, match=r"comm must be a Comm, got (NoneType|str|int)$"):
            OF_A_COMMUNICATOR[name](comm)


def parallel():
    return distributed.DataParallel(CONFIG, COMM)


def pipeline(*arguments, **options):
    return distributed.Pipeline(CONFIG, COMM).loss_and_grads(IDS, IDS, *arguments, microbatches=1, **options)


def vocabulary_loss(**options):
    rows = distributed.VocabularyRows(COMM, ARRAYS["embed"], 16)
    return rows.loss(np.ones((4, 16), np.float32), IDS[0], **options)


MISTAKES = [
    (r"model must be a LlamaConfig or TensorParallel, got dict", lambda: distributed.DataParallel({}, COMM)),
    (r"TensorParallel: config must be a LlamaConfig", lambda: distributed.TensorParallel(None, COMM)),
    (r"Pipeline: config must be a LlamaConfig", lambda: distributed.Pipeline({}, COMM)),
    (r"parallel must be a DataParallel, got NoneType", lambda: pipeline(None)),
    (r"Pipeline.loss_and_grads: dloss must be a number", lambda: pipeline(parallel(), dloss="1")),
    (r"DataParallel.loss_and_grads: dloss must be", lambda: parallel().loss_and_grads(IDS, IDS, dloss=[1])),
    (r"VocabularyRows.loss: dloss must be a number", lambda: vocabulary_loss(dloss=None)),
    (r"VocabularyRows.loss: dloss must be at most", lambda: vocabulary_loss(dloss=np.float64(1e39))),
    (r"VocabularyRows.loss: dloss must be at most", lambda: vocabulary_loss(dloss=np.array(1e39))),
    (r"VocabularyRows.loss: dloss must be finite", lambda: vocabulary_loss(dloss=np.float32("inf"))),
    (r"Pipeline.loss_and_grads: dloss must be at most", lambda: pipeline(parallel(), dloss=1e39)),
    (r"DataParallel.*: dloss must be at most", lambda: parallel().loss_and_grads(IDS, IDS, dloss=np.array(1e39))),
    (r"sequences must be a Sequences", lambda: parallel().loss_and_grads(IDS, IDS, sequences=STARTS)),
    (r"saved must be a UlyssesSaved", lambda: distributed.ulysses_attention_backward(COMM, Q, (Q, Q, Q, Q, Q))),
    (r"save: parallel must be", lambda: distributed.ShardedCheckpoints("states", COMM).save(1, WEIGHTS)),
    (r"load: parallel must be", lambda: distributed.ShardedCheckpoints("states", COMM).load(WEIGHTS)),
    (r"config must be a LlamaConfig", lambda: models.logits(IDS, WEIGHTS, {})),
    (r"weights must be a Llama, got dict; .*Llama.of", lambda: models.loss(IDS, IDS, ARRAYS, CONFIG)),
    (r"grads must be a Llama", lambda: models.loss_and_grads(IDS, IDS, WEIGHTS, CONFIG, grads=ARRAYS)),
    (r"save: weights must be a Llama", lambda: models.save("folder", ARRAYS, CONFIG)),
    (r"cache_for: weights must be", lambda: inference.cache_for(ARRAYS, CONFIG, num_pages=4)),
    (r"cache must be a PagedKVCache", lambda: inference.Engine(WEIGHTS, CONFIG, None)),
    (r"1 layers, .* has 2", lambda: models.logits(IDS, WEIGHTS, dataclasses.replace(CONFIG, nlayers=2))),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_arguments_of_another_kind(words, call):
    for _ in range(2):
        with pytest.raises(OptionError, match=words):
            call()


def test_parts_of_other_sequences():
    context = distributed.ContextParallel(COMM, 4)
    for x in ([[1, 2, 3, 4]], np.zeros(4), np.zeros((2, 3)), None):
        with pytest.raises(ShapeError, match=r"ContextParallel.part: .* expected \(batch, 4, \.\.\.\)"):
            context.part(x)


@pytest.mark.skipif(cuda_missing() is None, reason="has a GPU")
def test_parts_of_sequences_without_a_gpu():
    with pytest.raises(DeviceError, match="ContextParallel: device='cuda': "):
        distributed.ContextParallel(COMM, 4, device="cuda")
