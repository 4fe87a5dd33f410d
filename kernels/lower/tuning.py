"""Measured choices: what ``gpu_ops.autotune`` found out, kept between processes, and looked up by a launch.

An op that can run a problem in several ways says so in a :class:`Space` and asks :func:`choose`. The answer is the
way that was measured to be the fastest for such a problem on this card with these kernels; where nothing was
measured, or what was measured is not possible, the op's own model. A measured choice is a file of JSON in the folder
``tuning`` of the cache. It is read once per process, when its first problem comes; delete it to forget it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_ops.kernels.compiler.cache import cache_folder, cache_path, write_whole
from gpu_ops.kernels.compiler.jit import source_key

__all__ = ["Asked", "Space", "Watch", "choose", "forget", "keep", "watched"]

_FOLDER = "tuning"


@dataclass(frozen=True, eq=False)
class Space:
    """The ways to run the problems of one kernel."""

    name: str
    sources: tuple[str, ...]
    """Its ``kernels/cuda/<stem>.cu``: what was measured with others does not count."""
    bucket: Callable[[Any], str]
    """Problems of one text share a measured choice."""
    model: Callable[[Any, Any], Any]
    """(problem, limits of the device) to the way that is taken when nothing was measured."""
    candidates: Callable[[Any, Any], Mapping[str, Any]]
    """(problem, limits) to the ways worth measuring, by a label that means the same for every problem of a bucket."""


@dataclass(frozen=True)
class Asked:
    """A choice that a call came to."""

    space: Space
    problem: Any
    limits: Any
    card: str
    measured: str | None
    """The label of the measured choice that was taken; None: the model's."""

    @property
    def bucket(self) -> str:
        return self.space.bucket(self.problem)

    def candidates(self) -> Mapping[str, Any]:
        return self.space.candidates(self.problem, self.limits)

    def model(self) -> Any:
        return self.space.model(self.problem, self.limits)


@dataclass
class Watch:
    """Hears what is asked, and answers with the candidate ``label`` if it has one."""

    label: str | None = None
    asked: list[Asked] = field(default_factory=list)


_watch: ContextVar[Watch | None] = ContextVar("gpu_ops.tuning", default=None)
_winners: dict[tuple[str, str, str], str | None] = {}  # by (space, card, bucket): what was read, or found


@contextlib.contextmanager
def watched(label: str | None = None) -> Iterator[Watch]:
    """The calls of this thread, while it is on, tell what they ask and take the candidate ``label``."""
    watch = Watch(label)
    token = _watch.set(watch)
    try:
        yield watch
    finally:
        _watch.reset(token)


def choose(space: Space, problem: Any, limits: Any, card: str) -> Any:
    """How to run a problem. ``card``: the device's name; empty where no measurement can apply."""
    config, measured = _choose(space, problem, limits, card)
    watch = _watch.get()
    if watch is not None:
        watch.asked.append(Asked(space, problem, limits, card, measured))
        if watch.label is not None:
            return space.candidates(problem, limits)[watch.label]
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
            if config is not None:  # else the kernel has lost this way, or never had it for this problem
                return config, winner
    return space.model(problem, limits), None


def keep(asked: Asked, winner: str, microseconds: Mapping[str, float]) -> Path | None:
    """Take ``winner`` from now on, and in later processes. Returns its file, None where none can be written."""
    space, card, bucket = asked.space, asked.card, asked.bucket
    _winners[space.name, card, bucket] = winner
    _choose.cache_clear()
    folder = cache_folder(_FOLDER)
    if folder is None:  # it has warned
        return None
    entry = {**_identity(space, card, bucket), "winner": winner, "microseconds": dict(microseconds)}
    path = folder / _file_name(space, card, bucket)
    try:
        write_whole(path, json.dumps(entry, indent=1).encode())
    except OSError as error:
        warnings.warn(f"gpu_ops: the measured choice {path} is not kept: {error}", stacklevel=3)
        return None
    return path


def forget() -> None:
    """Drop what this process has read and found, so that files are read again."""
    _winners.clear()
    _choose.cache_clear()


def _read(space: Space, card: str, bucket: str) -> str | None:
    path = cache_path(_FOLDER, _file_name(space, card, bucket))
    if path is None:
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        identity = _identity(space, card, bucket)
        # Otherwise it was measured with other sources, or another compiler.
        return str(entry["winner"]) if identity.items() <= entry.items() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        warnings.warn(f"gpu_ops: ignoring the measured choice {path}: {error!r}", stacklevel=2)
        return None


def _identity(space: Space, card: str, bucket: str) -> dict[str, str]:
    return {"kernel": space.name, "card": card, "problems": bucket, "sources": source_key(*space.sources)}


def _file_name(space: Space, card: str, bucket: str) -> str:
    digest = hashlib.sha256(f"{card}\0{bucket}".encode()).hexdigest()[:16]
    return f"{space.name}-{digest}.json"
