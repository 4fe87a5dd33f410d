"""Paths that are not regular files, and file writes, which are complete or leave no file."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import gpu_ops
from gpu_ops import models, training
from gpu_ops.errors import FileError, FormatError, GpuOpsError, MissingFileError, OptionError
from gpu_ops.formats.files import write_file

MANY_MERGES = training.BytePairEncoding([(i // 256, i % 256) for i in range(30_000)])
READERS = {
    "read_gguf": gpu_ops.read_gguf,
    "read_bitnet": lambda path: gpu_ops.read_bitnet(path, weight_scale="multiply"),
    "read_bitnet's config": lambda path: gpu_ops.read_bitnet(__file__, config=path),
    "TernaryMatrix.load": gpu_ops.TernaryMatrix.load,
    "load_state": training.load_state,
    "TokenFile": training.TokenFile,
    "BytePairEncoding.load": training.BytePairEncoding.load,
}
WRITERS = {
    "write_tokens": lambda path: training.write_tokens(path, np.ones(150_000, np.int64), vocab=9),
    "BytePairEncoding.save": lambda path: MANY_MERGES.save(path),
    "save_state": lambda path: training.save_state(path, {"w": np.ones(50_000, np.float32)}),
    "write_gguf": lambda path: gpu_ops.write_gguf(path, {"w": np.ones(50_000, np.float32)}),
    "TernaryMatrix.save": lambda path: gpu_ops.TernaryMatrix.from_trits(np.zeros((4, 200_000), np.int8)).save(
        path
    ),
}
BOTH = READERS | WRITERS
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("path", [None, 5, 1.5, [], object(), "", "a\0b", b"a\0b", Path("a\0b"), "\ud800"])
def test_what_is_no_path_is_refused(name, path):
    if path is None and "config" in name:  # its message refers to the folder of the weights
        return
    with pytest.raises(OptionError, match=r"(path|config) .*(must be|is no path|cannot be encoded)"):
        BOTH[name](path)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "socket", "device", "zeros", "loop", "too long", "below a file"]
)
def test_what_is_no_regular_file_is_refused_at_once(name, kind, tmp_path):
    """A pipe would wait for a writer, a device would give bytes without end."""
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "below a file":
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "it"
    elif kind == "too long":
        path = tmp_path / ("it" * 200)
    elif kind != "socket":
        path = Path({"device": "/dev/null", "zeros": "/dev/zero"}[kind])
    with contextlib.ExitStack() as stack:
        if kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        expected = OptionError if (name, kind) == ("read_bitnet", "folder") else FileError
        with pytest.raises(expected) as caught:
            BOTH[name](path)
    assert str(path) in str(caught.value)
    if expected is FileError:
        assert isinstance(caught.value, (OSError, GpuOpsError))
        assert caught.value.filename == str(path)
        said = {
            "folder": "it is a folder",
            "pipe": "it is a pipe",
            "socket": "it is a socket",
            "device": "a device",
        }
        assert said.get(kind, "") in str(caught.value)
        assert caught.value.errno == (errno.EISDIR if kind == "folder" else caught.value.errno)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", [*READERS, "models.load"])
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(POINTER)
    with pytest.raises(
        FormatError, match=r"is a pointer of git LFS, .* 4976698672 bytes: run 'git lfs pull'"
    ):
        (READERS | {"models.load": models.load})[name](path)
    path.write_bytes(POINTER.ljust(1024))  # a file of that size is not a pointer
    with pytest.raises(GpuOpsError) as caught:
        (READERS | {"models.load": models.load})[name](path)
    assert "LFS" not in str(caught.value)


@pytest.mark.parametrize("name", BOTH)
def test_a_path_to_nothing(name, tmp_path):
    path = tmp_path / "no folder" / "nothing"
    with pytest.raises(
        MissingFileError, match=r"^\[Errno 2\] .*: No such file or directory: '.*nothing'$"
    ) as caught:
        BOTH[name](path)
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT


def test_paths_of_every_kind_are_taken(tmp_path):
    w = gpu_ops.TernaryMatrix.from_trits(np.eye(3, dtype=np.int8))
    name = str(tmp_path / "ü")
    for path in (name, Path(name), os.fsencode(name)):
        w.save(path)
        np.testing.assert_array_equal(gpu_ops.TernaryMatrix.load(path).trits(), w.trits())


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(name, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refused(code):
        with pytest.raises(FileError, match=f"{name}: {os.strerror(code)}: '{path}'") as caught:
            WRITERS[name](path)
        assert caught.value.errno == code
        assert [file.name for file in tmp_path.iterdir()] == ["file"]
        assert path.read_bytes() == b"old"

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, hard))  # the file has 200,000 bytes
    try:
        refused(errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in ("fsync", "open", "fchmod"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            refused(errno.ENOSPC)
    WRITERS[name](path)
    assert path.stat().st_size > 200_000


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def parts():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file("test", path, parts())
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_what_the_parts_raise_is_passed_on(tmp_path):
    """Errors of the parts are not reported as errors of the file that is written."""

    def parts():
        yield b"new"
        raise ConnectionResetError("the source")

    with pytest.raises(ConnectionResetError, match="the source"):
        write_file("test", tmp_path / "file", parts())
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def without_privileges():
    """Drop privileges: root may write anywhere, whatever the permissions are."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_may_not_be_written(name):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o555)
        with (
            without_privileges(),
            pytest.raises(FileError, match=f"{name}: Permission denied: '{folder}/it'") as caught,
        ):
            WRITERS[name](f"{folder}/it")
        Path(folder).chmod(0o755)
        assert caught.value.errno == errno.EACCES
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_a_read_only_file_stays(name, tmp_path):
    """A rename would replace a read-only file, and so would root."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(FileError, match=f"{name}: it is read-only; chmod u\\+w it.*'{path}'"):
        WRITERS[name](path)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("name", WRITERS)
def test_links_and_permissions_are_kept(name, tmp_path):
    (tmp_path / "data").mkdir()
    path, link = tmp_path / "data" / "file", tmp_path / "link"
    link.symlink_to(path)
    WRITERS[name](link)  # the target does not exist yet
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    for mode in (0o640, 0o600, 0o755):
        path.write_bytes(b"old")
        path.chmod(mode)
        WRITERS[name](link)
        assert link.is_symlink()
        assert path.stat().st_mode & 0o777 == mode
        assert path.stat().st_size > 200_000
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["file"]


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_is_written_by_many_is_whole_at_any_time(tmp_path):
    path = tmp_path / "file"
    matrices = [gpu_ops.TernaryMatrix.from_trits(np.full((32, 512), t, np.int8)) for t in (-1, 0, 1)]
    matrices[0].save(path)
    threads = [threading.Thread(target=lambda w=w: [w.save(path) for _ in range(20)]) for w in matrices]
    for thread in threads:
        thread.start()
    results = [gpu_ops.TernaryMatrix.load(path).trits() for _ in range(50)]
    for thread in threads:
        thread.join()
    assert all(len(np.unique(trits)) == 1 for trits in results)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    """An array mapped to the file would kill the process."""
    path = tmp_path / "file"
    gpu_ops.TernaryMatrix.from_trits(np.zeros((4, 200_000), np.int8)).save(path)
    size = os.fstat

    def shrinks(descriptor):
        before = size(descriptor)
        os.truncate(path, 100_000)
        return before

    monkeypatch.setattr(os, "fstat", shrinks)
    with pytest.raises(FormatError, match=r"codes: the file ends .* bytes before the tensor does"):
        gpu_ops.TernaryMatrix.load(path)
