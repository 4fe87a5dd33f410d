"""Continuous batching: requests come and go while one forward pass after another runs for all of them.

Each pass has room for ``max_tokens`` tokens. Running requests come first, with the next part of their prompt or their
last token; then waiting ones are admitted, in order. Where pages run out, the youngest request gives its pages back
and waits at the front; its full pages are often still there when it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.errors import OptionError, OutOfPages
from gpu_ops.inference.captured import Graphs
from gpu_ops.inference.forward import cache_for, check_model, longest, next_logits
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.requests import Request, Sampling, Token
from gpu_ops.inference.step import Step
from gpu_ops.kernels.compiler.progress import visible
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.weights import Llama
from gpu_ops.ops.sample import sample
from gpu_ops.training.state_arrays import StateArray, to_device

__all__ = ["Engine", "generate"]

_DTYPES = {"top_k": np.int32, "seed": np.int64}  # of options in arrays; the others are float32


class Engine:
    """Runs requests over one model and one cache.

    Parameters
    ----------
    weights, config : Llama, LlamaConfig
    cache : PagedKVCache
        Its sequences are the engine's while requests run.
    max_tokens : int
        Of one forward pass. Longer prompts are read in parts.
    max_requests : int
        That run at a time; the others wait.
    max_seqlen : int, optional
        Of a prompt and its new tokens; default: what fits in the cache, or 2^20 with a window. ``dynamic`` and
        ``longrope`` scalings take their frequencies from it, so engines on one cache need the same.
    capture : bool
        On CUDA, launch passes of single tokens as CUDA graphs: one for each power of two of sequences, and of pages
        of the longest. They hold the addresses of the weights. A warning says so where that cannot be done.

    Examples
    --------
    >>> from gpu_ops import inference, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> engine = inference.Engine(weights, config, inference.cache_for(weights, config, num_pages=16))
    >>> request = engine.submit([1, 2, 3], max_new_tokens=4)
    >>> [token.finished for token in engine.run()]
    ['', '', '', 'length']
    """

    def __init__(
        self,
        weights: Llama,
        config: LlamaConfig,
        cache: PagedKVCache,
        *,
        max_tokens: int = 512,
        max_requests: int = 64,
        max_seqlen: int | None = None,
        capture: bool = True,
    ) -> None:
        check_model(weights, config, cache)
        self.weights, self.config, self.cache = weights, config, cache
        given = longest(cache) if max_seqlen is None else max_seqlen
        self.max_seqlen = checks.integer("Engine", "max_seqlen", given, low=1)
        self.max_tokens = checks.integer("Engine", "max_tokens", max_tokens, low=1)
        self.max_requests = checks.integer("Engine", "max_requests", max_requests, low=1)
        captures = checks.flag("Engine", "capture", capture) and cache.device == "cuda"
        self._graphs = Graphs(weights, config, cache, self.max_seqlen) if captures else None
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._submitted = 0
        self._sampled_by: tuple[list[int], dict[str, Any]] | None = None

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
    ) -> int:
        """Queue a prompt of token ids; the number of the request.

        Raises
        ------
        OptionError
            The prompt is empty or has ids outside the vocabulary, or prompt and new tokens need more pages than the
            cache has in all.
        """
        ids = _token_ids("prompt", prompt)
        if not ids.size:
            raise OptionError(
                "Engine.submit: prompt is empty; begin with the model's token for the start of a text"
            )
        ends = _token_ids("stop", stop)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise OptionError(f"Engine.submit: sampling is {type(sampling).__name__}, not inference.Sampling")
        outside = np.flatnonzero((ids < 0) | (ids >= self.config.vocab))
        if outside.size:
            i = int(outside[0])
            raise OptionError(f"Engine.submit: prompt[{i}] is {ids[i]}, not in [0, {self.config.vocab})")
        most = checks.integer("Engine.submit", "max_new_tokens", max_new_tokens, low=1)
        pages = -(-(len(ids) + most - 1) // self.cache.page_size)  # the last token is not read again
        if len(ids) + most > self.max_seqlen + 1:
            raise OptionError(
                f"Engine.submit: {len(ids)} tokens and {most} new ones are more than max_seqlen={self.max_seqlen}"
            )
        if self.cache.window < 0 and pages > self.cache.num_pages:
            raise OptionError(
                f"Engine.submit: {len(ids)} tokens and {most} new ones need {pages} pages of "
                f"{self.cache.page_size}, and the cache has {self.cache.num_pages}"
            )
        request = Request(
            self._submitted, ids.tolist(), len(ids), most, frozenset(ends.tolist()), sampling or Sampling()
        )
        if request.sampling.counts_tokens:
            request.counts = np.bincount(ids, minlength=self.config.vocab).astype(np.int32)
        self._submitted += 1
        self._waiting.append(request)
        return request.number

    def cancel(self, request: int) -> None:
        """Forget a request that runs or waits, and give its pages back."""
        for one in (*self._running, *self._waiting):
            if one.number == request:
                (self._running if one.handle >= 0 else self._waiting).remove(one)
                self._release(one)
                return
        raise OptionError(f"Engine.cancel: request {request} neither runs nor waits")

    def clear(self) -> None:
        """Forget all requests, and give their pages back."""
        for one in (*self._running, *self._waiting):
            self._release(one)
        self._running.clear()
        self._waiting.clear()

    def run(self) -> Iterator[Token]:
        """The tokens of all requests as they come, until none is left; more may be submitted meanwhile.

        A pass gives a token to each of several requests. To stop in between, call :meth:`step` instead: a loop that
        is left loses the other tokens of its pass.
        """
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[Token]:
        """One forward pass: a token for each request whose prompt has been read."""
        batch, step = self._reserve()
        if step is None:
            return []
        try:
            logits = self._logits(step, len(batch))
            ready = [i for i, r in enumerate(batch) if self.cache.length(r.handle) == len(r.tokens)]
            tokens, logprobs = self._draw(logits, batch) if ready else ((), ())
        except BaseException:
            self.cache.rollback()  # the next pass runs the same tokens
            raise
        self.cache.commit()
        return [self._accept(batch[i], int(tokens[i]), float(logprobs[i])) for i in ready]

    def _logits(self, step: Step, count: int) -> Any:
        if self._graphs is not None:
            return self._graphs.logits(step, count)
        return next_logits(self.weights, self.config, self.cache, step, max_seqlen=self.max_seqlen)

    # ---- what a pass runs ------------------------------------------------------------------------------------------

    def _reserve(self) -> tuple[list[Request], Any]:
        """The requests of the next pass, with their pages; preempts where these run out."""
        admits, most = True, self.max_tokens
        while True:
            parts, room = {}, most
            for r in self._running:
                part = r.tokens[self.cache.length(r.handle) :][:room]
                room -= len(part)
                if part:
                    parts[r.handle] = part
            while admits and room and self._waiting and len(self._running) < self.max_requests:
                r = self._waiting.popleft()
                r.handle = self.cache.add(r.tokens)
                self._running.append(r)
                parts[r.handle] = r.tokens[self.cache.length(r.handle) :][:room]
                room -= len(parts[r.handle])
            if not parts:
                return [], None
            try:
                out = None if self._graphs is None else self._graphs.step_for(parts)
                step = self.cache.reserve(parts, out=out)
            except OutOfPages:
                if len(self._running) == 1:
                    # a window frees pages as it moves
                    most = min(most, len(parts[self._running[0].handle])) // 2
                    if not most:
                        raise
                    continue
                youngest = self._running.pop()
                self._release(youngest)
                self._waiting.appendleft(youngest)
                admits = False
            else:
                return [r for r in self._running if r.handle in parts], step

    def _release(self, request: Request) -> None:
        if request.handle >= 0:
            self.cache.free(request.handle)
            request.handle = -1

    def _draw(self, logits: Any, batch: Sequence[Request]) -> tuple[Any, Any]:
        """A token and its log-probability for each row."""
        penalised = any(r.sampling.counts_tokens for r in batch)
        options = self._options(batch, penalised)
        options["step"] = self._array([len(r.tokens) - r.prompt for r in batch], np.int64)
        if penalised:
            none = np.zeros(self.config.vocab, np.int32)
            counts = [none if r.counts is None else r.counts for r in batch]
            options["counts"] = self._array(np.stack(counts), np.int32)
        tokens, logprobs = sample(logits, **options, return_logprob=True)
        on_host = [StateArray("sample", "a result", x).copied() for x in (tokens, logprobs)]
        return on_host[0], on_host[1]

    def _options(self, batch: Sequence[Request], penalised: bool) -> dict[str, Any]:
        """What the requests of a pass sample by: arrays that are kept for the next pass of the same requests."""
        numbers = [r.number for r in batch]
        if self._sampled_by is None or self._sampled_by[0] != numbers:
            options = {
                f.name: self._array(
                    [getattr(r.sampling, f.name) for r in batch], _DTYPES.get(f.name, np.float32)
                )
                for f in fields(Sampling)
                if penalised or not f.name.endswith("_penalty")
            }
            self._sampled_by = numbers, options
        return dict(self._sampled_by[1])

    def _array(self, values: Any, dtype: Any) -> Any:
        return to_device(np.asarray(values, dtype), self.cache.device)

    def _accept(self, request: Request, token: int, logprob: float) -> Token:
        if token < 0:
            finished = "error"
        else:
            request.tokens.append(token)
            if request.counts is not None:
                request.counts[token] += 1
            full = len(request.tokens) - request.prompt == request.most
            finished = "stop" if token in request.stop else "length" if full else ""
        if finished:
            self._running.remove(request)
            self._release(request)
        return Token(request.number, token, logprob, finished)


def _token_ids(name: str, values: Any) -> Any:
    try:
        ids = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise OptionError(f"Engine.submit: {name} must be a sequence of token ids: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise OptionError(f"Engine.submit: {name} must be a sequence of token ids")
    return ids.astype(np.int64)


def generate(
    weights: Llama,
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[int] = (),
    cache: PagedKVCache | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt. For streaming, and for requests that come one by one: :class:`Engine`.

    Parameters
    ----------
    weights, config : Llama, LlamaConfig
    prompts : sequences of token ids
    max_new_tokens : int
        Of each prompt.
    sampling : Sampling, or one for each prompt
        Default: greedy.
    stop : token ids
        That end a text, such as the tokenizer's end of sequence. The stop token is not returned.
    cache : PagedKVCache, optional
        Default: one that holds all prompts at full length, on the device of the weights.

    Examples
    --------
    >>> from gpu_ops import inference, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> [len(tokens) for tokens in inference.generate(weights, config, [[1, 2], [3]], max_new_tokens=5)]
    [5, 5]
    """
    if not hasattr(prompts, "__iter__") or not all(hasattr(prompt, "__len__") for prompt in prompts):
        raise OptionError("generate: prompts must be a sequence of sequences of token ids")
    checks.integer("generate", "max_new_tokens", max_new_tokens, low=1)
    each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
    if len(each) != len(prompts):
        raise OptionError(f"generate: {len(each)} samplings for {len(prompts)} prompts")
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    if cache is None:
        cache = cache_for(weights, config, lengths=lengths)
    engine = Engine(weights, config, cache, max_seqlen=max(lengths, default=1))
    texts: list[list[int]] = [[] for _ in prompts]
    try:
        for prompt, one in zip(prompts, each, strict=True):
            engine.submit(prompt, max_new_tokens=max_new_tokens, sampling=one, stop=stop)
        with visible(f"gpu_ops: generating {len(prompts)} texts"):
            for token in engine.run():
                if token.finished == "error":
                    place = f"after prompt {token.request} and {len(texts[token.request])} tokens"
                    raise OptionError(f"generate: the logits {place} are not finite")
                if token.finished != "stop":
                    texts[token.request].append(token.token)
    finally:
        engine.clear()
    return texts
