"""Last states of a run, as files of a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_ops.core.checks import integer
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import path_of, remove_temporary, system_errors
from gpu_ops.training.state import is_state, save_state

__all__ = ["MOST_STEP", "Checkpoints", "outdated", "step_name", "steps_in"]

MOST_STEP = 10**12 - 1


class Checkpoints:
    """Last states of a run, in a separate folder.

    Parameters
    ----------
    folder : path
        Created by the first save. Only one process at a time may save to it.
    keep : int
        Number of states to keep. A save needs space for one more.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops.training import Checkpoints, load_state
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(folder, keep=2)
    ...     for step in (10, 20, 30):
    ...         path = checkpoints.save(step, {"w": np.full(2, step)}, {"step": step})
    ...     checkpoints.steps(), load_state(checkpoints.latest())
    ([20, 30], ({'w': array([30, 30])}, {'step': 30}))
    """

    def __init__(self, folder: Any, *, keep: int = 2) -> None:
        self.folder = path_of("Checkpoints", folder)
        self.keep = integer("Checkpoints", "keep", keep, low=1)

    def save(self, step: int, arrays: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Path:
        """Call :func:`save_state` for this step, remove the oldest states, and return the file.

        A step before the last one is an error: a run that goes back must use another folder, or remove the later
        files first.
        """
        name = "Checkpoints.save"
        step = integer(name, "step", step, low=0, high=MOST_STEP)
        before = self.steps()
        if before and step < before[-1]:
            raise OptionError(
                f"{name}: step {step} comes before step {before[-1]}, which {self.folder} holds; "
                "remove the later files, or choose another folder"
            )
        with system_errors(name, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_temporary(self.folder)
        path = self.path(step)
        save_state(path, arrays, meta)
        with system_errors(name, self.folder):
            others = [s for s in before if s != step]
            for old in outdated(others, self.keep):
                self.path(old).unlink(missing_ok=True)
        return path

    def latest(self) -> Path | None:
        """Return the file of the last step, for :func:`load_state`; None before the first save."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def steps(self) -> list[int]:
        """Return the saved steps, in order, without damaged or truncated files."""
        return [step for step in steps_in("Checkpoints", self.folder, _ENDING) if is_state(self.path(step))]

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"{step_name(step)}{_ENDING}"


_ENDING = ".safetensors"


def step_name(step: int) -> str:
    """Name of a step's file or folder, without the suffix."""
    return f"step-{step:012d}"


def steps_in(op: str, folder: Path, ending: str = "") -> list[int]:
    """Steps of the names in a folder, in order; none if there is no such folder."""
    pattern = re.compile(r"step-([0-9]{12})" + re.escape(ending))
    with system_errors(op, folder):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


def outdated(steps: Sequence[int], keep: int) -> Sequence[int]:
    """Steps to remove when one more is saved and ``keep`` stay."""
    return steps[: max(len(steps) + 1 - keep, 0)]
