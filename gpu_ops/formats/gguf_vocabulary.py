"""Tokenizer of a model's folder as metadata of a GGUF file, from ``tokenizer.json`` and the files next to it.

llama.cpp has two tokenizers for such models, "gpt2" (byte pairs within words) and "llama" (SentencePiece), and a
list of names for the ways in which the former cuts text into words. A tokenizer.json that does anything else to its
text is refused: the file would load, and read other tokens than the model was trained with. Two differences remain,
as in llama.cpp's own files: text is not normalised to NFC, and gets a space in front even if it begins with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.errors import FormatError, GpuOpsError, OptionError
from gpu_ops.formats.files import opened, read_object

__all__ = ["read_vocabulary"]

_MOST_BYTES = 1 << 28  # of a tokenizer.json; published ones have 35 MB at most
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands in SentencePiece's tokens where the text has a space

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Style(NamedTuple):
    """Names of a tokenizer in llama.cpp."""

    model: str
    pre: str
    space_prefix: bool = False
    whole_words: bool = False
    """Whether a word that is a token is taken whole, without merges."""


# Steps by which a tokenizer.json prepares text for its model, as _step() describes them.
_STYLES = {
    ("words as bytes",): _Style("gpt2", "gpt-2"),
    ("digits", "words as bytes"): _Style("gpt2", "smollm"),
    (_LLAMA3, "bytes"): _Style("gpt2", "llama-bpe", whole_words=True),
    (_QWEN2, "bytes"): _Style("gpt2", "qwen2"),
    ("NFC", _QWEN2, "bytes"): _Style("gpt2", "qwen2"),  # llama.cpp leaves the normalisation out
    (_TEKKEN, "bytes"): _Style("gpt2", "tekken", whole_words=True),
    ("prefix", "spaces"): _Style("llama", "default", space_prefix=True),
    ("metaspace first",): _Style("llama", "default", space_prefix=True),
    ("metaspace always",): _Style("llama", "default", space_prefix=True),
    ("metaspace never",): _Style("llama", "default"),
    ("spaces",): _Style("llama", "default"),
    ("spaces", "split after spaces"): _Style("llama", "default"),
}


def read_vocabulary(op: str, folder: Path, size: int) -> dict[str, Any]:
    """Entries ``tokenizer.*`` of the metadata, with ``size`` tokens; none if the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    tokenizer = read_object(op, path, _MOST_BYTES, FormatError)
    tokenizer_config, config, generation = (
        read_object(op, folder / name, _MOST_BYTES, FormatError) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    try:
        style = _style(tokenizer)
        vocabulary = _Vocabulary(tokenizer, size, style)
        entries = vocabulary.entries() | _special_tokens(
            tokenizer, vocabulary.ids, tokenizer_config, config, generation
        )
    except GpuOpsError as error:
        raise type(error)(f"{op}: {path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{op}: {path} is no tokenizer.json that is known: {error!r:.200}") from error
    template = _chat_template(op, folder, tokenizer_config)
    return entries | ({"tokenizer.chat_template": template} if template else {})


# ---- preparation of text -----------------------------------------------------------------------------------


def _steps(part: Any, name: str) -> list[Any]:
    """Steps of a part of tokenizer.json, which may be a sequence under ``name``."""
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _step(step: Mapping[str, Any]) -> str:
    """Description of a step; a regular expression for a step that isolates its matches."""
    match step:
        case {"type": "NFC"}:
            return "NFC"
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return str(regex)
        case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}:
            return "split after spaces"
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "words as bytes" if step.get("use_regex", True) else "bytes"
        case {"type": "Prepend", "prepend": "\N{LOWER ONE EIGHTH BLOCK}"}:
            return "prefix"
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}:
            return "spaces"
        case {"type": "Metaspace", "replacement": "\N{LOWER ONE EIGHTH BLOCK}", "split": False}:
            return f"metaspace {step.get('prepend_scheme', 'always')}"
    return json.dumps(step)


def _style(tokenizer: Mapping[str, Any]) -> _Style:
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        raise OptionError(f"its model is {model['type']!r:.40}; byte pair encoding (BPE) is written")
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    steps = tuple(map(_step, [*normalizers, *_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")]))
    style = _STYLES.get(steps)
    if style is None:
        names = ", ".join(sorted({style.pre for style in _STYLES.values()} - {"default"}))
        raise OptionError(
            f"its normalizer and pre_tokenizer are {' then '.join(steps) or 'empty'!r:.300}, for which no name in "
            f"llama.cpp is known; known are those of {names} and SentencePiece"
        )
    if bool(model.get("byte_fallback")) != (style.model == "llama"):
        raise OptionError(
            f"byte_fallback={model.get('byte_fallback')!r} does not go with its pre_tokenizer: SentencePiece has it"
        )
    if model.get("ignore_merges") and not style.whole_words:
        raise OptionError(f"ignore_merges=true does not go with llama.cpp's {style.pre!r}")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise OptionError("continuing_subword_prefix and end_of_word_suffix are not supported")
    return style


# ---- tokens ------------------------------------------------------------------------------------------------


class _Vocabulary:
    def __init__(self, tokenizer: Mapping[str, Any], size: int, style: _Style) -> None:
        self._style, model = style, tokenizer["model"]
        self._vocab: dict[str, int] = dict(model["vocab"])
        self._added = {token["content"]: token for token in tokenizer.get("added_tokens") or ()}
        self.ids = self._vocab | {text: token["id"] for text, token in self._added.items()}
        self._unknown = model.get("unk_token")
        self._merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        if any(type(id) is not int or id < 0 for id in self.ids.values()):
            raise ValueError("an id of a token is no number")
        if any(len(pair) != 2 or not {*pair, "".join(pair)} <= self._vocab.keys() for pair in self._merges):
            raise FormatError("a merge is no pair of tokens that make a third")
        if (last := max(self.ids.values(), default=-1)) >= size:
            raise OptionError(f"it has a token of id {last}, and the model's table {size} rows")
        if len(set(self.ids.values())) != len(self.ids):
            raise FormatError("two tokens have the same id")
        self._size = size

    def entries(self) -> dict[str, Any]:
        tokens = [f"[PAD{i}]" for i in range(self._size)]  # rows of the table without a token
        types = np.full(self._size, _UNUSED, np.int32)
        for text, i in self.ids.items():
            types[i] = self._type(text)
            tokens[i] = text.replace(_SPACE, " ") if types[i] == _USER_DEFINED else text
        entries = {
            "tokenizer.ggml.model": self._style.model,
            "tokenizer.ggml.pre": self._style.pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.add_space_prefix": self._style.space_prefix,
        }
        if self._style.model == "llama":
            return entries | {"tokenizer.ggml.scores": self._scores()}
        merges = [" ".join(pair) for pair in self._merges]
        return entries | {"tokenizer.ggml.merges": merges or np.array([], str)}

    def _type(self, text: str) -> int:
        if text == self._unknown and self._style.model == "llama":
            return _UNKNOWN
        if text in self._added:
            return _CONTROL if self._added[text]["special"] else _USER_DEFINED
        return _BYTE if self._style.model == "llama" and _BYTE_TOKEN.fullmatch(text) else _NORMAL

    def _scores(self) -> Any:
        """Scores that give the tokens of the merges: llama.cpp merges any two neighbours that are a token together,
        those with the highest score first."""
        ranks: dict[str, int] = {}
        previous = ""
        for pair in self._merges:
            text = "".join(pair)
            if text != previous and text in ranks:
                raise OptionError(f"its merges make {text!r:.40} at two places, which no score can say")
            ranks.setdefault(text, len(ranks))
            previous = text
        pairs = set(self._merges)
        for text in self._vocab.keys() - self._added.keys():
            for cut in range(1, len(text)):
                pair = text[:cut], text[cut:]
                if pair not in pairs and all(half in self._vocab for half in pair):
                    raise OptionError(
                        f"{pair[0]!r:.40} and {pair[1]!r:.40} make a token, and no merge says so; SentencePiece "
                        "merges every such pair"
                    )
        scores = np.zeros(self._size, np.float32)
        for text, rank in ranks.items():
            scores[self.ids[text]] = -rank
        return scores


def _special_tokens(
    tokenizer: Mapping[str, Any],
    ids: Mapping[str, int],
    tokenizer_config: Mapping[str, Any],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> dict[str, Any]:
    """Ids of special tokens, and whether a text begins with ``bos`` and ends with ``eos``."""
    added = _around(tokenizer)
    special: dict[str, int] = {}
    for name in ("bos", "eos", "unk", "pad"):
        token = tokenizer_config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        token = str(added.get(name, token))
        candidates = [ids[token]] if token in ids else _listed(config.get(f"{name}_token_id"))
        if candidates:
            special[name] = candidates[0]
    for i in _listed(generation.get("eos_token_id", config.get("eos_token_id"))):  # all of them end a text
        names = [name for name in ("eos", "eot", "eom") if name not in special]
        if names and i not in special.values():
            special[names[0]] = i
    keys = {"unk": "unknown", "pad": "padding"}
    return {
        **{f"tokenizer.ggml.{keys.get(name, name)}_token_id": i for name, i in special.items()},
        "tokenizer.ggml.add_bos_token": "bos" in added,
        "tokenizer.ggml.add_eos_token": "eos" in added,
    }


def _listed(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and i >= 0]


def _around(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Tokens that are added before a text, "bos", and after it, "eos"."""
    added: dict[str, str] = {}
    for step in _steps(tokenizer.get("post_processor"), "processors"):
        if step["type"] == "ByteLevel":
            continue
        if step["type"] != "TemplateProcessing":
            raise OptionError(
                f"its post_processor is {step['type']!r:.40}; known: ByteLevel, TemplateProcessing"
            )
        name = "bos"
        for piece in step["single"]:
            if "Sequence" in piece:
                name = "eos"
            elif name in added:
                raise OptionError(
                    "its post_processor adds several tokens at an end of a text; one is written"
                )
            else:
                added[name] = piece["SpecialToken"]["id"]
    return added


def _chat_template(op: str, folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    path = folder / "chat_template.jinja"
    if template is None and path.exists():
        with opened(op, path) as file:
            template = file.read(_MOST_BYTES).decode(errors="replace")
    return template if isinstance(template, str) else None
