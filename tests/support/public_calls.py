"""Every public function, constructor and method above the ops, called with valid arguments or one wrong one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops import distributed, inference, memory, models, training
from gpu_ops.distributed.comm import SingleProcess

PACKAGES = ("compat", "distributed", "inference", "memory", "models", "training")
# Records that calls return, and what only the packages themselves make.
RECORDS = {"Buffer", "CacheStats", "Estimate", "Saved", "ScheduleStep", "Step", "Token", "UlyssesSaved"}
INTERNAL = {
    "Arena.allocate",
    "Arena.scratch",
    "Trace.allocate",
    "Trace.scratch",
    "Pending",
    "Pending.wait",
    "Pending.poll",
    "Reply.get",
    "Reply.cancel",
    "DataParallel.forward",
    "DataParallel.backward",
    "Engine.run",
    "Reply",
    "FlatParams",
}

# Arguments that only a valid call gets: they take a second rank, a state or a missing file.
TOLD = {
    "distributed.Comm.send": "is this rank itself",
    "distributed.Comm.recv": "is this rank itself",
    "distributed.ShardedCheckpoints.load": "holds none",
    "inference.PagedKVCache.accept": "no step is open",
    "inference.PagedKVCache.commit": "no step is open",
    "inference.PagedKVCache.rollback": "no step is open",
    "inference.Service.submit": "max_seqlen=128",
    "memory.Pool.empty": "not in use in this thread",
    "models.load_bert": "No such file",
    "training.BytePairEncoding.load": "No such file",
    "training.load_tokenizer": "No such file|pip install tokenizers",
}


@cache
def public() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Class or "", and function, by ``package.name`` or ``package.Class.method``."""
    calls = {}
    for package in PACKAGES:
        module = importlib.import_module(f"gpu_ops.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                calls[f"{package}.{name}"] = ("", value)
            if not inspect.isclass(value) or name in RECORDS:
                continue
            if not (is_dataclass(value) and not hasattr(value, "__post_init__")) and name != "Comm":
                calls[f"{package}.{name}"] = ("", value)
            for method, held in vars(value).items():
                plain = held.__func__ if isinstance(held, (classmethod, staticmethod)) else held
                if not method.startswith("_") and inspect.isfunction(plain):
                    bound = isinstance(held, (classmethod, staticmethod))
                    calls[f"{package}.{name}.{method}"] = ("" if bound else name, getattr(value, method))
    return {label: call for label, call in calls.items() if label.partition(".")[2] not in INTERNAL}


INSTANCES: dict[str, Callable[[Parts], Any]] = {
    "Arena": lambda p: memory.Arena(p.trace),
    "Batches": lambda p: training.Batches(np.arange(16), 1, 4),
    "BertConfig": lambda p: p.bert,
    "Block": lambda p: p.llama.layers[0],
    "BytePairEncoding": lambda p: p.encoding,
    "Checkpoints": lambda p: training.Checkpoints(p.folder / "new"),
    "Comm": lambda p: SingleProcess(),
    "ContextParallel": lambda p: distributed.ContextParallel(SingleProcess(), 4),
    "DataParallel": lambda p: p.parallel,
    "Engine": lambda p: p.engine,
    "FlatParams": lambda p: p.flat,
    "GradScaler": lambda p: p.scaler,
    "Latent": lambda p: models.Latent(np.ones((16, 16), np.float32)),
    "Llama": lambda p: p.llama,
    "LlamaConfig": lambda p: p.config,
    "Mesh": lambda p: distributed.Mesh(SingleProcess()),
    "PagedKVCache": lambda p: p.cache,
    "Pipeline": lambda p: distributed.Pipeline(p.config, SingleProcess()),
    "Pool": lambda p: memory.Pool(1 << 20),
    "Sequences": lambda p: p.sequences,
    "Service": lambda p: inference.Service(p.engine),
    "ShardedCheckpoints": lambda p: distributed.ShardedCheckpoints(p.folder / "new", SingleProcess()),
    "TensorParallel": lambda p: p.tensor_parallel,
    "TextStream": lambda p: inference.TextStream(Letters()),
    "TokenFile": lambda p: training.TokenFile(p.tokens_file),
    "Trace": lambda p: p.trace,
    "VocabularyRows": lambda p: distributed.VocabularyRows(
        SingleProcess(), np.ones((32, 16), np.float32), 32
    ),
}


def parameters(label: str) -> list[str]:
    """Parameters of a public call that can be given a wrong value."""
    of, function = public()[label]
    listed = [*inspect.signature(function).parameters.values()][bool(of) :]
    return [p.name for p in listed if p.kind is not p.VAR_KEYWORD]


def run(label: str, parts: Parts, changes: dict[str, Any] | None = None) -> Any:
    """Call a public function with valid arguments except ``changes``."""
    of, function = public()[label]
    changes = changes or {}
    listed = [*inspect.signature(function).parameters.values()]
    args: list[Any] = [INSTANCES[of](parts)] if of else []
    kwargs = {}
    for p in listed[len(args) :]:
        name = ".".join((label.partition(".")[2], p.name))
        value = VALUES.get(name, VALUES.get(p.name))
        if p.kind is p.VAR_KEYWORD or (
            p.default is not p.empty and name not in VALUES and p.name not in changes
        ):
            continue
        if p.name not in changes and value is None:
            raise LookupError(f"no value for {name}: add it to VALUES in tests/support/public_calls.py")
        argument = changes[p.name] if p.name in changes else value(parts)
        if p.kind is p.VAR_POSITIONAL:
            args += argument if isinstance(argument, tuple) else [argument]
        elif p.kind is p.KEYWORD_ONLY or p.default is not p.empty:
            kwargs[p.name] = argument
        else:
            args.append(argument)
    try:
        return function(*args, **kwargs)
    finally:
        if of == "Service":
            args[0].close()


def cache_for_all(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a value that no call changes, so that it is made only once."""
    made: list[Any] = []

    def get(self: Any) -> Any:
        if not made:
            made.append(make(self))
        return made[0]

    return get


class Parts:
    """Arguments of calls, each made at its first use. ``folder``: an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    config = models.LlamaConfig(vocab=32, hidden=16, ffn=24, nlayers=1, nheads=2, nheads_kv=1)
    bert = models.BertConfig(vocab=32, hidden=16, ffn=24, nlayers=1, nheads=2, max_positions=8)
    sampling = inference.Sampling()
    sequences = models.Sequences(positions=np.arange(4), cu_seqlens=np.array([0, 4], np.int32), max_seqlen=4)
    trace = memory.Trace()
    scaler = property(lambda self: training.GradScaler())

    @property
    @cache_for_all
    def arrays(self) -> dict[str, Any]:
        return models.initial_weights(self.config)

    @property
    @cache_for_all
    def llama(self) -> models.Llama:
        return models.Llama.of(self.arrays, self.config)

    @property
    @cache_for_all
    def packed(self) -> models.Llama:
        blocks = [
            replace(b, qkv=gpu_ops.ternary_quantize(b.qkv), gate_up=gpu_ops.ternary_quantize(b.gate_up))
            for b in self.llama.layers
        ]
        return replace(self.llama, layers=blocks)

    @property
    @cache_for_all
    def grads(self) -> models.Llama:
        return models.Llama.of({name: np.zeros_like(x) for name, x in self.arrays.items()}, self.config)

    @property
    @cache_for_all
    def bert_weights(self) -> models.Bert:
        rng = np.random.default_rng(0)
        shapes = self.bert.shapes()
        return models.Bert.of(
            {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}, self.bert
        )

    @property
    @cache_for_all
    def adapters(self) -> dict[str, Any]:
        return models.initial_lora(models.lora_shapes(self.config, 2))

    @cached_property
    def cache(self) -> inference.PagedKVCache:
        return inference.cache_for(self.llama, self.config, num_pages=8)

    @cached_property
    def handle(self) -> int:
        handle = self.cache.add([1, 2, 3])
        self.cache.reserve({handle: [1, 2, 3]})
        self.cache.commit()
        return handle

    @cached_property
    def step(self) -> inference.Step:
        return self.cache.reserve({self.cache.add([1, 2]): [1, 2]})

    @cached_property
    def engine(self) -> inference.Engine:
        engine = inference.Engine(self.llama, self.config, self.cache)
        engine.submit([1, 2], max_new_tokens=1)
        return engine

    @cached_property
    def flat(self) -> training.FlatParams:
        return training.FlatParams.from_shapes({"a": (2, 3)}, dtype="float32")

    @cached_property
    def parallel(self) -> distributed.DataParallel:
        parallel = distributed.DataParallel(self.config, SingleProcess())
        parallel.assign(self.arrays)
        return parallel

    @cached_property
    def tensor_parallel(self) -> distributed.TensorParallel:
        return distributed.TensorParallel(self.config, SingleProcess())

    @cached_property
    def tokens_file(self) -> Path:
        training.write_tokens(self.folder / "tokens", np.arange(16), vocab=32)
        return self.folder / "tokens"

    @cached_property
    def state_file(self) -> Path:
        training.save_state(self.folder / "state", {"a": np.ones(3, np.float32)})
        return self.folder / "state"

    @cached_property
    def encoding(self) -> training.BytePairEncoding:
        return training.BytePairEncoding([(104, 105)])

    @cached_property
    def model_folder(self) -> Path:
        models.save(self.folder / "model", self.llama, self.config)
        return self.folder / "model"

    @cached_property
    def adapters_folder(self) -> Path:
        models.save_adapters(self.folder / "adapters", self.adapters, self.config)
        return self.folder / "adapters"


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def _x(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


# fmt: off
HF_BERT = {
    "model_type": "bert", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 8, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}
# fmt: on
IDS = np.array([[1, 2, 3, 4]], np.int32)
_BACKWARD = ("", "_backward")
FLAT = [f"{op}{way}" for op in ("Sequences.attention", "gathered_attention_varlen") for way in _BACKWARD]
Q, KV = _x(1, 4, 2, 8), _x(1, 4, 1, 8)

# By "package.name.parameter", "name.parameter" or "parameter": the longest key that exists.
VALUES: dict[str, Callable[[Parts], Any]] = {
    "adapters": lambda p: p.adapters,
    "arrays": lambda p: p.arrays,
    "axis": lambda p: 0,
    "batch": lambda p: 1,
    "budget": lambda p: 1 << 30,
    "by": lambda p: 1,
    "bias": lambda p: None,
    "cache": lambda p: p.cache,
    "color": lambda p: 0,
    "comm": lambda p: SingleProcess(),
    "concat": lambda p: 0,
    "config": lambda p: p.config,
    "count": lambda p: 4,
    "cu_seqlens": lambda p: np.array([0, 4], np.int32),
    "data": lambda p: b"hello hello hello",
    "device": lambda p: "cpu",
    "dtype": lambda p: "float32",
    "engine": lambda p: p.engine,
    "folder": lambda p: p.folder / "new",
    "function": lambda p: lambda: 1,
    "grads": lambda p: p.grads,
    "handle": lambda p: p.handle,
    "head_dim": lambda p: 8,
    "hidden": lambda p: 16,
    "ffn": lambda p: 24,
    "ids": lambda p: IDS,
    "k": lambda p: KV,
    "label": lambda p: "x",
    "key": lambda p: KV,
    "length": lambda p: 2,
    "lr": lambda p: 1e-3,
    "max_norm": lambda p: 1.0,
    "merges": lambda p: [(104, 105)],
    "microbatches": lambda p: 1,
    "model": lambda p: p.config,
    "name": lambda p: "x",
    "nbytes": lambda p: 8,
    "nheads": lambda p: 2,
    "nheads_kv": lambda p: 1,
    "nlayers": lambda p: 1,
    "norm": lambda p: np.array(2.0),
    "num_pages": lambda p: 4,
    "op": lambda p: "sum",
    "parallel": lambda p: p.parallel,
    "path": lambda p: p.folder / "new",
    "prompt": lambda p: [1, 2],
    "prompts": lambda p: [[1, 2]],
    "q": lambda p: Q,
    "query": lambda p: Q,
    "rank": lambda p: 0,
    "sampling": lambda p: p.sampling,
    "seqlen": lambda p: 4,
    "sequences": lambda p: None,
    "shape": lambda p: (2, 3),
    "shapes": lambda p: {"a": (2, 3)},
    "size": lambda p: 1 << 20,
    "source": lambda p: 0,
    "split": lambda p: 0,
    "start": lambda p: 0,
    "step": lambda p: 0,
    "targets": lambda p: IDS,
    "to": lambda p: 0,
    "token": lambda p: 1,
    "tokens": lambda p: np.arange(16),
    "trace": lambda p: p.trace,
    "v": lambda p: KV,
    "value": lambda p: KV,
    "values": lambda p: p.arrays,
    "vocab": lambda p: 32,
    "weight": lambda p: _x(16, 16),
    "weights": lambda p: p.llama,
    "x": lambda p: _x(4, 4),
    "xs": lambda p: _x(4),
    # where a name means something else
    "Arena.allocate.device": lambda p: None,
    "Arena.allocate.dtype": lambda p: np.dtype(np.float32),
    "Arena.scratch.op": lambda p: "softmax",
    "Batches.at.step": lambda p: 0,
    "Bert.of.arrays": lambda p: {n: _x(*s) for n, s in p.bert.shapes().items()},
    "Bert.of.config": lambda p: p.bert,
    "BertConfig.from_hf.config": lambda p: HF_BERT,
    "Block.check.config": lambda p: p.config,
    "BytePairEncoding.decode.ids": lambda p: [104, 256],
    "BytePairEncoding.encode.data": lambda p: b"hi",
    "BytePairEncoding.load.path": lambda p: p.folder / "none",
    "BytePairEncoding.train.progress": lambda p: False,
    "BytePairEncoding.train.vocab": lambda p: 258,
    "Checkpoints.path.step": lambda p: 1,
    "Checkpoints.save.arrays": lambda p: {"a": _x(2)},
    "Checkpoints.save.step": lambda p: 1,
    "Comm.recv.dtype": lambda p: "float32",
    "ContextParallel.attention_backward.grads": lambda p: (_x(1, 4, 2, 8), _x(1, 4, 1, 8), _x(1, 4, 1, 8)),
    "DataParallel.begin.last": lambda p: True,
    "DataParallel.step.grad_scale": lambda p: 1.0,
    "Engine.submit.max_new_tokens": lambda p: 4,
    "Sequences.attention_backward.grads": lambda p: (_x(4, 2, 8), _x(4, 1, 8), _x(4, 1, 8)),
    "Engine.cancel.request": lambda p: 0,
    "Estimate.of.parts": lambda p: {"weights": 4},
    "FlatParams.assign.values": lambda p: {"a": _x(2, 3)},
    "FlatParams.views.buffer": lambda p: "params",
    "GradScaler.load_state_dict.state": lambda p: p.scaler.state_dict(),
    "GradScaler.unscale.grads": lambda p: [_x(2)],
    "Int8Input.weight": lambda p: p.packed.layers[0].qkv,
    "LlamaConfig.embedding_factor.dtype": lambda p: "float32",
    "LlamaConfig.from_hf.config": lambda p: p.config.to_hf(),
    "Lora.a": lambda p: _x(2, 16),
    "Lora.b": lambda p: _x(16, 2),
    "Lora.base": lambda p: _x(16, 16),
    "merged.weight": lambda p: models.Lora(_x(16, 16), _x(2, 16), _x(16, 2)),
    "Mesh.comm": lambda p: SingleProcess(),
    "Mesh.group.axes": lambda p: "dp",
    "PagedKVCache.accept.paths": lambda p: {},
    "PagedKVCache.add.tokens": lambda p: [1, 2],
    "PagedKVCache.empty_step.tokens": lambda p: 2,
    "PagedKVCache.reserve.tokens": lambda p: {p.handle: [4]},
    "Pipeline.place.stage": lambda p: 0,
    "GradScaler.update.found_inf": lambda p: 0,
    "Service.submit.ids": lambda p: [1, 2],
    "verify.step": lambda p: 0,
    "ShardedCheckpoints.save.parallel": lambda p: p.parallel,
    "with_int8_input.weights": lambda p: p.packed,
    "ShardedCheckpoints.save.step": lambda p: 1,
    "ShardedCheckpoints.load.step": lambda p: None,
    "TensorParallel.holds.name": lambda p: "embed",
    "TensorParallel.part.plain": lambda p: p.llama,
    "TensorParallel.pieces.name": lambda p: "embed",
    "TensorParallel.states_shape.ids": lambda p: (1, 4),
    "TextStream.prompt": lambda p: [72],
    "TextStream.tokenizer": lambda p: Letters(),
    "TokenFile.path": lambda p: p.tokens_file,
    "Trace.allocate.device": lambda p: None,
    "Trace.allocate.dtype": lambda p: np.dtype(np.float32),
    "Trace.free.buffer": lambda p: memory.Buffer("x", 1, 0),
    "Trace.scratch.op": lambda p: "softmax",
    "VocabularyRows.embed_backward.dweight": lambda p: _x(32, 16),
    "VocabularyRows.embed_backward.dx": lambda p: _x(1, 4, 16),
    "VocabularyRows.logits.h": lambda p: _x(1, 4, 16),
    "VocabularyRows.loss.h": lambda p: _x(1, 4, 16),
    "VocabularyRows.part": lambda p: _x(32, 16),
    "attend.keys": lambda p: p.cache.keys[0],
    "attend.q": lambda p: _x(2, 2, 8),
    "attend.step": lambda p: p.step,
    "attend.values": lambda p: p.cache.values[0],
    "bert_states.config": lambda p: p.bert,
    "bert_states.ids": lambda p: np.arange(4, dtype=np.int32),
    "bert_states.sequences": lambda p: p.sequences,
    "bert_states.weights": lambda p: p.bert_weights,
    "block_backward.dy": lambda p: _x(1, 4, 16),
    "block_backward.grads": lambda p: p.grads.layers[0],
    "block_backward.saved": lambda p: models.block_forward(_x(1, 4, 16), p.llama.layers[0], p.config)[1],
    "block_backward.weights": lambda p: p.llama.layers[0],
    "block_forward.weights": lambda p: p.llama.layers[0],
    "block_forward.x": lambda p: _x(1, 4, 16),
    "bubble.rows": lambda p: distributed.schedule("gpipe", 1, 1),
    "cache_for.num_pages": lambda p: 4,
    "cache_for.dtype": lambda p: None,
    "estimate_call.args": lambda p: ((4, 8),),
    "estimate_call.op": lambda p: "softmax",
    "fit.batch": lambda p: 1,
    "fit.seqlen": lambda p: None,
    "generate.max_new_tokens": lambda p: 1,
    "limit.size": lambda p: 1 << 30,
    "load.path": lambda p: p.model_folder,
    "export_gguf.folder": lambda p: p.model_folder,
    "load_adapters.folder": lambda p: p.adapters_folder,
    "load_adapters.dtype": lambda p: None,
    "load_bert.folder": lambda p: p.folder,
    "load_state.like": lambda p: None,
    "load_state.path": lambda p: p.state_file,
    "load_tokenizer.path": lambda p: p.folder / "none",
    "lora_grads.grads": lambda p: {n: np.zeros_like(x) for n, x in p.adapters.items()},
    "lora_grads.weights": lambda p: models.with_lora(p.llama, p.adapters),
    "lora_shapes.rank": lambda p: 2,
    "muon_step.grad": lambda p: _x(4, 4),
    "muon_step.momentum": lambda p: _x(4, 4),
    "muon_step.param": lambda p: _x(4, 4),
    "next_logits.step": lambda p: p.step,
    "probabilities.logits": lambda p: _x(2, 8),
    "prompt_lookup.tokens": lambda p: [1, 2, 1],
    "save_state.arrays": lambda p: {"a": _x(2)},
    "schedule.name": lambda p: "gpipe",
    "schedule.ranks": lambda p: 1,
    "sentence_embeddings.config": lambda p: p.bert,
    "sentence_embeddings.sentences": lambda p: [[1, 2]],
    "sentence_embeddings.weights": lambda p: p.bert_weights,
    "verify.logits": lambda p: _x(2, 8),
    "verify.parents": lambda p: [-1, 0],
    "verify.tokens": lambda p: [1, 2],
    "dout": lambda p: Q,
    "out": lambda p: Q,
    "lse": lambda p: _x(1, 2, 4, dtype=np.float64),
    **{f"{op}.{x}": lambda p: Q[0] for op in FLAT for x in ("dout", "q", "out")},
    **{f"{op}.{x}": lambda p: KV[0] for op in FLAT for x in ("k", "v")},
    **{f"{op}.lse": lambda p: _x(2, 4) for op in FLAT},
    "ulysses_attention_backward.saved": lambda p: distributed.ulysses_attention(
        SingleProcess(), Q, KV, KV, return_saved=True
    )[1],
}
