"""Speculative decoding: a small model drafts a tree of tokens, and the large one checks all of it in one pass.

    python scripts/examples/speculative.py                                  random weights
    python scripts/examples/speculative.py --model FOLDER --draft FOLDER    two models with one tokenizer

With greedy decoding the text is that of the large model alone; with sampling it has the same distribution. For drafts
without a second model see ``gpu_ops.inference.prompt_lookup``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_ops import inference, models

DRAFT_LAYERS = 1  # of 8, where weights are random


@dataclass
class Model:
    """Model with one text in its cache."""

    weights: models.Llama
    config: models.LlamaConfig
    room: int
    cache: inference.PagedKVCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = inference.cache_for(self.weights, self.config, lengths=[self.room])
        self.text = self.cache.add()

    def run(self, tokens: list[int], parents: list[int]) -> Any:
        """Logits after each of these new tokens; call ``cache.accept`` or ``cache.rollback`` next."""
        step = self.cache.reserve({self.text: tokens}, parents={self.text: parents})
        return inference.next_logits(self.weights, self.config, self.cache, step)

    def read(self, tokens: list[int]) -> None:
        if tokens:
            self.run(tokens, list(range(-1, len(tokens) - 1)))
            self.cache.accept({self.text: range(len(tokens))})


def guess(
    draft: Model, text: list[int], sampling: inference.Sampling, widths: list[int], rng: np.random.Generator
) -> tuple[list[int], list[int], Any]:
    """Tree of the last token, ``widths[0]`` children of it, ... Returns tokens, parents and probabilities."""
    draft.read(text[draft.cache.length(draft.text) : -1])
    tokens, parents, level = [text[-1]], [-1], [0]
    drawn_by = dataclasses.replace(sampling, temperature=sampling.temperature or 1.0)
    probs = np.zeros((1, draft.config.vocab))
    for width in widths:
        logits = draft.run(tokens, parents)
        draft.cache.rollback()  # the next level runs with all levels above it
        probs = inference.probabilities(logits, drawn_by)
        level, above = [], level
        for node in above:
            # the largest of log(p) + Gumbel noise: equivalent to drawing one after the other without replacement
            with np.errstate(divide="ignore"):
                keys = np.log(probs[node]) + rng.gumbel(size=probs.shape[1]) * (sampling.temperature > 0)
            for token in np.argsort(-keys)[: min(width, np.count_nonzero(probs[node]))].tolist():
                level.append(len(tokens))
                tokens.append(token)
                parents.append(node)
    return tokens, parents, np.pad(probs, ((0, len(tokens) - len(probs)), (0, 0)))


def speculate(
    target: Model,
    draft: Model,
    prompt: list[int],
    count: int,
    sampling: inference.Sampling,
    widths: list[int],
) -> tuple[list[int], int]:
    """New tokens, and the number of passes of the large model that they took."""
    rng, text, passes = np.random.default_rng(sampling.seed), list(prompt), 0
    target.read(prompt[:-1])
    while (drawn := len(text) - len(prompt)) < count:
        tokens, parents, probs = guess(draft, text, sampling, widths, rng)
        logits = target.run(tokens, parents)
        path, token = inference.verify(
            logits, tokens, parents, sampling=sampling, step=drawn, draft_probs=probs
        )
        target.cache.accept({target.text: path})
        text += [*(tokens[node] for node in path[1:]), token]
        passes += 1
    return text[len(prompt) :][:count], passes


def load(o: argparse.Namespace) -> tuple[Any, Any]:
    if o.model:
        return models.load(o.model), models.load(o.draft or o.model)
    config = models.LlamaConfig(
        vocab=512, hidden=o.hidden, ffn=3 * o.hidden, nlayers=8, nheads=8, nheads_kv=4, head_dim=o.hidden // 8
    )
    arrays = models.initial_weights(config, seed=0, std=0.05)
    for name in arrays:  # the last layers change little in the output of the first ones, which are the draft
        if name.endswith((".o", ".down")) and int(name.split(".")[1]) >= DRAFT_LAYERS:
            arrays[name] = arrays[name] * np.float32(0.1)
    weights = models.Llama.of(arrays, config)
    small = dataclasses.replace(weights, layers=weights.layers[:DRAFT_LAYERS])
    return (weights, config), (small, dataclasses.replace(config, nlayers=DRAFT_LAYERS))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of the large model")
    parser.add_argument("--draft", help="folder of the small one")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="token ids")
    parser.add_argument("--count", type=int, default=64, help="new tokens")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[3, 2, 1], help="children of a node, by level"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--hidden", type=int, default=512, help="of the random model")
    o = parser.parse_args(argv)
    large, small = load(o)
    sampling = inference.Sampling(temperature=o.temperature, seed=1)
    nodes = int(np.cumprod([1, *o.widths]).sum())
    room = len(o.prompt) + o.count + nodes
    seconds = []
    for _ in range(2):  # the first time compiles
        start = time.perf_counter()
        plain = inference.generate(*large, [o.prompt], max_new_tokens=o.count, sampling=sampling)[0]
        middle = time.perf_counter()
        target, draft = Model(*large, room), Model(*small, room)
        tokens, passes = speculate(target, draft, o.prompt, o.count, sampling, o.widths)
        seconds = [middle - start, time.perf_counter() - middle]
    print(f"{o.count} tokens in {passes} passes over trees of {nodes} tokens, {seconds[1]:.2f} s")
    print(f"one by one: {seconds[0]:.2f} s")
    if o.temperature == 0 and tokens != plain:
        print("the texts differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
