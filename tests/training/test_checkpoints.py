"""Last states of a run: they survive kills, full disks and foreign files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gpu_ops.errors import FileError, OptionError
from gpu_ops.training import Checkpoints, load_state
from tests.support.processes import PATIENCE, ROOT


def test_the_last_states_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []
    for step in (0, 5, 5, 12):
        path = checkpoints.save(step, {"w": np.full(3, step)}, {"step": step})
        assert path == checkpoints.latest()
    assert checkpoints.steps() == [5, 12]
    assert [p.name for p in sorted(path.parent.iterdir())] == [
        "step-000000000005.safetensors",
        "step-000000000012.safetensors",
    ]
    assert load_state(Checkpoints(str(tmp_path / "a" / "b")).latest())[1] == {"step": 12}
    single = Checkpoints(tmp_path / "one", keep=1)
    for step in (1, 2, 3):
        single.save(step, {})
    assert single.steps() == [3]


def test_a_step_back_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(9, {})
    with pytest.raises(OptionError, match="step 8 comes before step 9"):
        checkpoints.save(8, {})
    for step in (-1, 10**12, 1.0, "1", True):
        with pytest.raises(OptionError, match="step must"):
            checkpoints.save(step, {})
    for keep in (0, -1, 1.5, None):
        with pytest.raises(OptionError, match="keep must"):
            Checkpoints(tmp_path, keep=keep)
    assert checkpoints.steps() == [9]


def test_half_written_and_foreign_files_do_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    good = checkpoints.save(3, {"w": np.ones(100)})
    (tmp_path / ".gpu_ops-0123.tmp").write_bytes(b"half")
    (tmp_path / "step-000000000009.safetensors").write_bytes(good.read_bytes()[:-8])
    (tmp_path / "step-000000000010.safetensors").write_bytes(b"")
    (tmp_path / "step-11.safetensors").write_bytes(good.read_bytes())
    (tmp_path / "notes").write_text("x")
    assert checkpoints.latest() == good
    checkpoints.save(9, {})  # replaces the partial file
    assert checkpoints.steps() == [3, 9]
    left = {path.name for path in tmp_path.iterdir()}
    assert {"notes", "step-11.safetensors"} < left
    assert not {name for name in left if name.endswith(".tmp")}


def test_a_failed_save_keeps_the_states_there_were(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": np.ones(9)})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="save_state: No space left on device"):
        checkpoints.save(2, {"w": np.ones(9)})
    assert checkpoints.steps() == [1]
    assert len([*tmp_path.iterdir()]) == 1


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").touch()
    for use in (lambda c: c.save(1, {}), lambda c: c.latest()):
        with pytest.raises(FileError, match=r"Checkpoints.*: '.*f'"):
            use(Checkpoints(tmp_path / "f"))


SAVES = """
import sys, numpy as np
from gpu_ops.training import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in range(int(sys.argv[2]), 10**6):
    checkpoints.save(step, {"w": np.full(400_000, step)}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_resumes(how, tmp_path):
    """SIGTERM works also in the background of a shell, where SIGINT is ignored."""
    rng, start = np.random.default_rng(1), 0
    for _ in range(2):
        command = [sys.executable, "-c", SAVES, str(tmp_path), str(start)]
        if how == signal.SIGTERM:
            command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert child.stdout.readline()  # at least one state is saved
            time.sleep(rng.random() * 0.05)
            child.send_signal(how)
            said = child.communicate(timeout=PATIENCE)[0].split()
        finally:
            child.kill()
        arrays, meta = load_state(Checkpoints(tmp_path).latest())
        assert meta["step"] >= (int(said[-1]) if said else start)
        assert (arrays["w"] == meta["step"]).all()
        start = meta["step"] + 1
    Checkpoints(tmp_path).save(start, {})
    assert len([*tmp_path.iterdir()]) == 2
