"""Chat templates of models: Jinja sources that turn messages into the text of a prompt."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpu_ops.errors import FormatError, MissingPackageError, OptionError
from gpu_ops.formats.files import opened, path_of, system_errors
from gpu_ops.models.config_hf import read_config

__all__ = ["ChatTemplate", "read_template", "template_in"]

_MOST_BYTES = 1 << 20  # of a template
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """Template of a model, as Hugging Face transformers renders it.

    Parameters
    ----------
    source : str
        Jinja source, rendered in a sandbox: model files are not trusted.
    tokens : mapping
        Texts of ``bos_token``, ``eos_token`` and the like.

    Raises
    ------
    MissingPackageError
        The package jinja2 is not installed.
    FormatError
        The source is no template.

    Examples
    --------
    >>> from gpu_ops.inference.chat import ChatTemplate
    >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    >>> ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
    '<user>Hi<assistant>'
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingPackageError(
                f"a chat template takes the package jinja2: pip install jinja2 ({error})"
            ) from error
        self._error, self._tokens = TemplateError, dict(tokens)
        jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        jinja.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        jinja.globals["raise_exception"] = refuse
        jinja.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = jinja.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise FormatError(f"the model's chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that asks for the assistant's next message.

        Raises
        ------
        OptionError
            The template refuses the messages, for example two of one role in a row.
        """
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, **self._tokens))
        except (self._error, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise OptionError(f"the model's chat template refuses the messages: {error}") from error


def read_template(path: Any) -> str:
    """Jinja source in a file. Raises FileError."""
    with opened("chat", path_of("chat", path)) as file:
        return str(file.read(_MOST_BYTES).decode(errors="replace"))


def template_in(folder: Path, file: Any = None) -> ChatTemplate | None:
    """Template of a model's folder, or of ``file``, with the folder's special tokens.

    In a folder it is in ``chat_template.jinja`` or ``tokenizer_config.json``; None if it has none.
    """
    path, entries = folder / "chat_template.jinja", {}
    with system_errors("chat", folder):
        has_file, has_entries = path.exists(), (folder / "tokenizer_config.json").exists()
    if has_entries:
        entries = dict(read_config("chat", folder / "tokenizer_config.json"))
    source: Any = entries.get("chat_template")
    if has_file or file is not None:
        source = read_template(path if file is None else file)
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    tokens = {name: entries.get(name) for name in _TOKENS}
    texts = {n: token.get("content") if isinstance(token, dict) else token for n, token in tokens.items()}
    return ChatTemplate(source, {name: text for name, text in texts.items() if isinstance(text, str)})
