"""Pictures of saved runs, and pictures that need no run: ``python -m perf.pictures``.

==============  =================================================================================
``speed``       the first case of each kind of every op against other libraries; ``speed_<dtype>``: all cases
``memory``      peak of a call beyond its inputs and results
``attention_``  rate and memory against sequence length, where several lengths were measured
``roofline``    operations per second against operations per byte, under the measured limits
``error_``      largest error against float64, compared with textbook code
``bounds``      rooflines of every card, from data sheets
``kernel_``     cost by source line, counted by the emulator
==============  =================================================================================

Matplotlib (the ``plot`` extra) is imported when a picture is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpu_ops.errors import KernelCompileError
from perf.pictures import bounds, error, kernel, lengths, roofline, speed
from perf.pictures.data import Machine, machines
from perf.pictures.style import Canvas, settings


def draw_all(runs: Iterable[Path], folder: Path, *, general: bool = False) -> Iterator[Path]:
    """Draw every machine's runs into ``folder``/its name. ``general``: also the pictures that need no run."""
    by_folder = machines(runs)
    if general:
        yield from draw_general(by_folder.values(), folder)
    for name, machine in by_folder.items():
        yield from draw(machine, folder / name)


def draw_general(found: Iterable[Machine], folder: Path) -> list[Path]:
    """Pictures of no particular machine. The bounds show the cases of a GPU if there is one."""
    widest = max(found, key=lambda machine: (machine.on_gpu, len(machine.rows())), default=None)
    with settings():
        done = [bounds.draw(widest).save(folder / "bounds.svg")] if widest else []
        try:
            done.append(kernel.draw(kernel.profile()).save(folder / "kernel_attention.svg"))
        except KernelCompileError as missing:
            print(f"kernel_attention.svg stays as it is: {str(missing).splitlines()[0]}", file=sys.stderr)
    return done


def draw(machine: Machine, folder: Path) -> list[Path]:
    """All pictures of one machine."""
    modules = (speed, lengths, roofline, error)
    with settings():
        made = [picture for module in modules for picture in module.pictures(machine)]
        return [canvas.save(folder / f"{name}.svg") for name, canvas in made]


__all__ = ["Canvas", "Machine", "draw", "draw_all", "machines"]
