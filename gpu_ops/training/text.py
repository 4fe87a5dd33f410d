"""Text available on every machine: the source of Python's standard library."""

from __future__ import annotations

import errno
import sys
import sysconfig
from pathlib import Path

from gpu_ops.errors import MissingFileError
from gpu_ops.formats.files import system_errors

__all__ = ["stdlib_text"]

# Tests, tables of character sets, and modules that distributions leave out or put into separate packages.
_LEFT_OUT = {
    "test",
    "encodings",
    "idlelib",
    "tkinter",
    "turtle",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "venv",
    "distutils",
}


def stdlib_text() -> bytes:
    """Return the source of the standard library, sorted by module: 8 MB, the same for each version of Python.

    Tests, ``encodings`` and modules that distributions leave out are excluded. Report ``sys.version`` with results.

    Raises
    ------
    FileError
        A file cannot be read; MissingFileError if Python was installed without its source.

    Examples
    --------
    >>> from gpu_ops.training import stdlib_text
    >>> b"def attention" in stdlib_text(), b"def dataclass" in stdlib_text()
    (False, True)
    """
    folder = Path(sysconfig.get_path("stdlib"))
    with system_errors("stdlib_text", folder):
        sources = [
            path.read_bytes()
            for name in sorted(sys.stdlib_module_names - _LEFT_OUT)
            for path in (folder / f"{name}.py", *sorted((folder / name).rglob("*.py")))
            if path.is_file() and not {"test", "tests"} & set(path.parts[len(folder.parts) :])
        ]
    if not sources:
        raise MissingFileError(errno.ENOENT, "stdlib_text: no source of the standard library", str(folder))
    return b"".join(sources)
