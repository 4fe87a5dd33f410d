"""Cache folder: compiled kernels and measured choices, kept for later processes of this user, listed and cleared.

Its files become machine code of this process. So folders are made for their owner alone, and nothing is read
that another user (except root) owns or may write to, nor through a link within the cache. Without such a folder every
process compiles for itself, with a one-line warning.

A file appears whole or not at all, however many processes write at once: it is written under a temporary name and
renamed. An entry is parsed, not unpickled::

    MAGIC | SHA-256 of the rest | length of the header | header: JSON | parts, one after the other

    header: {"key": "numba_cpu/<build>/<label>.nbc", "fields": {...}, "parts": {"code": 63055, ...}}

The key is the entry's own path below the folder: an entry under another one's name is not used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gpu_ops.kernels.compiler.progress import warn
from gpu_ops.kernels.compiler.sources import CPU_FOLDER, sources_digest

__all__ = [
    "CPU",
    "CUDA",
    "TUNING",
    "Entry",
    "File",
    "alone",
    "cache_folder",
    "clear",
    "contents",
    "cpu_sources",
    "folder_problem",
    "ignore_entry",
    "publish",
    "read_entry",
    "read_file",
    "read_header",
    "root",
    "warn_once",
    "write_whole",
]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_MAGIC = b"gpu_ops entry 3\n"
_DIGEST, _LENGTH = 32, 4
_HEADER = len(_MAGIC) + _DIGEST + _LENGTH
_TEMPORARY, _OLD_SECONDS = ".tmp", 24 * 3600
_LONGEST_COMPILATION = 300.0  # seconds that others wait for a process, which may be stopped
_warned: set[object] = set()


@dataclass(frozen=True)
class Entry:
    """Stored data of one kernel: ``fields`` are values that JSON can hold, ``parts`` are bytes."""

    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, bytes] = field(default_factory=dict)


class UntrustedError(OSError):
    """A folder or file that another user may have written."""


def root() -> Path:
    """Return the cache folder. RuntimeError if there is no home folder."""
    ours = os.environ.get("GPU_OPS_CACHE_DIR")
    if ours:
        return Path(ours)
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "gpu_ops"


def cache_folder(*parts: str, quiet: bool = False) -> Path | None:
    """Return a writable folder of the cache, or None with one warning per process and cache."""
    problem = folder_problem(*parts)
    if problem is None:
        return root().joinpath(*parts)
    if not quiet:
        _warn_unusable(problem)
    return None


def folder_problem(*parts: str) -> str | None:
    """Reason why a folder of the cache cannot be written or must not be read, or None. Makes it if necessary."""
    try:
        top = root()
        _make(top)
        _check_folders(top, parts, make=True)
        _writable(top.joinpath(*parts))
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return str(error)
    return None


@cache  # errors are not cached: the folder may become writable
def _writable(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass
    _remove_leftovers(folder)


def _make(folder: Path) -> None:
    """Make a folder and its parents, each for its owner alone."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _check_folders(top: Path, parts: tuple[str, ...], *, make: bool = False) -> None:
    """Raise for a path from ``top`` on that is not a folder, or that another user may write to.

    ``top`` may be a link, since the user chose it; its target is checked.
    """
    _check_owner(top, top.stat())
    folder = top
    for part in parts:
        folder = folder / part
        if make:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
        _check_owner(folder, status)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are closed to others
        return
    if found.st_uid not in (os.geteuid(), 0):
        who = f"{path} belongs to user {found.st_uid}, this process to user {os.geteuid()}"
        raise UntrustedError(f"{who}: it is neither read nor written")
    if found.st_mode & 0o022:
        raise UntrustedError(
            f"other users may write to {path}: it is not read. Once you trust it: chmod go-w {path}"
        )


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that ended while they wrote."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f".*{_TEMPORARY}"):
            if path.lstat().st_mtime < time.time() - _OLD_SECONDS:
                path.unlink()


def read_file(*parts: str) -> bytes | None:
    """Read a file of the cache. None if it is missing or, with a warning, if it cannot be read or trusted."""
    try:
        top = root()
        _check_folders(top, parts[:-1])
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        return None
    except OSError as error:
        _warn_unusable(str(error))
        return None
    try:
        with _opened(top.joinpath(*parts)) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None
    except UntrustedError as error:
        warn_once("entry", f"gpu_ops: ignoring cached kernels: {error}")
    except OSError as error:
        ignore_entry(parts[-1], error)
    return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a regular file of ours for reading; follows no link, and waits for no pipe."""
    flags = (
        os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        _check_owner(path, status)
        yield file


def read_entry(*parts: str) -> Entry | None:
    """Read an entry. None if it is missing or, with a warning, if it is damaged or must not be trusted."""
    content = read_file(*parts)
    if content is None:
        return None
    try:
        return _unpack(content, "/".join(parts))
    except ValueError as error:
        ignore_entry(parts[-1], error)
        return None


def read_header(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Read the key and the fields of an entry, without checking its content; None for any other file."""
    try:
        with _opened(path) as file:
            start = file.read(_HEADER)
            if len(start) < _HEADER or not start.startswith(_MAGIC):
                return None
            header = json.loads(file.read(int.from_bytes(start[-_LENGTH:], "little")))
            return str(header["key"]), dict(header["fields"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


@contextlib.contextmanager
def alone(*parts: str, wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Let one process at a time compile a missing entry; the others then find it.

    Yields whether it has waited, and calls ``wait`` before it waits. Where the folder cannot be written or has no
    locks (some network drives), or after 300 s, processes go on in parallel.
    """
    folder = cache_folder(*parts[:-1], quiet=True)
    if fcntl is None or folder is None or (folder / parts[-1]).exists():
        yield False
        return
    path = folder / f".{parts[-1][:64]}-{hashlib.sha256(parts[-1].encode()).hexdigest()[:16]}{_TEMPORARY}"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        waited = not _locked(handle)
        if waited:
            wait()
            end = time.monotonic() + _LONGEST_COMPILATION
            while not _locked(handle) and time.monotonic() < end:
                time.sleep(0.02)
        yield waited
    finally:
        # a process that opened it before still compiles alone, or finds the entry
        path.unlink(missing_ok=True)
        os.close(handle)


def _locked(handle: int) -> bool:
    """Whether this process has the lock, or no lock is possible. A lock ends with its process."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True


def _pack(entry: Entry, key: str) -> bytes:
    sizes = {name: len(part) for name, part in entry.parts.items()}
    header = json.dumps({"key": key, "fields": entry.fields, "parts": sizes}).encode()
    rest = b"".join((len(header).to_bytes(_LENGTH, "little"), header, *entry.parts.values()))
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def _unpack(content: bytes, key: str) -> Entry:
    start = len(_MAGIC) + _DIGEST
    if not content.startswith(_MAGIC):
        raise ValueError("it is not an entry of this version")
    if hashlib.sha256(content[start:]).digest() != content[len(_MAGIC) : start]:
        raise ValueError("its checksum does not match")
    at = _HEADER + int.from_bytes(content[start:_HEADER], "little")
    try:
        header = json.loads(content[_HEADER:at])
        actual, fields, sizes = str(header["key"]), dict(header["fields"]), dict(header["parts"])
        parts = {}
        for name, size in sizes.items():
            parts[name] = content[at : at + size]
            at += size
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"its header is wrong: {error!r}") from error
    if at != len(content):
        raise ValueError("its header does not fit its size")
    if actual != key:
        raise ValueError(f"it is the entry {actual}")
    return Entry(fields, parts)


def ignore_entry(name: str, reason: object) -> None:
    """Warn that an entry is ignored. The kernel is compiled again, and the entry replaced."""
    warn(f"gpu_ops: ignoring the cached kernel {name}: {reason}", stacklevel=3)


def _warn_unusable(reason: str) -> None:
    try:
        key: object = root()
    except RuntimeError:
        key = None
    warn_once(
        key,
        f"gpu_ops: the kernel cache is not used ({reason}); kernels missing from it are compiled again in every "
        "process. Set GPU_OPS_CACHE_DIR to a writable folder of your own.",
    )


def warn_once(key: object, message: str) -> None:
    """Warn once per process and key."""
    if key not in _warned:
        _warned.add(key)
        warn(message, stacklevel=5)


def publish(entry: Entry, *parts: str) -> None:
    """Write an entry, all or nothing. On a full disk the entry is lost, but not the kernel in memory."""
    folder = cache_folder(*parts[:-1])
    if folder is None:
        return
    try:
        write_whole(folder / parts[-1], _pack(entry, "/".join(parts)))
    except OSError as error:
        warn(f"gpu_ops: kernel {parts[-1]} not cached: {error}", stacklevel=3)


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it: others see all of the new content, or the old.

    An existing link is replaced, not followed.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:64]}-", suffix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:  # also when interrupted
        Path(temporary).unlink(missing_ok=True)
        raise


CPU, CUDA, TUNING = "numba_cpu", "cuda", "tuning"  # folders of the cache


@dataclass(frozen=True)
class File:
    """A file of the cache. ``old``: made from sources that have changed since, or are gone."""

    path: Path
    kind: str
    nbytes: int
    old: bool


def contents() -> list[File]:
    """All files of the cache. Only call it if ``cache.folder_problem`` returns None."""
    return [*_cpu_files(root() / CPU), *_cuda_files(root() / CUDA), *_tuning_files(root() / TUNING)]


def clear(files: Iterable[File]) -> tuple[int, int]:
    """Remove files, and folders that become empty. Returns their number and bytes, without files already gone.

    Safe while other processes use the cache: they read whole files, and make folders that are missing.
    """
    count = nbytes = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            file.path.unlink()
            count, nbytes = count + 1, nbytes + file.nbytes
        with contextlib.suppress(OSError):  # not empty
            file.path.parent.rmdir()
    return count, nbytes


@cache
def cpu_sources() -> str:
    """:func:`sources_digest` of the CPU kernels, once per process: their folder's name up to the dash."""
    return sources_digest(CPU_FOLDER)


def _cpu_files(folder: Path) -> Iterator[File]:
    for build in _scan(folder, stat.S_ISDIR):
        old = build.name.partition("-")[0] != cpu_sources()
        for path, size in _scan(build, stat.S_ISREG).items():
            if path.suffix == ".nbc":
                category = "emulator" if path.name.startswith("emulator-") else "CPU kernels"
                yield File(path, category, size, old)
            elif path.name.startswith("."):
                yield File(path, "left over", size, True)


def _cuda_files(folder: Path) -> Iterator[File]:
    now: dict[str, str] = {}
    for path, size in _scan(folder, stat.S_ISREG).items():
        if path.suffix == ".jit":
            yield File(path, "GPU kernels", size, _is_old(path, now))
        elif path.name.startswith("."):
            yield File(path, "left over", size, True)


def _is_old(path: Path, now: dict[str, str]) -> bool:
    """Whether a file is old. ``now``: known digests of the sources, by origin."""
    header = read_header(path)
    if header is None:
        return True
    made_of = header[1].get("made_of", {})
    origin = str(made_of.get("origin", ""))
    if origin not in now:
        try:
            now[origin] = sources_digest(Path(origin))
        except OSError:
            now[origin] = "gone"
    return bool(made_of.get("digest") != now[origin])


def _tuning_files(folder: Path) -> Iterator[File]:
    """Files of measurements. A new measurement replaces the old one, so none is old."""
    for path, size in _scan(folder, stat.S_ISREG).items():
        if path.suffix == ".json":
            yield File(path, "measured choices", size, False)
        elif path.name.startswith("."):
            yield File(path, "left over", size, True)


def _scan(folder: Path, wanted: Callable[[int], bool]) -> dict[Path, int]:
    """Sizes of folders or regular files of a folder that is not a link; empty if it is missing."""
    try:
        paths = sorted(folder.iterdir()) if stat.S_ISDIR(folder.lstat().st_mode) else []
    except OSError:
        return {}
    sizes = {}
    for path in paths:
        with contextlib.suppress(OSError):  # other processes replace and remove files meanwhile
            status = path.lstat()
            if wanted(status.st_mode):
                sizes[path] = status.st_size
    return sizes
