"""The cache folder. Files appear there whole or not at all, however many processes write at once.

An entry, a compiled kernel, is 32 bytes of SHA-256 followed by the payload. It is written to a temporary file and
renamed, so readers see the old file or the new one. A torn or foreign file fails its checksum and is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path

__all__ = [
    "cache_folder",
    "cache_path",
    "ignore_entry",
    "publish",
    "read_entry",
    "write_whole",
]

_DIGEST = 32
_warned: set[Path | None] = set()


def cache_folder(*parts: str, quiet: bool = False) -> Path | None:
    """A writable folder of the cache. If there is none: None, and one warning per process and folder."""
    try:
        return _writable(_root().joinpath(*parts))
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        if not quiet:
            _warn_unwritable(cache_path(*parts), error)
        return None


def cache_path(*parts: str) -> Path | None:
    """A path in the cache, for reading; it need not exist. None if there is no home folder."""
    try:
        return _root().joinpath(*parts)
    except RuntimeError:
        return None


def _root() -> Path:
    ours = os.environ.get("GPU_OPS_CACHE_DIR")
    if ours:
        return Path(ours)
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "gpu_ops"


@cache  # errors are not cached: the folder may become writable
def _writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _warn_unwritable(folder: Path | None, reason: Exception) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(
        f"gpu_ops: cannot write the kernel cache ({reason}); kernels missing from it are compiled again in every "
        "process. Set GPU_OPS_CACHE_DIR to a writable folder.",
        stacklevel=3,
    )


def read_entry(path: Path) -> bytes | None:
    """The payload of an entry. None if it is missing or, with a warning, if it cannot be trusted."""
    try:
        blob = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        ignore_entry(path, error)
        return None
    if hashlib.sha256(blob[_DIGEST:]).digest() != blob[:_DIGEST]:
        ignore_entry(path, "its checksum does not match")
        return None
    return blob[_DIGEST:]


def ignore_entry(path: Path, reason: object) -> None:
    """Warn that an entry is not used. The kernel is compiled again, and the entry replaced."""
    warnings.warn(f"gpu_ops: ignoring the cached kernel {path.name}: {reason}", stacklevel=3)


def publish(path: Path, payload: bytes) -> None:
    """Write an entry, all or nothing. On a full disk the entry is lost, but not the kernel in memory."""
    try:
        write_whole(path, hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        warnings.warn(f"gpu_ops: kernel {path.name} not cached: {error}", stacklevel=3)


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it: others see all of the content, or what was there before."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:64]}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:  # also when interrupted
        Path(temporary).unlink(missing_ok=True)
        raise
