"""Command ``gpu-ops memory``: the memory of a model, and the cards with room for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from gpu_ops.cli.parser import SHORT_DTYPES
from gpu_ops.cli.terminal import make_console, print_json, print_table, waiting
from gpu_ops.core.checks import FLOAT_DTYPES, one_of
from gpu_ops.core.dispatch import unavailable
from gpu_ops.errors import DeviceError, DTypeError, GpuOpsError, OptionError
from gpu_ops.kernels.compiler.progress import several
from gpu_ops.kernels.compiler.toolkit import install_command
from gpu_ops.memory import Estimate, Weights, estimate, estimate_inference
from gpu_ops.models import POLICIES, LlamaConfig
from gpu_ops.models import PRESETS as MODELS
from gpu_ops.models.config import PROJECTIONS
from gpu_ops.models.presets import find_config
from gpu_ops.ops.attention.options import QUANTIZED
from gpu_ops.presets import PRESETS, DevicePreset, select_preset

__all__ = ["Question", "run"]

_WHO = "memory"
_MOST_DIGITS = 18
_LARGEST = max((p for p in PRESETS.values() if not p.generic), key=lambda p: p.memory_gb).name
_TERMS = ("weights", "adapters", "gradients", "optimizer", "KV cache", "activations", "workspaces")


@dataclass(frozen=True)
class Question:
    """Arguments of the command, most of them as text."""

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
    moment_bits: int = 32

    def weights(self) -> Weights:
        """Form of the weights."""
        if self.projections is not None and self.rank is None:
            raise OptionError(f"{_WHO}: projections are those with adapters; pass --rank, or omit them")
        rank = None if self.rank is None else _count("rank", self.rank)
        names = PROJECTIONS if self.projections is None else tuple(self.projections.split(","))
        return Weights(self.format, self.pack_tables, rank, names)

    def dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Dtypes of the weights and of the KV cache."""
        dtype = _dtype("dtype", self.dtype, FLOAT_DTYPES)
        if self.kv_dtype is None:
            return dtype, dtype
        if self.train:
            raise OptionError(f"{_WHO}: kv-dtype is of inference; omit it, or train")
        return dtype, _dtype("kv-dtype", self.kv_dtype, FLOAT_DTYPES | QUANTIZED)


def _dtype(name: str, value: str, known: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    return known[one_of(_WHO, name, SHORT_DTYPES.get(value, value), (*known, *SHORT_DTYPES))]


def run(options: argparse.Namespace) -> int:
    """Print the terms, cheaper ways to train, and the cards; return 1 if no card has room."""
    question = Question(**{f.name: getattr(options, f.name) for f in fields(Question)})
    console = make_console()
    if not question.model:
        raise OptionError(f"{_WHO}: pass --model: a folder, a config.json, or one of {', '.join(MODELS)}")
    config = find_config(_WHO, question.model)
    names = [p.name for p in PRESETS.values() if not p.generic]
    cards = [select_preset(question.card)] if question.card else [PRESETS[name] for name in names]
    can_plan = unavailable("emulator", "raw") is None
    plan = _planner(question, config)
    home = (cards[0].name if question.card else _LARGEST) if can_plan else "cpu"
    try:
        estimate = plan(home, question)
    except (DeviceError, DTypeError):  # no kernels for cards
        if question.card:
            raise
        home = "cpu"
        estimate = plan(home, question)
    with waiting(console, f"planning for {several(len(cards), 'card')}", options.json):
        terms, others = _terms(estimate), _cheaper(question, plan, home)
        rows = [_card(card, partial(plan, card.name if can_plan else "cpu", question)) for card in cards]
    room = any(row.get("fits", False) for row in rows)
    if options.json:
        sizes = {"model": question.model, "device": home, "terms": terms, "peak": estimate.peak}
        print_json({**sizes, "other_ways": others, "cards": rows})
        return 0 if room else 1
    task = f"training step, policy {question.policy}" if question.train else "inference"
    form = ", ".join(filter(None, (str(question.dtypes()[0]), str(question.weights()))))
    batch = f"batch {question.batch} x {question.seqlen} tokens"
    console.print(f"{question.model}, {task}: {form}, {batch}", style="bold", markup=False, highlight=False)
    usual = {name: getattr(Question, name) for name in ("dtype", "batch", "seqlen")}
    defaults = [f"--{name} {value}" for name, value in usual.items() if getattr(question, name) == value]
    by_default = f"; by default {', '.join(defaults)}" if defaults else ""
    console.print(f"planned for {home}; 1 GiB = 1.07 GB{by_default}", style="dim", highlight=False)
    print_table(console, _of_terms(terms))
    if others:
        units = _units(max(others.values()))
        table = Table("other ways to train", *units, box=None)
        for name, peak in others.items():
            table.add_row(name, *_sizes(peak, units))
        print_table(console, _right(table))
    if len(rows) > 1:
        kernels = "its own" if can_plan else "the CPU's"
        text = f"each card with the same terms, and the workspaces of {kernels} kernels:"
        console.print(text, style="dim", highlight=False)
    print_table(console, _of_cards(rows))
    if not can_plan:
        console.print(
            f"{install_command('emulator')} plans with a card's workspaces",
            markup=False,
        )
    return 0 if room else 1


def _planner(question: Question, config: LlamaConfig) -> Callable[[str, Question], Estimate]:
    """Function that estimates for a device and a form of the question, whose sizes are checked here."""
    batch, seqlen = _count("batch", question.batch), _count("seqlen", question.seqlen)
    dtype, kv_dtype = question.dtypes()

    def plan(device: str, form: Question) -> Estimate:
        sizes: dict[str, Any] = {"batch": batch, "seqlen": seqlen, "dtype": dtype, "weights": form.weights()}
        if form.train:
            return estimate(config, **sizes, policy=form.policy, moment_bits=form.moment_bits, device=device)
        return estimate_inference(config, **sizes, cache_dtype=kv_dtype, device=device)

    return plan


def _cheaper(question: Question, plan: Callable[[str, Question], Estimate], device: str) -> dict[str, int]:
    """Peaks of cheaper ways to train than a step of all weights."""
    if not question.train or question.rank is not None:
        return {}
    ways = {
        f"policy {policy}": replace(question, policy=policy)
        for policy in POLICIES
        if policy != question.policy
    }
    ways["LoRA of rank 16, policy layer"] = replace(question, rank="16", policy="layer")
    ways["the same on nf4"] = replace(question, rank="16", policy="layer", format="nf4")
    ways["the same, moments in 8 bits"] = replace(ways["the same on nf4"], moment_bits=8)
    peaks = {}
    for name, form in ways.items():
        try:
            peaks[name] = plan(device, form).peak
        except GpuOpsError:  # rows that no block of nf4 divides
            continue
    return peaks


def _of_terms(terms: dict[str, int]) -> Table:
    total = sum(terms.values())
    units = _units(total)
    table = Table("term", "bytes", *units, "share", box=None)
    for name, n in terms.items():
        table.add_row(name, f"{n:,}", *_sizes(n, units), f"{n / total:.1%}")
    table.add_row("peak", f"{total:,}", *_sizes(total, units), "", style="bold")
    return _right(table)


def _card(card: DevicePreset, plan: Callable[[], Estimate]) -> dict[str, Any]:
    """Entries of a card: its memory, and what the model takes of it or why it cannot run it."""
    memory = int(card.memory_gb * 1e9)
    entries: dict[str, Any] = {"card": card.name, "bytes": memory}
    try:
        takes = plan().peak
    except (DeviceError, DTypeError) as error:
        return {**entries, "problem": str(error)}
    return {**entries, "takes": takes, "fits": takes <= memory}


def _of_cards(rows: list[dict[str, Any]]) -> Table:
    table = Table("card", "GB", "takes GB", "fits", box=None)
    for row in rows:
        memory = f"{row['bytes'] / 1e9:g}"
        if "problem" in row:
            table.add_row(escape(row["card"]), memory, "", f"[yellow]no[/]: {escape(row['problem'])}")
            continue
        rest = f"{abs(row['bytes'] - row['takes']) / 1e9:.2f} GB"
        answer = f"[green]yes[/], {rest} left" if row["fits"] else f"[red]no[/], {rest} short"
        table.add_row(escape(row["card"]), memory, f"{row['takes'] / 1e9:.2f}", answer)
    table.columns[1].justify = table.columns[2].justify = "right"
    return table


def _right(table: Table) -> Table:
    """Align all columns but the first to the right."""
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _units(largest: int) -> dict[str, float]:
    """Bytes of the units in which a table shows sizes up to ``largest``."""
    return {"GiB": 2**30, "GB": 1e9} if largest >= 2**30 else {"MiB": 2**20, "MB": 1e6}


def _sizes(nbytes: int, units: dict[str, float]) -> list[str]:
    """Text of a size in each unit.

    >>> _sizes(3 << 30, _units(3 << 30))
    ['3.00', '3.22']
    """
    return [f"{nbytes / unit:.2f}" for unit in units.values()]


def _terms(plan: Estimate) -> dict[str, int]:
    """Bytes by term, with workspaces separate from the activations."""
    parts = {**plan.parts, "workspaces": plan.workspaces}
    parts["activations"] -= plan.workspaces
    return {name: parts[name] for name in _TERMS if name in parts}


def _count(name: str, text: str) -> int:
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdecimal() and digits):
        raise OptionError(f"{_WHO}: --{name} must be a whole number of at least 1, got {text!r}")
    if len(digits) > _MOST_DIGITS:  # also more than Python can read
        raise OptionError(f"{_WHO}: --{name} has {len(digits)} digits, more than any memory holds")
    return int(digits)
