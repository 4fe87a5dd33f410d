"""Every public function, constructor and method above the ops, called with valid arguments or one wrong one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import numpy as np

from gpu_ops import distributed, inference, memory, models, training
from gpu_ops.distributed.comm import SingleProcess
from tests.support.public_values import VALUES, Letters, Parts

PACKAGES = ("distributed", "inference", "memory", "models", "training")
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
            raise LookupError(f"no value for {name}: add it to VALUES in tests/support/public_values.py")
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
