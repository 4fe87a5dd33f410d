"""Command ``gpu-ops generate``: prints the texts of a model for prompts, as they are generated."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from gpu_ops.cli.parser import check_folder
from gpu_ops.cli.terminal import print_json
from gpu_ops.core.checks import FLOAT_DTYPES, one_of
from gpu_ops.errors import OptionError
from gpu_ops.inference.engine import Engine
from gpu_ops.inference.forward import cache_for
from gpu_ops.inference.requests import Sampling
from gpu_ops.inference.text import TextStream
from gpu_ops.inference.text_model import TextModel, open_model
from gpu_ops.ops.attention.options import QUANTIZED

__all__ = ["open_with", "run"]


def open_with(options: argparse.Namespace, *, chat: bool) -> TextModel:
    """Open the model that the arguments of a command name."""
    for name, value, known in (
        ("--dtype", options.dtype, FLOAT_DTYPES),
        ("--kv-dtype", options.kv_dtype, FLOAT_DTYPES | QUANTIZED),
    ):
        if value is not None:
            one_of(options.command, name, value, known)
    if options.adapters is not None:
        check_folder(options.command, "--adapters", options.adapters, "adapter_config.json")
    return open_model(
        options.model,
        tokenizer=options.tokenizer,
        adapters=options.adapters,
        chat=chat,
        chat_template=options.chat_template,
        dtype=options.dtype,
        device=options.device,
        format=options.format,
        activations=options.activations,
    )


def run(options: argparse.Namespace) -> int:
    """Print the text of each prompt, and the speed to stderr."""
    if options.system is not None and not options.chat:
        raise OptionError("--system is the system message of --chat")
    if options.chat_template is not None and not options.chat:
        raise OptionError("--chat-template is the template of --chat")
    model = open_with(options, chat=options.chat)
    texts = [_checked(text) for text in options.prompt]
    prompts = [_encoded(model, text, options) for text in texts]
    if not all(prompts):
        raise OptionError("--prompt is empty, and this tokenizer adds no token that begins a text; pass some text")
    # the last token is not read
    tokens = [max(len(prompt) + options.max_new_tokens - 1, 1) for prompt in prompts]
    if model.longest is not None and max(tokens) > model.longest:
        print(
            f"{max(tokens)} tokens with the prompt; the model has been trained for {model.longest}, and what it "
            "writes beyond them may make no sense",
            file=sys.stderr,
        )
    cache = cache_for(model.weights, model.config, lengths=tokens, dtype=options.kv_dtype)
    engine = Engine(model.weights, model.config, cache, max_seqlen=max(tokens))
    sampling = Sampling(options.temperature, options.top_k, options.top_p, seed=options.seed)
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=options.max_new_tokens, sampling=sampling, stop=model.ends)
    streams = [TextStream(model.tokenizer, options.stop, prompt) for prompt in prompts]
    # a chat shows the answer alone
    answers: list[dict[str, Any]] = [
        {"prompt": text, "text": "", "tokens": [], "finish_reason": ""} for text in texts
    ]
    is_shown = len(prompts) == 1 and not options.json
    if is_shown and not options.chat:
        _write(texts[0])
    start, first, drawn = time.perf_counter(), 0.0, 0
    for token in engine.run():
        first = first or time.perf_counter() - start
        drawn += 1
        stream, answer = streams[token.request], answers[token.request]
        if token.finished == "error":
            raise OptionError(f"the logits after token {len(answer['tokens'])} are not finite")
        piece = "" if token.finished == "stop" else stream.add(token.token)
        piece += stream.finish() if token.finished else ""
        answer["text"] += piece
        answer["tokens"].append(token.token)
        answer["finish_reason"] = "stop" if stream.stopped else token.finished
        if is_shown:
            _write(piece)
        if stream.stopped and not token.finished:
            engine.cancel(token.request)
    seconds = time.perf_counter() - start
    prompt_tokens, later = sum(map(len, prompts)), drawn - len(prompts)
    if options.json:
        times = {"prompt_tokens": prompt_tokens, "first_token_seconds": first, "seconds": seconds}
        print_json({"model": model.name, "texts": answers, **times})
        return 0
    if is_shown:
        print()
    else:
        for answer in answers:
            print("" if options.chat else answer["prompt"], answer["text"], "\n", sep="")
    rest = f", then {later / (seconds - first):.1f} tokens/s" if later > 0 else ""
    print(f"{prompt_tokens} prompt tokens, first token after {first:.2f} s{rest}", file=sys.stderr)
    return 0


def _checked(text: str) -> str:
    """Prompt of an argument; ``-`` reads it from standard input."""
    try:
        text = sys.stdin.read() if text == "-" else text
    except UnicodeDecodeError as error:
        raise OptionError(f"the prompt from standard input is not UTF-8: {error}") from error
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise OptionError("a prompt is not UTF-8")
    return text


def _encoded(model: TextModel, text: str, options: argparse.Namespace) -> list[int]:
    if not options.chat:
        return model.encode(text)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return model.encode_messages(messages)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
