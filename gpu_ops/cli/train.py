"""Command ``gpu-ops train``: trains a small model on a text, or fine-tunes a model or its adapters."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import resource
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gpu_ops import memory, models
from gpu_ops.cli.terminal import make_console, waiting
from gpu_ops.core.state_arrays import named_dtype, to_device
from gpu_ops.errors import MissingFileError, MissingPackageError, OptionError
from gpu_ops.formats.files import opened, path_of, read_object, system_errors, write_file
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.inference.generation import generate
from gpu_ops.inference.requests import Sampling
from gpu_ops.inference.text_model import TextModel, open_tokenizer
from gpu_ops.models.config_hf import read_config
from gpu_ops.ops.rows.global_norm import global_norm
from gpu_ops.training import Batches, Checkpoints, FlatParams, clip_coefficient, load_state, load_tokenizer

__all__ = ["learning_rate", "run"]

_RUN, _LOSSES, _PICTURE, _STATES = "run.json", "losses.csv", "losses.svg", "states"
_TOKENIZER = "tokenizer.json"
_COPIED = (
    _TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
_RATES = {"new": 2e-3, "model": 2e-5, "adapters": 2e-4}
_WARM_STEPS = 30
_LINES = 30  # of progress in a pipe
_STEPS_OF_SPEED = 20
_SAMPLE = 48  # tokens
# Options that decide what a step computes: a run goes on only with the same ones.
_FIXED = ("model", "lora", "rank", "base_format", "batch", "seqlen", "lr", "dtype", "moment_bits", "seed")
_FIXED_NEW = ("vocab", "hidden", "layers", "heads")


@dataclass
class _Job:
    """Weights that are trained, and the batches of tokens to train them on."""

    flat: FlatParams
    model: TextModel
    grads: models.Llama
    batches: Batches
    save: Callable[[Path], None]
    """Function that writes the result to a folder."""


def learning_rate(step: int, peak: float) -> float:
    """Learning rate: linear warm-up, then an inverse square root. It does not depend on the number of steps, so that
    a run can go on with more of them."""
    return peak * min((step + 1) / _WARM_STEPS, math.sqrt(_WARM_STEPS / (step + 1)))


def run(options: argparse.Namespace) -> int:
    """Train, or go on from the last state in the folder; return 130 after an interrupt."""
    if options.base_format is not None and not options.lora:
        raise OptionError("--base-format packs the model under adapters; add --lora")
    if options.lora and options.model is None:
        raise OptionError("--lora trains adapters of a model; pass --model")
    console, out = make_console(), path_of("train", options.out)
    text = _read_text(options.text)
    with system_errors("train", out):
        before = sorted(path.name for path in out.iterdir()) if out.exists() else []
    fixed = _fixed(options, text)
    if _RUN in before:
        _check_same(out, fixed)
    elif before:
        raise OptionError(f"{out} is not empty and holds no run; choose another --out")
    with waiting(console, "preparing model and text"):
        job = _new(options, text, out) if options.model is None else _tuned(options, text)
    with system_errors("train", out):
        out.mkdir(parents=True, exist_ok=True)
    write_file("train", out / _RUN, [json.dumps(fixed, indent=2).encode()])
    if options.model is None:
        write_file("train", out / _TOKENIZER, [job.model.tokenizer.to_str().encode()])
    states = Checkpoints(out / _STATES)
    if (latest := states.latest()) is not None:
        load_state(latest, like=job.flat.state())
        _say(console, f"goes on after step {job.flat.steps}")
    config, form = job.model.config, _form(options)
    plan = memory.estimate(
        config,
        batch=options.batch,
        seqlen=options.seqlen,
        dtype=job.flat.buffers["params"].dtype,
        policy=options.policy,
        moment_bits=options.moment_bits,
        weights=form,
    )
    trained = sum(x.size for x in job.flat.params.values())
    _say(
        console,
        f"{config.parameters:,} weights, {trained:,} trained; a step takes {plan.peak / 2**20:,.0f} MiB",
    )
    saved = _train(options, job, states, out, console)
    if saved is not None:
        _say(console, f"stopped after step {job.flat.steps}, saved {saved}; the same command goes on")
        return 130
    job.save(out)
    picture = _draw(out)
    _say(console, f"losses: {picture}")
    base = options.model if options.lora else out
    adapters = f" --adapters {out}" if options.lora else ""
    _say(console, f'done; gpu-ops generate --model {base}{adapters} --prompt "{options.prompt}"')
    return 0


def _train(
    options: argparse.Namespace, job: _Job, states: Checkpoints, out: Path, console: Any
) -> int | None:
    """Run the steps. Returns None, or after an interrupt the last saved step."""
    flat, model, device = job.flat, job.model, options.device
    first, saved, peak = flat.steps, flat.steps, options.lr or _RATES[_kind(options)]
    seconds: deque[float] = deque(maxlen=_STEPS_OF_SPEED)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    try:
        with _losses(out, first) as rows, bar:
            if first < options.steps:  # what follows knows how long it takes
                _say(console, "the first sample and step compile their kernels, once on a machine")
                _say(console, f"sample: {_sample(model, options.prompt, first)}")
            task = bar.add_task(f"step {first}", total=options.steps, completed=first)
            for step in range(first, options.steps):
                start = time.perf_counter()
                flat.zero_grad()
                ids, targets = (to_device(x, device) for x in job.batches.at(step))
                loss = models.loss_and_grads(
                    ids, targets, model.weights, model.config, grads=job.grads, policy=options.policy
                )
                norm, found_inf = global_norm(flat.buffers["grads"])
                clip = clip_coefficient(norm, 1.0)
                rate = learning_rate(step, peak)
                flat.step(lr=rate, betas=(0.9, 0.95), weight_decay=0.1, grad_scale=clip, skip=found_inf)
                number = step + 1
                if number <= first + 2:  # what the first step took has its compilation in it
                    seconds.clear()
                seconds.append(time.perf_counter() - start)
                mean = sum(seconds) / len(seconds)
                speed = options.batch * options.seqlen / mean
                rows.write(f"{number},{float(loss):.6f},{rate:.3e},{speed:.0f}\n")
                line = (
                    f"step {number} of {options.steps}, loss {float(loss):.3f}, {speed:,.0f} tokens/s, "
                    f"{_resident():,.0f} MiB, {_duration(mean * (options.steps - number))} left"
                )
                bar.update(task, advance=1, description=line)
                if not console.is_terminal and number % max(options.steps // _LINES, 1) == 0:
                    _say(console, line)
                if number % options.save_every == 0 or number == options.steps:
                    states.save(number, flat.state())
                    saved = number
                if number % options.sample_every == 0 or number == options.steps:
                    _say(console, f"sample: {_sample(model, options.prompt, number)}")
    except KeyboardInterrupt:
        return saved
    return None


def _new(options: argparse.Namespace, text: str, out: Path) -> _Job:
    """Job of a new model."""
    codec = _tokenizer(options, text, out)
    heads = options.heads
    if options.hidden % heads:
        raise OptionError(f"--hidden {options.hidden} is not a multiple of --heads {heads}")
    config = models.LlamaConfig(
        vocab=codec.get_vocab_size(),
        hidden=options.hidden,
        ffn=-(-options.hidden * 8 // 3 // 32) * 32,
        nlayers=options.layers,
        nheads=heads,
        nheads_kv=heads // 2 if heads % 2 == 0 else heads,
    )
    dtype = named_dtype("train", "--dtype", options.dtype or "float32")
    flat = FlatParams.from_shapes(
        config.shapes(), dtype=dtype, moment_bits=options.moment_bits, device=options.device
    )
    flat.assign(models.initial_weights(config, seed=options.seed))
    weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)

    def save(out: Path) -> None:
        models.save(out, weights, config, entries={"max_position_embeddings": options.seqlen})

    model = TextModel(Path(options.out).name, weights, config, codec)
    return _Job(flat, model, grads, _batches(options, model, text), save)


def _tokenizer(options: argparse.Namespace, text: str, out: Path) -> Any:
    """Tokenizer of a new model: that of the run in ``out``, that of ``--tokenizer``, or byte pairs learnt from the
    text, cut into words as GPT-2 does."""
    if (out / _TOKENIZER).exists():
        return load_tokenizer(out / _TOKENIZER)
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    try:
        from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
        from tokenizers.models import BPE
    except ImportError as error:
        raise MissingPackageError(
            f"a new model's tokenizer takes the package tokenizers: pip install tokenizers ({error})"
        ) from error
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=options.vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[: 1 << 20]], trainer)
    return tokenizer


def _tuned(options: argparse.Namespace, text: str) -> _Job:
    """Job of a model that is fine-tuned, or of adapters on it."""
    where = path_of("train", options.model)
    if not options.lora and where.is_file():
        raise OptionError(f"{where} is a GGUF file, and a fine-tuned model is saved as a folder; add --lora")
    codec = open_tokenizer(where, options.tokenizer)
    base, config = models.load(where, dtype=options.dtype, device=options.device, format=options.base_format)
    dtype = base.embed.dtype
    if options.lora:
        shapes = models.lora_shapes(config, options.rank)
        flat = FlatParams.from_shapes(
            shapes, dtype=dtype, moment_bits=options.moment_bits, device=options.device
        )
        flat.assign(models.initial_lora(shapes, seed=options.seed))
        weights, grads = models.with_lora(base, flat.params), models.lora_grads(base, flat.grads)
    else:
        packed = [n for n, x in base.arrays().items() if isinstance(x, (PackedMatrix, TernaryMatrix))]
        if packed:
            raise OptionError(
                f"{packed[0]} of the model is packed, and packed weights are not trained; add --lora"
            )
        flat = FlatParams.from_shapes(
            config.shapes(), dtype=dtype, moment_bits=options.moment_bits, device=options.device
        )
        flat.assign({name: x for name, x in base.arrays().items() if name in flat.params})
        weights, grads = models.Llama.of(flat.params, config), models.Llama.of(flat.grads, config)

    def save(out: Path) -> None:
        if options.lora:
            models.save_adapters(out, flat.params, config, base=str(where.resolve()))
            return
        models.save(out, weights, config, entries=read_config("train", where / "config.json"))
        for name in _COPIED:
            if (where / name).exists():
                with system_errors("train", out / name):
                    shutil.copyfile(where / name, out / name)

    model = TextModel(where.stem, weights, config, codec)
    return _Job(flat, model, grads, _batches(options, model, text), save)


def _batches(options: argparse.Namespace, model: TextModel, text: str) -> Batches:
    tokens = np.asarray(model.encode(text), np.int32)
    return Batches(tokens, options.batch, options.seqlen, seed=options.seed)


def _kind(options: argparse.Namespace) -> str:
    return "adapters" if options.lora else "new" if options.model is None else "model"


def _form(options: argparse.Namespace) -> memory.Weights:
    return memory.Weights(options.base_format, rank=options.rank) if options.lora else memory.Weights()


def _sample(model: TextModel, prompt: str, seed: int) -> str:
    """Text that the model writes after the prompt, on one line."""
    ids = model.encode(prompt)
    sampling = Sampling(temperature=0.7, seed=seed)
    (tokens,) = generate(model.weights, model.config, [ids], max_new_tokens=_SAMPLE, sampling=sampling)
    return repr(model.decode([*ids, *tokens]))


def _read_text(path: str) -> str:
    where = path_of("train", path)
    with opened("train", where) as file:
        data = file.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{where} is not UTF-8: {error}") from error


def _fixed(options: argparse.Namespace, text: str) -> dict[str, Any]:
    """Entries of ``run.json``."""
    names = _FIXED if options.model is not None else _FIXED + _FIXED_NEW
    values = {name: getattr(options, name) for name in names}
    for name in ("model", "tokenizer"):
        path = getattr(options, name)
        values[name] = None if path is None else str(Path(path).resolve())
    return {**values, "text_sha256": hashlib.sha256(text.encode()).hexdigest()}


def _check_same(out: Path, fixed: dict[str, Any]) -> None:
    held = read_object("train", out / _RUN, 1 << 16, OptionError)
    for name, value in fixed.items():
        if held.get(name) != value:
            option = "--text" if name == "text_sha256" else f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{out} holds a run with another {option}; choose another --out, or the same {option}"
            )


@contextmanager
def _losses(out: Path, steps: int) -> Iterator[TextIO]:
    """Open the table of losses, which keeps the rows up to ``steps``."""
    rows = ["step,loss,learning_rate,tokens_per_second\n"]
    with suppress(MissingFileError), opened("train", out / _LOSSES) as file:
        rows += file.read().decode().splitlines(keepends=True)[1 : steps + 1]
    with system_errors("train", out / _LOSSES), (out / _LOSSES).open("w", buffering=1) as table:
        table.writelines(rows)
        yield table


def _draw(out: Path) -> str:
    """Draw the losses; return the file to look at."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{out / _LOSSES} (with matplotlib installed, a picture as well)"
    with (out / _LOSSES).open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([int(row["step"]) for row in rows], [float(row["loss"]) for row in rows])
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None))
    figure.savefig(out / _PICTURE)
    return str(out / _PICTURE)


def _resident() -> float:
    """Peak memory of the process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def _duration(seconds: float) -> str:
    """
    >>> _duration(59), _duration(150), _duration(7300)
    ('59 s', '2 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _say(console: Any, text: str) -> None:
    console.print(text, markup=False, highlight=False)
    console.file.flush()
