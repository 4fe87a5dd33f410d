"""Measured choices: results of ``gpu_ops.autotune``, kept between processes and looked up by launches.

An op that can run a problem in several ways describes them in a :class:`Space`, and its lowering calls
:func:`choose`. The answer is the fastest way measured for such a problem on this card with these kernels. Where
nothing was measured, or the measured way is not possible, it is the choice of the op's own model. A measured choice
is a JSON file in the folder ``tuning`` of the cache, read once per process; delete it to forget it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_ops.kernels.compiler.cache import TUNING, cache_folder, read_file, write_whole
from gpu_ops.kernels.compiler.jit import source_key
from gpu_ops.kernels.compiler.progress import warn
from gpu_ops.kernels.program import Builder

__all__ = ["Space", "TuningChoice", "choose", "forget", "keep"]


@dataclass(frozen=True, eq=False)
class Space:
    """Ways to run the problems of one kernel."""

    name: str
    sources: tuple[str, ...]
    """Its ``kernels/<stem>.cu``: measurements with other sources are ignored."""
    bucket: Callable[[Any], str]
    """Problems with equal bucket texts share a measured choice."""
    model: Callable[[Any, Any], Any]
    """Maps (problem, limits of the device) to the choice when nothing was measured."""
    candidates: Callable[[Any, Any], Mapping[str, Any]]
    """Maps (problem, limits) to candidates by label; a label means the same for every problem of a bucket."""


@dataclass(frozen=True)
class TuningChoice:
    """A choice that the lowering of a call made."""

    space: Space
    problem: Any
    limits: Any
    card: str
    measured: str | None
    """Label of the measured choice; None: the model's choice was used."""

    @property
    def bucket(self) -> str:
        return self.space.bucket(self.problem)

    def candidates(self) -> Mapping[str, Any]:
        return self.space.candidates(self.problem, self.limits)

    def model(self) -> Any:
        return self.space.model(self.problem, self.limits)


_winners: dict[
    tuple[str, str, str], str | None
] = {}  # by (space, card, bucket): read from files, or measured


def choose(builder: Builder, space: Space, problem: Any, limits: Any) -> Any:
    """Choose how to run a problem: the candidate being measured, else a measured choice, else the model's choice.

    The choice is appended to ``builder.choices``.
    """
    config, measured = _choose(space, problem, limits, builder.card)
    builder.choices.append(TuningChoice(space, problem, limits, builder.card, measured))
    if builder.candidate is not None:
        return space.candidates(problem, limits)[builder.candidate]
    if measured is not None:
        builder.note(f"tuned: {measured}, the fastest that autotune() measured")
    return config


@functools.lru_cache(maxsize=4096)
def _choose(space: Space, problem: Any, limits: Any, card: str) -> tuple[Any, str | None]:
    if card:
        bucket = space.bucket(problem)
        key = (space.name, card, bucket)
        if key not in _winners:
            _winners[key] = _read(space, card, bucket)
        winner = _winners[key]
        if winner is not None:
            config = space.candidates(problem, limits).get(winner)
            # otherwise the kernel no longer has this candidate, or never had it for this problem
            if config is not None:
                return config, winner
    return space.model(problem, limits), None


def keep(choice: TuningChoice, winner: str, microseconds: Mapping[str, float]) -> Path | None:
    """Use ``winner`` from now on, and in later processes. Returns its file; None if no file can be written."""
    space, card, bucket = choice.space, choice.card, choice.bucket
    _winners[space.name, card, bucket] = winner
    _choose.cache_clear()
    folder = cache_folder(TUNING)
    if folder is None:  # the cache has warned
        return None
    entry = {**_identity(space, card, bucket), "winner": winner, "microseconds": dict(microseconds)}
    path = folder / _file_name(space, card, bucket)
    try:
        write_whole(path, json.dumps(entry, indent=1).encode())
    except OSError as error:
        warn(f"gpu_ops: the measured choice {path} is not kept: {error}", stacklevel=3)
        return None
    return path


def forget() -> None:
    """Drop the choices that this process has read and measured, so that files are read again."""
    _winners.clear()
    _choose.cache_clear()


def _read(space: Space, card: str, bucket: str) -> str | None:
    name = _file_name(space, card, bucket)
    content = read_file(TUNING, name)
    if content is None:
        return None
    try:
        entry = json.loads(content)
        identity = _identity(space, card, bucket)
        # Otherwise it was measured with other sources, or another compiler.
        return str(entry["winner"]) if identity.items() <= entry.items() else None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        warn(f"gpu_ops: ignoring the measured choice {name}: {error!r}", stacklevel=2)
        return None


def _identity(space: Space, card: str, bucket: str) -> dict[str, str]:
    return {"kernel": space.name, "card": card, "problems": bucket, "sources": source_key(*space.sources)}


def _file_name(space: Space, card: str, bucket: str) -> str:
    digest = hashlib.sha256(f"{card}\0{bucket}".encode()).hexdigest()[:16]
    return f"{space.name}-{digest}.json"
