"""Default device, backend and card of calls: environment variables, unless a context sets others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

__all__ = ["DEFAULTS", "default", "use_defaults"]

DEFAULTS: ContextVar[Mapping[str, str] | None] = ContextVar("gpu_ops_defaults", default=None)
"""Values that take the place of environment variables in this context, by their names."""


def default(variable: str) -> str | None:
    """The value of ``GPU_OPS_DEVICE``, ``GPU_OPS_BACKEND`` or ``GPU_OPS_ARCH`` for calls in this context."""
    values = DEFAULTS.get()
    return os.environ.get(variable) if values is None else values.get(variable, os.environ.get(variable))


@contextlib.contextmanager
def use_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Calls in this context, and in no other thread, take these values instead of the variables'."""
    token = DEFAULTS.set({**(DEFAULTS.get() or {}), **values})
    try:
        yield
    finally:
        DEFAULTS.reset(token)
