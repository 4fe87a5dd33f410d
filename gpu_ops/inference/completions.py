"""Requests for text in the form of OpenAI's API, and their answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from gpu_ops.errors import GpuOpsError
from gpu_ops.inference.requests import Sampling, Token
from gpu_ops.inference.text import TextStream
from gpu_ops.inference.text_model import TextModel

__all__ = ["Answer", "Completion", "RequestError", "completion_of"]

_MOST_TEXTS = 128  # of a request
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_FIELDS = {*_SAMPLING, "model", "max_tokens", "n", "seed", "stop", "stream", "stream_options", "logprobs"}
_TEXT_FIELDS = {*_FIELDS, "prompt", "echo"}
_CHAT_FIELDS = {*_FIELDS, "messages", "max_completion_tokens"}
_IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
# Fields that would change the text, by the values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
}
_MOST_SEED = 2**63


class RequestError(Exception):
    """Refusal of a request: the message, the status, and the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def entries(self) -> dict[str, Any]:
        """Entries of the answer's ``error``."""
        blame = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return {"message": str(self), "type": blame, "param": self.param, "code": self.code}


@dataclass(frozen=True)
class Completion:
    """A checked request."""

    prompts: list[list[int]]
    sampling: Sampling
    limit: int | None
    """New tokens of a text; None: as many as there is room for."""
    longest: int
    """Tokens of a prompt and its text."""
    stop: list[str]
    is_chat: bool
    count: int = 1
    """Texts per prompt."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    echoed: list[str] = field(default_factory=list)
    """Prompts as text, before the texts; empty without ``echo``."""

    def texts(self) -> Iterator[tuple[list[int], Sampling]]:
        """Prompt and sampling options of each text."""
        for ids in self.prompts:
            for i in range(self.count):
                yield ids, replace(self.sampling, seed=(self.sampling.seed + i) % _MOST_SEED)

    def limit_of(self, ids: list[int]) -> int:
        """New tokens of the text of a prompt."""
        return self.longest - len(ids) if self.limit is None else self.limit


def completion_of(body: Any, model: TextModel, longest: int, *, chat: bool) -> Completion:
    """Check the body of a request. Raises RequestError; null means that a field is left out."""
    if not isinstance(body, dict):
        raise RequestError("the body must be an object")
    known = _CHAT_FIELDS if chat else _TEXT_FIELDS
    values = {name: value for name, value in body.items() if value is not None}
    for name, value in values.items():
        if name in known or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"unknown field {name!r:.80}", param=str(name)[:80], code="unknown_parameter")
        if value not in _NEUTRAL[name]:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    get = _Reader(values)
    if (name := get("model", str, model.name)) != model.name:
        raise RequestError(
            f"the model {name!r:.80} is not served here; {model.name!r} is",
            status=HTTPStatus.NOT_FOUND,
            param="model",
            code="model_not_found",
        )
    prompts = [_messages(get, model)] if chat else _prompts(get, model)
    limit = get("max_completion_tokens" if "max_completion_tokens" in values else "max_tokens", int, None)
    limit = limit if chat or limit is not None else 16
    if limit is not None and limit < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    for ids in prompts:
        if len(ids) + (limit or 1) > longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and asks for {limit or 1} more; there is room for {longest}",
                param="messages" if chat else "prompt",
                code="context_length_exceeded",
            )
    stop = get("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(word, str) for word in stop):
        raise RequestError("stop must be a text or a list of texts", param="stop")
    count = get("n", int, 1)
    if not 1 <= count <= _MOST_TEXTS // len(prompts):
        raise RequestError(f"n times the prompts must be 1 to {_MOST_TEXTS}", param="n")
    options = get("stream_options", dict, {})
    if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
        raise RequestError(f"unknown stream_options {min(unknown)!r:.80}", param="stream_options")
    logprobs = get("logprobs", bool if chat else int, None)
    if not chat and logprobs:
        raise RequestError(
            "logprobs may be 0, for those of the text's own tokens; other tokens' are not kept",
            param="logprobs",
        )
    echo = not chat and get("echo", bool, False)
    if echo and logprobs is not None:
        raise RequestError("echo with logprobs is not supported: those of prompts are not kept", param="echo")
    return Completion(
        prompts,
        _sampling(get, values),
        limit,
        longest,
        stop,
        chat,
        count,
        get("stream", bool, False),
        options.get("include_usage") is True,
        logprobs is not None and (logprobs is True or not chat),
        [model.decode(ids) for ids in prompts] if echo else [],
    )


class _Reader:
    """Fields of a request, whose types are checked as they are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __call__(self, name: str, types: Any, default: Any) -> Any:
        value = self._values.get(name, default)
        expected = types if isinstance(types, tuple) else (types,)
        if value is default or (
            isinstance(value, types) and (bool in expected or not isinstance(value, bool))
        ):
            return value
        words = {
            str: "a text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            list: "a list",
            dict: "an object",
        }
        allowed = " or ".join(words[cls] for cls in expected if cls is not int or float not in expected)
        raise RequestError(f"{name} must be {allowed}", param=name, code="invalid_type")


def _sampling(get: Callable[..., Any], values: Mapping[str, Any]) -> Sampling:
    seed = get("seed", int, secrets.randbits(63)) % _MOST_SEED
    options = {name: get(name, (int, float), 0) for name in _SAMPLING if name in values}
    try:
        return Sampling(**{"temperature": 1.0, **options, "seed": seed})
    except GpuOpsError as error:
        param = next((name for name in options if name in str(error)), None)
        raise RequestError(str(error).removeprefix("Sampling: "), param=param) from error


def _prompts(get: Callable[..., Any], model: TextModel) -> list[list[int]]:
    prompt = get("prompt", (str, list), None)
    if prompt is None:
        raise RequestError("there is no prompt", param="prompt", code="missing_required_parameter")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    listed = prompt if several else [prompt]
    if not 1 <= len(listed) <= _MOST_TEXTS:
        raise RequestError(f"there may be 1 to {_MOST_TEXTS} prompts", param="prompt")
    return [_prompt(model, text) for text in listed]


def _prompt(model: TextModel, prompt: Any) -> list[int]:
    vocab = model.config.vocab
    if isinstance(prompt, str):
        text = prompt
        prompt = _encoded(lambda: model.encode(text), "prompt")
    elif not isinstance(prompt, list) or not all(type(i) is int and 0 <= i < vocab for i in prompt):
        raise RequestError(
            f"prompt must be a text, token ids from 0 to {vocab - 1}, or a list of these", param="prompt"
        )
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    ids: list[int] = prompt
    return ids


def _messages(get: Callable[..., Any], model: TextModel) -> list[int]:
    messages = get("messages", list, None)
    if not messages:
        raise RequestError("there are no messages", param="messages", code="missing_required_parameter")
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} must be an object with a role", param=where)
        content = message.get("content", "")
        if isinstance(content, list):
            parts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            where = f"{where}.content"
            raise RequestError(f"{where} must be a text, or parts of type text", param=where)
        plain.append({"role": message["role"], "content": content})
    return _encoded(lambda: model.encode_messages(plain), "messages")


def _encoded(encode: Callable[[], list[int]], param: str) -> list[int]:
    try:
        return encode()
    except (GpuOpsError, ValueError) as error:  # a text with half of a pair of surrogates
        raise RequestError(f"{param}: {error}", param=param) from error


@dataclass
class _Choice:
    """Text of an answer."""

    stream: TextStream
    text: str
    finish_reason: str | None = None
    tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Answer:
    """Answer to a request, token by token: an event for each if it is streamed, and as a whole."""

    def __init__(self, request: Completion, model: TextModel) -> None:
        self._request, self._model = request, model
        self._id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        prompts = [(i, ids) for i, ids in enumerate(request.prompts) for _ in range(request.count)]
        self.choices = [
            _Choice(
                TextStream(model.tokenizer, request.stop, ids), request.echoed[i] if request.echoed else ""
            )
            for i, ids in prompts
        ]

    def add(self, i: int, token: Token) -> dict[str, Any]:
        """Add a token to text ``i``; return the event of its stream.

        Raises
        ------
        GpuOpsError
            The logits of the text are not finite.
        """
        choice, is_first = self.choices[i], not self.choices[i].tokens
        if token.finished == "error":
            raise GpuOpsError("the model's logits are not finite")
        choice.tokens += 1
        piece = "" if token.finished == "stop" else choice.stream.add(token.token)
        piece += choice.stream.finish() if token.finished else ""
        choice.finish_reason = "stop" if choice.stream.stopped else token.finished or None
        logprobs = []
        if self._request.logprobs and token.finished != "stop":
            logprobs = [{"token": self._model.decode([token.token]), "logprob": token.logprob}]
        start = len(choice.text)
        shown = choice.text + piece if is_first else piece  # with the prompt, if it is echoed
        choice.text += piece
        choice.logprobs += [{**entry, "offset": start} for entry in logprobs]
        entries = self._entries(
            i, choice.logprobs[-len(logprobs) :] if logprobs else [], choice.finish_reason
        )
        if self._request.is_chat:
            entries["delta"] = {**({"role": "assistant"} if is_first else {}), "content": shown}
        else:
            entries["text"] = shown
        return self._object([entries], ".chunk")

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""
        choices = []
        for i, choice in enumerate(self.choices):
            entries = self._entries(i, choice.logprobs, choice.finish_reason)
            if self._request.is_chat:
                entries["message"] = {"role": "assistant", "content": choice.text}
            else:
                entries["text"] = choice.text
            choices.append(entries)
        return self._object(choices, "") | {"usage": self._usage()}

    def usage_event(self) -> dict[str, Any]:
        """Return the last event of a stream with ``include_usage``."""
        return self._object([], ".chunk") | {"usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt, drawn = sum(map(len, self._request.prompts)), sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def _object(self, choices: list[dict[str, Any]], ending: str) -> dict[str, Any]:
        name = f"chat.completion{ending}" if self._request.is_chat else "text_completion"
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _entries(self, i: int, logprobs: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        shown: dict[str, Any] | None = None
        if self._request.logprobs and self._request.is_chat:
            shown = {"content": [self._chat_logprob(entry) for entry in logprobs], "refusal": None}
        elif self._request.logprobs:
            shown = {
                "tokens": [entry["token"] for entry in logprobs],
                "token_logprobs": [entry["logprob"] for entry in logprobs],
                "top_logprobs": None,
                "text_offset": [entry["offset"] for entry in logprobs],
            }
        return {"index": i, "logprobs": shown, "finish_reason": finish_reason}

    @staticmethod
    def _chat_logprob(entry: dict[str, Any]) -> dict[str, Any]:
        data = list(entry["token"].encode(errors="replace"))
        return {"token": entry["token"], "logprob": entry["logprob"], "bytes": data, "top_logprobs": []}
