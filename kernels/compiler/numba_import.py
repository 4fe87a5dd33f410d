"""Import of Numba, complete and once, where no interrupt reaches it.

If two threads import it at once, or an interrupt stops the import halfway, it stays broken for the rest of the
process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

from gpu_ops.errors import DeviceError, OptionError
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted

_DISABLED = (
    "NUMBA_DISABLE_JIT is set, or disable_jit in .numba_config.yaml, which turns Numba's compiler off; unset it and "
    "start Python again, or run on the NumPy reference: device='cpu', backend='reference'"
)
_FILE = ".numba_config.yaml"  # Numba reads it from the working directory as it is imported
_lock = threading.Lock()
_imported = threading.Event()


def import_numba() -> None:
    if not _imported.is_set():
        _import()


@uninterrupted
def _import() -> None:
    with _lock:
        _check_threads()
        import numba.core.ir
        import numba.core.registry  # the targets too
        import numba.np.arrayobj  # kernels import it too
        import numpy.ma  # noqa: F401  # what the first call of a kernel imports

        if why := numba_disabled():
            raise DeviceError(f"kernels cannot be compiled: {why}")
        name_files_without_a_folder(numba.core.ir.Loc)
        _imported.set()


def numba_disabled() -> str | None:
    """Reason why Numba compiles nothing in this process; None if it compiles."""
    if "numba.core.config" not in sys.modules and Path(_FILE).exists():
        with contextlib.suppress(DeviceError):  # the compiler is off, as its configuration then shows
            import_numba()
    config = sys.modules.get("numba.core.config")
    if config is None:
        with contextlib.suppress(ValueError):  # Numba ignores a word
            if int(os.environ.get("NUMBA_DISABLE_JIT", "0")):
                return _DISABLED
    return _DISABLED if getattr(config, "DISABLE_JIT", False) else None


def name_files_without_a_folder(location: Any) -> None:
    """Let a compiler's source locations keep the full file name where the working directory was deleted.

    ``location`` is the class ``Loc`` of Numba or numba-cuda. It names files relative to the working directory, in
    messages that inference makes and drops, and raises FileNotFoundError without one.
    """
    relative = location._get_path

    def path(self: Any) -> str:
        try:
            return str(relative(self))
        except OSError:
            return str(self.filename)

    location._get_path = path


def _check_threads() -> None:
    """Check NUMBA_NUM_THREADS. Numba ignores a word, and reports 0 in a message that does not name the variable."""
    value = os.environ.get("NUMBA_NUM_THREADS", "1")
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise OptionError(
            f"NUMBA_NUM_THREADS={value!r} is not a number of threads; expected 1 or more, or unset it"
        )
