"""Profiles of the kernels in emulator/profile.cu, and lookups in them."""

from __future__ import annotations

from pathlib import Path

from gpu_ops import emulator

SOURCE = (Path(__file__).parents[1] / "emulator" / "profile.cu").read_text(encoding="utf-8")


def profiled(name, grid, block, args, **options):
    return emulator.profile(SOURCE, name, grid, block, args, **options)


def line_of(text):
    """Number of the only line of SOURCE with this text."""
    (number,) = [n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line]
    return number


def buffer(profile, name):
    (match,) = [b for b in profile.buffers if b.name == name]
    return match


def named(x, y):
    return emulator.Buffer(x, "x"), emulator.Buffer(y, "y")


def only(profile, form):
    """Profile of the only instruction of this form."""
    (match,) = [i for i in profile.instructions if i.form.startswith(form)]
    return match
