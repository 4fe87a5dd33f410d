"""Command ``python -m gpu_ops generate``: prints the texts of a model for prompts, as they are generated."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from gpu_ops.core.checks import integer
from gpu_ops.errors import GpuOpsError, MissingFileError, OptionError
from gpu_ops.formats.files import opened, system_errors
from gpu_ops.formats.gguf_file import GGUFFile
from gpu_ops.inference.captured import runs_on_cpu
from gpu_ops.inference.engine import Engine
from gpu_ops.inference.forward import cache_for
from gpu_ops.inference.requests import Sampling
from gpu_ops.inference.text import TextStream
from gpu_ops.models import load, with_packed
from gpu_ops.models.config_hf import read_config
from gpu_ops.training.tokenizer import load_tokenizer

__all__ = ["end_tokens", "run"]


def run(options: argparse.Namespace) -> int:
    """Print the text of each prompt, and the speed to stderr; after an error print one line and return 2."""
    try:
        _generate(options)
    except GpuOpsError as error:
        words = " ".join(str(error).split()).removeprefix("generate: ")
        print(f"generate: {words}", file=sys.stderr)
        return 2
    return 0


def _generate(options: argparse.Namespace) -> None:
    model = Path(options.model)
    tokenizer = _tokenizer(model, options.tokenizer)
    packing = {"format": options.format, "activations": options.activations}
    weights, config = load(model, dtype=options.dtype, device=options.device, **packing)
    weights = with_packed(weights) if runs_on_cpu() else weights
    try:
        texts = [sys.stdin.read() if text == "-" else text for text in options.prompt]
    except UnicodeDecodeError as error:
        raise OptionError(f"the prompt from standard input is no UTF-8: {error}") from error
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise OptionError("a prompt is no UTF-8")
    prompts = [tokenizer.encode(text).ids for text in texts]
    # the last token is not read
    tokens = [max(len(prompt) + options.max_new_tokens - 1, 1) for prompt in prompts]
    cache = cache_for(weights, config, lengths=tokens, dtype=options.kv_dtype)
    engine = Engine(weights, config, cache, max_seqlen=max(tokens))
    sampling = Sampling(options.temperature, options.top_k, options.top_p, seed=options.seed)
    ends = end_tokens(model)
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=options.max_new_tokens, sampling=sampling, stop=ends)
    streams = [TextStream(tokenizer, options.stop, prompt) for prompt in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]
    start, first, count = time.perf_counter(), 0.0, 0
    for token in engine.run():
        first = first or time.perf_counter() - start
        count += 1
        if token.finished == "error":
            raise OptionError(f"the logits after token {len(pieces[token.request])} are not finite")
        stream = streams[token.request]
        piece = "" if token.finished == "stop" else stream.add(token.token)
        piece += stream.finish() if token.finished else ""
        pieces[token.request].append(piece)
        if len(prompts) == 1:
            sys.stdout.write(piece)
            sys.stdout.flush()
        if stream.stopped and not token.finished:
            engine.cancel(token.request)
    if len(prompts) == 1:
        print()
    else:
        for text, of in zip(texts, pieces, strict=True):
            print(f"{text}{''.join(of)}\n")
    seconds = time.perf_counter() - start
    prompt_tokens = sum(map(len, prompts))
    rest = f", then {(count - len(prompts)) / (seconds - first):.1f} tokens/s" if count > len(prompts) else ""
    print(f"{prompt_tokens} prompt tokens, first token after {first:.2f} s{rest}", file=sys.stderr)


def _tokenizer(model: Path, given: str | None) -> Any:
    """Load the given tokenizer, or the one in the model's folder, or in the folder of its file."""
    if given is not None:
        return load_tokenizer(given)
    with system_errors("load_tokenizer", model):
        is_file = model.is_file()
    beside = (model.parent if is_file else model) / "tokenizer.json"
    if is_file and not beside.exists():
        raise OptionError(
            f"there is no {beside}, and the vocabulary within a GGUF file is not read: pass --tokenizer FILE, the "
            "tokenizer.json of the model that the file was made from"
        )
    return load_tokenizer(beside)


def end_tokens(model: Path) -> list[int]:
    """Tokens that end a text: for a folder, from ``generation_config.json`` or else ``config.json``; for a GGUF file,
    from its metadata."""
    if model.is_file():
        with opened("generate", model) as file:
            metadata = GGUFFile("generate", model, file)
            names = ("eos", "eot", "eom")
            ends = [metadata.value(f"tokenizer.ggml.{name}_token_id") for name in names]
        return [integer("generate", "eos_token_id", end, low=0) for end in ends if end is not None]
    token_ids: Any = None
    for name in ("generation_config.json", "config.json"):
        try:
            token_ids = read_config("generate", model / name).get("eos_token_id")
        except MissingFileError:
            continue
        if token_ids is not None:
            break
    ends = token_ids if isinstance(token_ids, list) else [] if token_ids is None else [token_ids]
    return [integer("generate", "eos_token_id", end, low=0) for end in ends]
