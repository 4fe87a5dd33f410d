"""End of this process's program, and the status with which it ends."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["call_at_exit"]


def call_at_exit(leave: Callable[[int | None], object]) -> None:
    """Call ``leave`` when the program ends, once or twice, with the status passed to sys.exit, exit or quit.

    The status is None if the program ends in another way, including by another SystemExit. After a failure (a
    non-zero status) the call comes before Python joins threads, which may never end. Otherwise it comes after that,
    as threads may still make calls.
    """
    status: int | None = None

    def end(code: object) -> None:
        nonlocal status
        status = code & 0xFF if isinstance(code, int) else int(code is not None)
        if status:
            with contextlib.suppress(AttributeError):  # private, but present since Python 3.9
                threading._register_atexit(leave, status)  # type: ignore[attr-defined]

    class ProgramExit(SystemExit):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            # a handler in the program has a frame; the interpreter, which reads the status to end with, has none
            if name == "code" and sys._getframe().f_back is None:
                end(value)
            return value

    def watched(stop: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(stop)
        def call(*arguments: Any, **options: Any) -> NoReturn:
            try:
                stop(*arguments, **options)
            except SystemExit as error:
                if type(error) is SystemExit:
                    raise ProgramExit(*error.args) from None
                raise

        return call

    # python -S has no exit and quit; the program itself may have imported sys.exit by name
    names = [(sys, "exit"), (builtins, "exit"), (builtins, "quit")]
    calls = [getattr(module, name) for module, name in names if hasattr(module, name)]
    for stop in calls:
        replacement = watched(stop)
        for module in (sys, builtins, sys.modules["__main__"]):
            for name in [name for name, value in vars(module).items() if value is stop]:
                setattr(module, name, replacement)
    atexit.register(lambda: leave(status))
