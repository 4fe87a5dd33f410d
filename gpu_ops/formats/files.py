"""Reading of regular files only, and atomic replacement of files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FileError, FormatError, GpuOpsError, MissingFileError, OptionError

__all__ = [
    "check_regular",
    "files_in",
    "opened",
    "path_of",
    "read_part",
    "remove_temporary",
    "sync_folder",
    "system_errors",
    "write_file",
]

_TEMPORARY = ".gpu_ops-"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_POINTER = 1024  # bytes, by the specification of git LFS


def path_of(op: str, path: Any) -> Path:
    """Check a path: one that the system can look up."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise OptionError(f"{op}: path must be a str or a pathlib.Path, got {type(path).__name__} {path!r}")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise OptionError(f"{op}: path {text!r} is no path: it {'holds a NUL' if text else 'is empty'}")
    try:
        os.fsencode(text)
    except UnicodeError as error:
        raise OptionError(f"{op}: path {text!r} cannot be encoded for the file system: {error}") from error
    return Path(text)


def read_object(op: str, path: Path, limit: int, error: type[GpuOpsError], hint: str = "") -> dict[str, Any]:
    """Read the JSON object in a file, of which up to ``limit`` bytes are read; ``error`` if there is none."""
    with opened(op, path) as file:
        text = file.read(limit)
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{op}: {path} is no JSON: {cause}") from cause
    if not isinstance(contents, dict):
        raise error(f"{op}: {path} holds no JSON object{hint}")
    return contents


def files_in(op: str, path: Path, pattern: str) -> list[Path]:
    """Files of this pattern in the folder ``path``, sorted by name, or ``path`` itself if it is not a folder."""
    with system_errors(op, path):
        return sorted(path.glob(pattern)) if stat.S_ISDIR(path.stat().st_mode) else [path]


@contextlib.contextmanager
def opened(op: str, path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. FileError for anything else, without blocking on a pipe. FormatError for a
    pointer that git LFS leaves in place of a file that it has not fetched."""
    with system_errors(op, path):
        check_regular(op, path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may have become a pipe
        with os.fdopen(descriptor, "rb") as file:
            _check_fetched(op, path, descriptor)
            yield file


def read_part(what: str, file: BinaryIO, start: int, size: int) -> Array:
    """Read ``size`` bytes from ``start`` on into a new array; FormatError if the file ends before."""
    missing = start + size - os.fstat(file.fileno()).st_size
    if missing <= 0:
        part = np.empty(size, np.uint8)
        file.seek(start)
        missing = size - file.readinto(part.data)  # type: ignore[attr-defined]  # a buffered reader has it
    if missing > 0:
        raise FormatError(f"{what}: the file ends {missing} bytes before the tensor does")
    return part


def write_file(op: str, path: Path, parts: Iterable[Any], *, head: Callable[[], bytes] | None = None) -> None:
    """Write ``parts``, bytes or uint8 vectors, to a temporary file in the folder of ``path``, then rename it.

    The old file is unchanged until the rename, which follows when the bytes are on the disk. After an error no
    temporary file is left. If ``path`` is a link, the file it points to is replaced. Permissions are kept. Errors
    raised by ``parts`` are passed on. ``head``: called after the last part; its bytes replace the first ones of the
    file.
    """
    with system_errors(op, path):
        target = Path(os.path.realpath(path))
        mode = _permissions(op, path, target)
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with system_errors(op, path):
            descriptor = os.open(temporary, flags, 0o666)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in parts:
                with system_errors(op, path):
                    _write(file, part)
            first = head() if head else b""
            with system_errors(op, path):
                file.seek(0)
                _write(file, first)
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        with system_errors(op, path):
            temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # the file is in place; some file systems cannot sync a folder
        sync_folder(target.parent)


def remove_temporary(folder: Path) -> None:
    """Remove temporary files of killed writers. No other process may write to the folder at the same time."""
    for path in folder.glob(f"{_TEMPORARY}*.tmp"):
        path.unlink(missing_ok=True)


def check_regular(op: str, path: Path, status: os.stat_result) -> None:
    """Refuse folders, pipes, sockets and devices."""
    descriptions = {
        stat.S_IFDIR: (errno.EISDIR, "it is a folder"),
        stat.S_IFIFO: (errno.EINVAL, "it is a pipe"),
        stat.S_IFSOCK: (errno.EINVAL, "it is a socket"),
    }
    if not stat.S_ISREG(status.st_mode):
        code, description = descriptions.get(stat.S_IFMT(status.st_mode), (errno.EINVAL, "it is a device"))
        raise FileError(code, f"{op}: {description}; expected a regular file", str(path))


def _check_fetched(op: str, path: Path, descriptor: int) -> None:
    head = os.pread(descriptor, _MOST_POINTER, 0)
    if head.startswith(_POINTER) and os.fstat(descriptor).st_size < _MOST_POINTER:
        size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        length = f", which has {int(size[1])} bytes" if size else ""
        raise FormatError(
            f"{op}: {path} is a pointer of git LFS, not the file{length}: run 'git lfs pull' in its folder, or "
            "download the file"
        )


def _permissions(op: str, path: Path, target: Path) -> int | None:
    """Permissions of the file to be replaced, which must be writable; None if there is none."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    check_regular(op, path, status)
    if not status.st_mode & 0o222 or not os.access(target, os.W_OK):  # access() allows root everything
        raise FileError(
            errno.EACCES, f"{op}: it is read-only; chmod u+w it, or choose another path", str(path)
        )
    return stat.S_IMODE(status.st_mode)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, part: Any) -> None:
    while len(part):
        part = part[file.write(part) :]


@contextlib.contextmanager
def system_errors(op: str, path: Path) -> Iterator[None]:
    """Convert the system's errors to FileError, with the caller's path."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        error_type = MissingFileError if isinstance(error, FileNotFoundError) else FileError
        code = error.errno or errno.EIO
        raise error_type(code, f"{op}: {error.strerror or error}", str(path)) from error
