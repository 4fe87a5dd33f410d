"""Command ``python -m gpu_ops memory``: the memory of a model, and the cards with room for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu_ops.cli.terminal import print_table, waiting
from gpu_ops.core.checks import FLOAT_DTYPES, one_of
from gpu_ops.core.dispatch import unavailable
from gpu_ops.errors import DeviceError, DTypeError, OptionError
from gpu_ops.kernels.compiler.toolkit import install_command
from gpu_ops.memory import Estimate, Weights, estimate, estimate_inference
from gpu_ops.models import PRESETS as MODELS
from gpu_ops.models.config import PROJECTIONS
from gpu_ops.models.presets import find_config
from gpu_ops.ops.attention.options import QUANTIZED
from gpu_ops.presets import PRESETS, DevicePreset, select_preset

__all__ = ["Question", "show_memory"]

_WHO = "memory"
_MOST_DIGITS = 18
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_TERMS = ("weights", "adapters", "gradients", "optimizer", "KV cache", "activations", "workspaces")


@dataclass(frozen=True)
class Question:
    """Arguments of the command, as text."""

    model: str | None
    batch: str = "1"
    seqlen: str = "4096"
    dtype: str = "bf16"
    kv_dtype: str | None = None
    train: bool = False
    policy: str = "none"
    card: str | None = None
    format: str | None = None
    pack_tables: bool = False
    rank: str | None = None
    projections: str | None = None

    def weights(self) -> Weights:
        """Form of the weights."""
        if self.projections is not None and self.rank is None:
            raise OptionError(f"{_WHO}: projections are those with adapters; pass --rank, or omit them")
        rank = None if self.rank is None else _count("rank", self.rank)
        names = PROJECTIONS if self.projections is None else tuple(self.projections.split(","))
        return Weights(self.format, self.pack_tables, rank, names)


def _dtype(name: str, value: str, known: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    return known[one_of(_WHO, name, _SHORT.get(value, value), (*known, *_SHORT))]


def show_memory(asked: Question, console: Console) -> int:
    """Print the terms and the cards; return 1 if no card has room. Invalid arguments raise typed errors."""
    if not asked.model:
        raise OptionError(f"{_WHO}: pass --model: a folder, a config.json, or one of {', '.join(MODELS)}")
    config = find_config(_WHO, asked.model)
    batch, seqlen = _count("batch", asked.batch), _count("seqlen", asked.seqlen)
    names = [p.name for p in PRESETS.values() if not p.generic]
    cards = [select_preset(asked.card)] if asked.card else [PRESETS[name] for name in names]
    dtype = _dtype("dtype", asked.dtype, FLOAT_DTYPES)
    kv_dtype = dtype
    if asked.kv_dtype is not None:
        kv_dtype = _dtype("kv-dtype", asked.kv_dtype, FLOAT_DTYPES | QUANTIZED)
        if asked.train:
            raise OptionError(f"{_WHO}: kv-dtype is of inference; omit it, or train")

    weights = asked.weights()
    sizes: dict[str, Any] = {"batch": batch, "seqlen": seqlen, "dtype": dtype, "weights": weights}

    def plan(device: str) -> Estimate:
        if asked.train:
            return estimate(config, **sizes, policy=asked.policy, device=device)
        return estimate_inference(config, **sizes, cache_dtype=kv_dtype, device=device)

    planned = unavailable("emulator", "raw") is None
    home = cards[0].name if asked.card and planned else "cpu"
    terms = _terms(plan(home))
    task = f"training step, policy {asked.policy}" if asked.train else "inference"
    form = ", ".join(filter(None, (str(dtype), str(weights))))
    title = f"{asked.model}, {task}: {form}, batch {batch} x {seqlen} tokens, planned for {home}"
    console.print(title, style="bold", markup=False, highlight=False)
    print_table(console, _of_terms(terms))
    with waiting(console, f"planning for {len(cards)} {'card' if len(cards) == 1 else 'cards'}"):
        table, room = _of_cards(cards, plan if planned else lambda _: plan("cpu"))
    print_table(console, table)
    if not planned:
        console.print(
            f"planned with the CPU's workspaces; {install_command('emulator')} plans with a card's",
            markup=False,
        )
    return 0 if room else 1


def _of_terms(terms: dict[str, int]) -> Table:
    table = Table("term", "bytes", "", "share", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    total = sum(terms.values())
    for name, n in terms.items():
        table.add_row(name, f"{n:,}", _size(n), f"{n / total:.1%}")
    table.add_row("peak", f"{total:,}", _size(total), "", style="bold")
    return table


def _of_cards(cards: list[DevicePreset], plan: Callable[[str], Estimate]) -> tuple[Table, bool]:
    """Table of the cards, and whether one of them has room."""
    table, room = Table("card", "memory", "takes", "fits", box=None), False
    for card in cards:
        memory = int(card.memory_gb * 1e9)
        try:
            takes = plan(card.name).peak
        except (DeviceError, DTypeError) as error:
            table.add_row(
                escape(card.name), f"{card.memory_gb:g} GB", "", f"[yellow]no[/]: {escape(str(error))}"
            )
            continue
        fits, rest = takes <= memory, _size(abs(memory - takes))
        room = room or fits
        said = f"[green]yes[/], {rest} left" if fits else f"[red]no[/], {rest} short"
        table.add_row(escape(card.name), f"{card.memory_gb:g} GB", _size(takes), said)
    return table, room


def _terms(found: Estimate) -> dict[str, int]:
    """Bytes by term, with workspaces separate from the activations."""
    parts = {**found.parts, "workspaces": found.workspaces}
    parts["activations"] -= found.workspaces
    return {name: parts[name] for name in _TERMS if name in parts}


def _count(name: str, text: str) -> int:
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdecimal() and digits):
        raise OptionError(f"{_WHO}: --{name} must be a whole number of at least 1, got {text!r}")
    if len(digits) > _MOST_DIGITS:  # also more than Python can read
        raise OptionError(f"{_WHO}: --{name} has {len(digits)} digits, more than any memory holds")
    return int(digits)


def _size(nbytes: int) -> str:
    """
    >>> _size(3 << 30), _size(5 << 20)
    ('3.00 GiB', '5.0 MiB')
    """
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
