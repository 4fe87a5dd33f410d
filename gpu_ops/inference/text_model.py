"""A model together with its tokenizer, chat template and end tokens, as the commands use them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_ops.core.checks import integer
from gpu_ops.errors import MissingFileError, OptionError
from gpu_ops.formats.files import opened, path_of, system_errors
from gpu_ops.formats.gguf_file import GGUFFile
from gpu_ops.inference.captured import runs_on_cpu
from gpu_ops.inference.chat import ChatTemplate, read_template, template_in
from gpu_ops.models import load, load_adapters, with_lora, with_packed
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.config_hf import read_config
from gpu_ops.models.weights import Llama
from gpu_ops.training.tokenizer import load_tokenizer

__all__ = ["TextModel", "open_model", "open_tokenizer"]

_WHO = "model"
_Embedded = tuple[str | None, dict[str, int]]  # chat template in a GGUF file, and ids of the tokens that it names


@dataclass
class TextModel:
    """A model and what it takes to read and write text with it."""

    name: str
    weights: Llama
    config: LlamaConfig
    tokenizer: Any
    """object with ``encode(text)`` and ``decode(ids)``"""
    ends: list[int] = field(default_factory=list)
    """Tokens that end a text."""
    longest: int | None = None
    """Tokens that the model has been trained for, prompt and text together; None if its files do not say."""
    template: ChatTemplate | None = None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with those that begin one."""
        return _ids(self.tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; bytes that are no character become replacement characters."""
        text = self.tokenizer.decode(ids)
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a chat up to the assistant's next message. OptionError if the model has no chat template."""
        if self.template is None:
            raise OptionError(f"{self.name} has no chat template; complete a text instead")
        return _ids(self.tokenizer.encode(self.template.render(messages), add_special_tokens=False))


def _ids(encoding: Any) -> list[int]:
    return [int(i) for i in getattr(encoding, "ids", encoding)]


def open_model(
    path: Any,
    *,
    tokenizer: str | None = None,
    adapters: str | None = None,
    chat: bool = False,
    chat_template: str | None = None,
    **options: Any,
) -> TextModel:
    """Open a model's folder or GGUF file. What can be wrong with it is found before its weights are read.

    ``options`` are those of :func:`gpu_ops.models.load`. ``adapters``: a folder of LoRA adapters. ``chat``: whether
    the chat template is read, from the file ``chat_template`` if that is not None. On a CPU, arrays are packed
    (:func:`gpu_ops.models.with_packed`).
    """
    model = path_of(_WHO, path)
    with system_errors(_WHO, model):
        if not model.exists():
            raise MissingFileError(errno.ENOENT, "there is no such folder or GGUF file", str(model))
        is_file = model.is_file()
    ends, longest, embedded = _from_gguf(model) if is_file else _from_folder(model)
    codec = open_tokenizer(model, tokenizer)
    template = None
    if chat and not is_file:
        template = template_in(model, chat_template)
    elif chat:
        source, ids = embedded
        source = source if chat_template is None else read_template(chat_template)
        tokens = {name: codec.id_to_token(i) for name, i in ids.items()}
        template = None if source is None else ChatTemplate(source, tokens)
    weights, config = load(model, **options)
    if adapters is not None:
        weights = with_lora(weights, load_adapters(adapters, config, str(weights.embed.dtype)))
    if runs_on_cpu():
        weights = with_packed(weights)
    name = model.stem if is_file else model.resolve().name
    return TextModel(name, weights, config, codec, ends, longest, template)


def _from_folder(model: Path) -> tuple[list[int], int | None, _Embedded]:
    """End tokens, from ``generation_config.json`` or else ``config.json``, and the longest text."""
    config = read_config(_WHO, model / "config.json")
    LlamaConfig.from_hf(config)
    ends = config.get("eos_token_id")
    with contextlib.suppress(MissingFileError):
        entries = read_config(_WHO, model / "generation_config.json")
        ends = ends if entries.get("eos_token_id") is None else entries["eos_token_id"]
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    longest = config.get("max_position_embeddings")
    return (
        [integer(_WHO, "eos_token_id", end, low=0) for end in listed],
        None if longest is None else integer(_WHO, "max_position_embeddings", longest, low=1),
        (None, {}),
    )


def _from_gguf(model: Path) -> tuple[list[int], int | None, _Embedded]:
    """End tokens, the longest text, and the chat template."""
    with opened(_WHO, model) as file:
        metadata = GGUFFile(_WHO, model, file)
        names = ("bos", "eos", "eot", "eom")
        ids = {name: metadata.value(f"tokenizer.ggml.{name}_token_id") for name in names}
        architecture = metadata.value("general.architecture")
        longest = metadata.value(f"{architecture}.context_length")
        template = metadata.value("tokenizer.chat_template")
    present = {name: integer(_WHO, f"{name}_token_id", i, low=0) for name, i in ids.items() if i is not None}
    ends = [i for name, i in present.items() if name != "bos"]
    longest = None if longest is None else integer(_WHO, "context_length", longest, low=1)
    source = template if isinstance(template, str) else None
    return ends, longest, (source, {f"{name}_token": i for name, i in present.items() if name in ("bos", "eos")})


def open_tokenizer(model: Path, path: str | None = None) -> Any:
    """Load a tokenizer: the file ``path``, or that in the model's folder, or in the folder of its file."""
    if path is not None:
        return load_tokenizer(path)
    with system_errors("load_tokenizer", model):
        is_file = model.is_file()
    folder = model.parent if is_file else model
    usual = folder / "tokenizer.json"
    if not usual.exists():
        reason = "the vocabulary within a GGUF file is not read" if is_file else "the folder has no tokenizer"
        raise OptionError(
            f"there is no {usual}, and {reason}: pass --tokenizer FILE, the tokenizer.json of the model that it was "
            "made from"
        )
    return load_tokenizer(usual)
