"""Continuous batching: requests start and end while forward passes run for all of them.

Each pass has room for ``max_tokens`` tokens. Running requests come first, with the next part of their prompt or their
last token; then waiting ones are admitted, in order. If pages run out, the youngest request returns its pages and
waits at the front; its full pages are often still in the cache when it resumes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.errors import OptionError, OutOfPages
from gpu_ops.inference.captured import Graphs, Recordings
from gpu_ops.inference.forward import check_model, longest, next_logits
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.requests import Request, Sampler, SamplerRow, Sampling, Token
from gpu_ops.inference.sequences import token_ids
from gpu_ops.inference.step import MIN_TOKENS, Step
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.weights import Llama

__all__ = ["Draft", "Engine"]

Draft = Callable[[list[int]], Sequence[int]]


class Engine:
    """Engine that runs requests over one model and one cache.

    Parameters
    ----------
    weights, config : Llama, LlamaConfig
    cache : PagedKVCache
        Cache whose sequences belong to the engine while requests run. Prefixes are found if this ``weights`` object,
        with this config and an equal rotation, was the last one to admit a request. After an optimizer step or any
        other change of the weights in place, call :meth:`PagedKVCache.drop_prefixes`.
    max_tokens : int
        Tokens of one forward pass. Longer prompts are read in parts.
    max_requests : int
        Requests that run at a time; the others wait.
    max_seqlen : int, optional
        Length of a prompt and its new tokens; default: the capacity of the cache, or 2^20 with a window. ``dynamic``
        and ``longrope`` scalings take their frequencies from it: for models with these pass the longest text you
        serve, or texts change with the number of pages.
    draft : function, optional
        Function from the tokens of a text to guesses of the next ones, such as :func:`prompt_lookup`. A pass runs the
        guesses with the last token of the text, and keeps those that equal the tokens it draws: texts are the same as
        without, and need fewer passes the better the guesses are. In 16 bits a pass over more tokens may round
        differently, and tokens of about equal probability may swap.
    capture : bool
        On CUDA, launch passes of single tokens as CUDA graphs: one for each power of two of sequences, and of pages
        of the longest. A warning is issued if that is impossible. On the CPU, record passes of up to 8 single tokens
        and run them again without Python's share, 3 to 15 ms a pass, with the same bits. Both hold the arrays of the
        weights: change these in place, or make another engine.

    Attributes
    ----------
    drafted, accepted : int
        Numbers of guesses that passes have run, and kept.

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
        draft: Draft | None = None,
        capture: bool = True,
    ) -> None:
        check_model(weights, config, cache)
        self.weights, self.config, self.cache = weights, config, cache
        length = longest(cache) if max_seqlen is None else max_seqlen
        self.max_seqlen = checks.integer("Engine", "max_seqlen", length, low=1)
        scalings = [layer_config.scaling for layer_config in config.by_layer]
        lengths = [None if s is None else s.effective_seqlen(self.max_seqlen) for s in scalings]
        self._keys_by = config, lengths  # keys and values in the cache depend on these, and on the weights
        self.max_tokens = checks.integer("Engine", "max_tokens", max_tokens, low=1)
        self.max_requests = checks.integer("Engine", "max_requests", max_requests, low=1)
        self.draft, self.drafted, self.accepted = draft, 0, 0
        captures = {"cuda": Graphs, "cpu": Recordings} if checks.flag("Engine", "capture", capture) else {}
        graphs: Any = captures.get(cache.device)
        self._graphs = None if graphs is None else graphs(weights, config, cache, self.max_seqlen)
        self._draws = Sampler(cache.device)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._submitted = 0

    @property
    def unfinished(self) -> int:
        """Number of requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
    ) -> int:
        """Queue a prompt of token ids; return the number of the request.

        Raises
        ------
        OptionError
            The prompt is empty or has ids outside the vocabulary, or prompt and new tokens need more pages than the
            cache has in total.
        """
        ids = _token_ids("prompt", prompt)
        if not ids.size:
            raise OptionError(
                "Engine.submit: prompt is empty; begin with the model's token for the start of a text"
            )
        ends = _token_ids("stop", stop)
        outside = np.flatnonzero((ids < 0) | (ids >= self.config.vocab))
        if outside.size:
            i = int(outside[0])
            raise OptionError(f"Engine.submit: prompt[{i}] is {ids[i]}, not in [0, {self.config.vocab})")
        limit = checks.integer("Engine.submit", "max_new_tokens", max_new_tokens, low=1)
        if len(ids) + limit > self.max_seqlen + 1:
            raise OptionError(
                f"Engine.submit: {len(ids)} tokens and {limit} new ones are more than max_seqlen={self.max_seqlen}"
            )
        # the last token is not read again
        pages, total_pages = self.cache.most_pages(len(ids) + limit - 1), self.cache.stats.total
        if pages > total_pages:
            raise OptionError(
                f"Engine.submit: {len(ids)} tokens and {limit} new ones need {pages} pages of "
                f"{self.cache.page_size}, and the cache has {total_pages}"
            )
        request = Request(
            self._submitted, ids.tolist(), len(ids), limit, frozenset(ends.tolist()), sampling or Sampling()
        )
        request.prefix = hash(tuple(request.tokens[:MIN_TOKENS]))
        if request.sampling.counts_tokens:
            request.counts = np.zeros(self.config.vocab, np.int32)
            request.counts[ids] = -1
        self._submitted += 1
        self._waiting.append(request)
        return request.number

    def cancel(self, request: int) -> None:
        """Drop a request that runs or waits, and return its pages.

        With a draft, the pass that produced its last token may also have produced later ones, and have finished it.
        """
        for entry in (*self._running, *self._waiting):
            if entry.number == request:
                (self._running if entry.handle >= 0 else self._waiting).remove(entry)
                self._release(entry)
                return
        raise OptionError(f"Engine.cancel: request {request} neither runs nor waits")

    def clear(self) -> None:
        """Drop all requests, and return their pages."""
        for entry in (*self._running, *self._waiting):
            self._release(entry)
        self._running.clear()
        self._waiting.clear()

    def run(self) -> Iterator[Token]:
        """Yield the tokens of all requests as they are drawn, until none is left; more may be submitted meanwhile.

        A pass draws tokens for several requests, and with a draft several for one. To stop in between, call
        :meth:`step` instead: leaving the loop loses the other tokens of the pass.
        """
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[Token]:
        """Run a forward pass; return a token for each request whose prompt has been read, and its correct guesses."""
        batch, guesses, step = self._reserve()
        if step is None:
            return []
        try:
            logits = self._logits(step, len(batch))
            drawn = self._draw(logits, batch, guesses)
        except BaseException:
            self.cache.rollback()  # the next pass runs the same tokens
            raise
        self.cache.accept({r.handle: range(len(results)) for r, results in drawn if r.handle in guesses})
        self.drafted += sum(map(len, guesses.values()))
        self.accepted += sum(len(results) - 1 for _, results in drawn)
        drawn.sort(key=lambda item: item[0].number)
        return [token for r, results in drawn for token in self._accept(r, results)]

    def _logits(self, step: Step, count: int) -> Any:
        if self._graphs is not None:
            return self._graphs.logits(step, count)
        return next_logits(self.weights, self.config, self.cache, step, max_seqlen=self.max_seqlen)

    # ---- a pass --------------------------------------------------------------------------------------------

    def _reserve(self) -> tuple[list[Request], dict[int, list[int]], Any]:
        """Reserve pages for the requests of the next pass, with guesses by handle; preempt if pages run out."""
        admits, guesses, max_room = True, self.draft is not None, self.max_tokens
        while True:
            parts, room = {}, max_room
            for r in self._running:
                part = r.tokens[self.cache.length(r.handle) :][:room]
                room -= len(part)
                if part:
                    parts[r.handle] = part
            while admits and room and self._waiting and len(self._running) < self.max_requests:
                r = self._waiting.popleft()
                self.cache._sequences.use_weights(self.weights, self._keys_by)
                r.handle = self.cache.add(r.tokens)
                self._running.append(r)
                parts[r.handle] = r.tokens[self.cache.length(r.handle) :][:room]
                room -= len(parts[r.handle])
            if not parts:
                return [], {}, None
            batch = sorted((r for r in self._running if r.handle in parts), key=lambda r: r.prefix)
            drafts = self._guesses(batch, parts, room) if guesses else {}
            tokens = {r.handle: parts[r.handle] + drafts.get(r.handle, []) for r in batch}
            parents = {handle: range(-1, len(draft)) for handle, draft in drafts.items()}
            try:
                if drafts or self._graphs is None:
                    return batch, drafts, self.cache.reserve(tokens, parents=parents)
                return batch, drafts, self.cache.reserve(tokens, out=self._graphs.step_for(tokens))
            except OutOfPages:
                if drafts:
                    guesses = False
                    continue
                if len(self._running) == 1:
                    # a window frees pages as it moves
                    max_room = min(max_room, len(parts[self._running[0].handle])) // 2
                    if not max_room:
                        raise
                    continue
                youngest = self._running.pop()
                self._release(youngest)
                self._waiting.appendleft(youngest)
                admits = False

    def _guesses(self, batch: list[Request], parts: dict[int, list[int]], room: int) -> dict[int, list[int]]:
        """Guesses by handle, at most ``room``, for requests that have only their last token in this pass."""
        drafts = {}
        for r in batch:
            limit = min(room, r.most - (len(r.tokens) - r.prompt) - 1)
            if limit > 0 and self.draft is not None and self.cache.length(r.handle) == len(r.tokens) - 1:
                draft = token_ids("Engine: draft", self.draft(r.tokens.copy()))[:limit]
                if draft and max(draft) >= self.config.vocab:
                    raise OptionError(f"Engine: draft guessed {max(draft)}, not in [0, {self.config.vocab})")
                if draft:
                    drafts[r.handle] = draft
                    room -= len(draft)
        return drafts

    def _release(self, request: Request) -> None:
        if request.handle >= 0:
            self.cache.free(request.handle)
            request.handle = -1

    def _draw(
        self, logits: Any, batch: list[Request], guesses: dict[int, list[int]]
    ) -> list[tuple[Request, list[tuple[int, float]]]]:
        """Draw tokens with log-probabilities for each ready request, up to the first that was not guessed."""
        rows: list[SamplerRow] = []
        for r in batch:
            rows.append(SamplerRow(r.sampling, len(r.tokens) - r.prompt, r.counts))
            for token in guesses.get(r.handle, ()):
                rows.append(rows[-1].after(token))
        ready = [self.cache.length(r.handle) >= len(r.tokens) for r in batch]
        if not any(ready):
            return []
        drawn = iter(zip(*(x.tolist() for x in self._draws(logits, rows)), strict=True))
        accepted = []
        for r, is_ready in zip(batch, ready, strict=True):
            guessed = guesses.get(r.handle, [])
            results = list(itertools.islice(drawn, len(guessed) + 1))
            right = next((i for i, token in enumerate(guessed) if results[i][0] != token), len(guessed))
            if is_ready:
                accepted.append((r, results[: right + 1]))
        return accepted

    def _accept(self, request: Request, drawn: list[tuple[int, float]]) -> list[Token]:
        """Append the tokens of a pass to a request, up to one that ends the text; return them."""
        results: list[Token] = []
        for token, logprob in drawn:
            if token < 0:
                finished = "error"
            else:
                request.tokens.append(token)
                if request.counts is not None:
                    request.counts[token] = max(request.counts[token], 0) + 1
                full = len(request.tokens) - request.prompt == request.most
                finished = "stop" if token in request.stop else "length" if full else ""
            results.append(Token(request.number, token, logprob, finished))
            if finished:
                self._running.remove(request)
                self._release(request)
                break
        return results


def _token_ids(name: str, values: Any) -> Any:
    try:
        ids = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise OptionError(f"Engine.submit: {name} must be a sequence of token ids: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise OptionError(f"Engine.submit: {name} must be a sequence of token ids")
    return ids.astype(np.int64)
