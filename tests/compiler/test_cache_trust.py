"""The cache reads only complete entries of its user under their correct name, and nothing through a link."""

from __future__ import annotations

import os
import stat
import threading
import time
import warnings
from pathlib import Path

import pytest

from gpu_ops import __main__ as cli
from gpu_ops.kernels.compiler import cache, kernel
from gpu_ops.kernels.compiler.cache import Entry

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes of files: Linux, macOS")

ENTRY = Entry({"symbol": "f"}, {"code": b"\x7fELF" * 8, "bitcode": b"BC"})
NAME = ("cuda", "kernel.jit")


@pytest.fixture
def top(tmp_path, monkeypatch):
    """Cache of this test, which has not warned yet."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "deep" / "cache"


def said(function, *args):
    """Result and warnings of a function."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return function(*args), [str(each.message) for each in caught]


def test_one_compiles_while_others_wait(top):
    """Each holder of the lock has a separate open file, as processes do."""
    cache.publish(ENTRY, "cuda", "other.jit")
    waited = []

    def second():
        with cache.alone(*NAME) as has_waited:
            waited.append((has_waited, cache.read_entry(*NAME)))

    other = threading.Thread(target=second)
    with cache.alone(*NAME) as has_waited:
        assert not has_waited
        other.start()
        other.join(0.2)
        assert not waited
        with cache.alone("cuda", "third.jit") as has_waited:  # another kernel does not wait
            assert not has_waited
        cache.publish(ENTRY, *NAME)
        with cache.alone(*NAME) as has_waited:  # nor does a kernel that is already compiled
            assert not has_waited
    other.join(60)
    assert waited == [(True, ENTRY)]
    assert sorted(path.name for path in (top / "cuda").iterdir()) == ["kernel.jit", "other.jit"]


def test_without_a_lock_none_waits_for_ever(top, monkeypatch):
    """A stopped process, or a folder in which no lock can be created, does not block others."""
    monkeypatch.setattr(cache, "_LONGEST_COMPILATION", 0.1)
    with cache.alone(*NAME), cache.alone(*NAME) as has_waited:
        assert has_waited
    monkeypatch.setattr(cache.os, "open", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    with cache.alone(*NAME) as has_waited:
        assert not has_waited


def test_what_is_written_is_read(top):
    assert cache.read_entry(*NAME) is None
    cache.publish(Entry({}, {}), *NAME)
    cache.publish(ENTRY, *NAME)
    assert cache.read_entry(*NAME) == ENTRY
    assert [path.name for path in (top / "cuda").iterdir()] == ["kernel.jit"]


@posix
def test_everything_is_made_for_the_user_alone(top):
    before = os.umask(0)
    try:
        cache.publish(ENTRY, "numba_cpu", "build", "kernel.nbc")
    finally:
        os.umask(before)
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (top.parent, top, *top.rglob("*"))}
    assert made == {**dict.fromkeys(("deep", "cache", "numba_cpu", "build"), 0o700), "kernel.nbc": 0o600}


def give_away(path, monkeypatch):
    """Give a file to another user; without root, this process pretends to be another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)


def open_to(mode):
    return lambda path, monkeypatch: path.chmod(path.stat().st_mode | mode)


CHANGES = {"another owner": give_away, "group": open_to(0o020), "others": open_to(0o002)}


@posix
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("where", ["", "cuda", "cuda/kernel.jit"])
def test_what_others_may_have_written_is_not_read(top, monkeypatch, change, where):
    """A single line reports it, with its name."""
    cache.publish(ENTRY, *NAME)
    path = top / where
    change(path, monkeypatch)
    entry, lines = said(cache.read_entry, *NAME)
    assert entry is None
    assert len(lines) == 1
    # whose folder comes first when the process pretends to be another user
    assert str(path) in lines[0] or change is give_away
    assert said(cache.read_entry, *NAME) == (None, [])


@posix
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_is_written_into_a_folder_of_others(top, monkeypatch, change):
    top.mkdir(parents=True)
    change(top, monkeypatch)
    _, lines = said(cache.publish, ENTRY, *NAME)
    assert len(lines) == 1
    assert "Set GPU_OPS_CACHE_DIR to a writable folder of your own" in lines[0]
    assert said(cache.publish, ENTRY, *NAME)[1] == []
    assert list(top.iterdir()) == []


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root runs this: a chown")
def test_roots_folder_is_read_by_all(top, monkeypatch):
    """An image warmed as root and run as a user reads root's folder."""
    cache.publish(ENTRY, *NAME)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert said(cache.read_entry, *NAME) == (ENTRY, [])


@posix
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_read(top, tmp_path, kind):
    """A pipe does not block, a link is neither followed nor written through, and a folder stays."""
    cache.publish(ENTRY, *NAME)
    path, other = top.joinpath(*NAME), tmp_path / "other"
    path.rename(other)
    before = other.read_bytes()
    make = {"link": lambda: path.symlink_to(other), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    make[kind]()
    entry, lines = said(cache.read_entry, *NAME)
    assert entry is None
    assert [line.partition(":")[0] for line in lines] == ["gpu_ops"]
    _, lines = said(cache.publish, ENTRY, *NAME)
    assert other.read_bytes() == before
    if kind == "folder":
        assert "not cached" in lines[0]
        assert path.is_dir()
    else:
        assert lines == []
        assert cache.read_entry(*NAME) == ENTRY


@posix
def test_a_linked_folder_within_the_cache_is_not_followed(top, tmp_path):
    cache.publish(ENTRY, *NAME)
    (top / "cuda").rename(tmp_path / "elsewhere")
    (top / "cuda").symlink_to(tmp_path / "elsewhere")
    assert cache.read_entry(*NAME) is None
    _, lines = said(cache.publish, ENTRY, "cuda", "other.jit")
    assert len(lines) == 1
    assert "not a folder" in lines[0]
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["kernel.jit"]


def test_an_entry_under_another_name_is_not_used(top):
    cache.publish(ENTRY, *NAME)
    top.joinpath(*NAME).rename(top / "cuda" / "other.jit")
    entry, lines = said(cache.read_entry, "cuda", "other.jit")
    assert entry is None
    assert "it is the entry cuda/kernel.jit" in lines[0]


def test_a_torn_entry_is_not_used(top):
    """An entry truncated at any length, or with any wrong byte, is rejected."""
    cache.publish(ENTRY, *NAME)
    path = top.joinpath(*NAME)
    whole = path.read_bytes()
    torn = [whole[:n] for n in range(len(whole))]
    torn += [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(len(whole))]
    for content in [*torn, whole + b"\0"]:
        path.write_bytes(content)
        entry, lines = said(cache.read_entry, *NAME)
        assert entry is None
        assert len(lines) == 1


def test_left_over_temporary_files_go_after_a_day(top):
    cache.publish(ENTRY, *NAME)
    old, new = top / "cuda" / ".kernel-a.tmp", top / "cuda" / ".kernel-b.tmp"
    for path, age in ((old, 25 * 3600), (new, 23 * 3600)):
        path.write_bytes(b"half of it")
        os.utime(path, (time.time() - age,) * 2)
    cache._writable.cache_clear()  # as a new process begins
    cache.publish(ENTRY, *NAME)
    assert not old.exists()
    assert new.exists()


def fill(top):
    """Fill a cache with an entry of the current sources and one of others, for each kind that has entries."""
    now = cache.cpu_sources()
    for build in (f"{now}-cpu", "0123456789abcdef-cpu", "0123456789abcdef"):
        cache.publish(ENTRY, "numba_cpu", build, "kernel.nbc")
        cache.publish(ENTRY, "numba_cpu", build, "emulator-gather-0.nbc")
    source = top.parent / "kernel.cu"
    source.write_text("// as it was")
    made_of = {"origin": str(source), "digest": cache.sources_digest(source)}
    cache.publish(Entry({"made_of": made_of}), "cuda", "now.jit")
    cache.publish(Entry({"made_of": {**made_of, "digest": "edited"}}), "cuda", "edited.jit")
    cache.publish(Entry({"made_of": {**made_of, "origin": str(top / "gone.cu")}}), "cuda", "gone.jit")
    (top / "cuda" / "format2.jit").write_bytes(b"of an earlier version")
    (top / "cuda" / ".half.tmp").write_bytes(b"half of it")
    (cache.cache_folder("tuning") / "choice.json").write_text("{}")
    (top / "mine.txt").write_text("not ours")


def rows(capsys):
    """Printed lines of numbers, by kind."""
    out = capsys.readouterr().out
    kinds = ("CPU kernels", "emulator", "GPU kernels", "measured choices", "left over")
    numbers = {label: line for label in kinds for line in out.splitlines() if line.strip().startswith(label)}
    return {label: [int(word) for word in line.split() if word.isdigit()] for label, line in numbers.items()}


@pytest.mark.parametrize("looks", [1, 2])
def test_a_file_that_another_process_removes_is_left_out(looks, top, monkeypatch):
    """The file is removed between the listing of its folder and the ``looks``-th access to it."""
    fill(top)
    listed, lstat = cache.contents(), Path.lstat
    seen = []

    def vanishing(path):
        seen.append(path.name)
        if path.name == ".half.tmp" and seen.count(path.name) == looks:
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanishing)
    now = {file.path for file in cache.contents()}
    assert {file.path for file in listed if file.path.name != ".half.tmp"} <= now


def test_the_command_shows_and_clears(top, capsys):
    fill(top)
    assert cli.main(["cache"]) == 0
    assert rows(capsys) == {
        "CPU kernels": [3, 2],
        "emulator": [3, 2],
        "GPU kernels": [4, 3],
        "measured choices": [1],
        "left over": [1, 1],
    }
    assert cli.main(["cache", "--clear", "old"]) == 0
    assert rows(capsys) == {"CPU kernels": [1], "emulator": [1], "GPU kernels": [1], "measured choices": [1]}
    assert cli.main(["cache", "--clear"]) == 0
    assert str(top) in capsys.readouterr().out.replace("\n", "")
    assert [path.name for path in top.rglob("*") if path.is_file()] == ["mine.txt"]


@posix
def test_the_command_says_why_a_cache_is_not_used(top, capsys, monkeypatch):
    fill(top)
    top.chmod(0o777)
    assert cli.main(["cache", "--clear"]) == 1
    assert "other users may write to" in capsys.readouterr().out
    assert (top / "cuda" / "now.jit").exists()


UNIT = kernel.Compiled("f", ".entry f", b"\x7fELF", "", 0.1, {"/somewhere/f.cu": "// f"})


@posix
def test_a_dump_follows_no_link(tmp_path, monkeypatch):
    folder, victim = tmp_path / "dump", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    for name in ("f.sm_80.ptx", "f.sm_80.cubin", "f.sm_80.f.cu"):
        (folder / name).symlink_to(victim)
    monkeypatch.setenv("GPU_OPS_DUMP", str(folder))
    kernel.dump(UNIT, "f", "sm_80")
    assert victim.read_text() == "mine"
    assert (folder / "f.sm_80.ptx").read_text() == ".entry f"
    assert not any(path.is_symlink() for path in folder.iterdir())


@posix
@pytest.mark.parametrize("kind", ["link", "below a file", "file"])
def test_a_dump_that_cannot_be_written_says_why(tmp_path, monkeypatch, kind):
    (tmp_path / "real").mkdir()
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = {
        "link": tmp_path / "link",
        "below a file": tmp_path / "file" / "dump",
        "file": tmp_path / "file",
    }[kind]
    monkeypatch.setenv("GPU_OPS_DUMP", str(folder))
    _, lines = said(kernel.dump, UNIT, "f", "sm_80")
    assert len(lines) == 1
    assert f"GPU_OPS_DUMP={folder}: cannot write there" in lines[0]
    assert said(kernel.dump, UNIT, "f", "sm_80")[1] == []
    assert not list((tmp_path / "real").iterdir())
    assert Path(tmp_path / "file").read_text() == "in the way"
