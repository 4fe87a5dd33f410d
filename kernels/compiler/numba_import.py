"""Imports Numba completely, once, where no interrupt reaches it.

If two threads import it at once, or an interrupt stops the import halfway, it stays broken for the rest of the
process.
"""

from __future__ import annotations

import os
import threading

from gpu_ops.errors import OptionError
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted

_lock = threading.Lock()
_imported = threading.Event()


def import_numba() -> None:
    if not _imported.is_set():
        _import()


@uninterrupted
def _import() -> None:
    with _lock:
        _check_threads()
        import numba.core.registry  # the targets too
        import numba.np.arrayobj  # noqa: F401  # what kernels import beside it
        import numpy.ma  # noqa: F401  # what the first call of a kernel imports

        _imported.set()


def _check_threads() -> None:
    """Numba takes no notice of a word, and of 0 only in a message that does not name the variable."""
    given = os.environ.get("NUMBA_NUM_THREADS", "1")
    try:
        count = int(given)
    except ValueError:
        count = 0
    if count < 1:
        raise OptionError(
            f"NUMBA_NUM_THREADS={given!r} is not a number of threads; expected 1 or more, or unset it"
        )
