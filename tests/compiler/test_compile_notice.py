"""The notice that kernels are compiled: one line per process, of real compilations only, through logging."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

from gpu_ops.kernels.compiler import jit, progress
from tests.support import numba_kernels
from tests.support.compilers import needs_numba_cuda, needs_nvrtc, scale, scale_tree
from tests.support.processes import PATIENCE, ROOT

LINE = "compiling kernels for this CPU, once; later processes load them"

# Two variants of a kernel, each in a separate thread. Loading one from the cache takes longer than SLOW.
RUN = """
import threading, time
from gpu_ops.kernels.compiler import progress
from gpu_ops.kernels.common.cpu import jit

@jit.kernel(lambda dtype: (jit.write(dtype, 1),))
def fill(state, n_tasks, out):
    for i in range(len(out)):
        out[i] = 1

restore = jit.restore
def slowly(*arguments):
    time.sleep(0.1)
    return restore(*arguments)
jit.restore = slowly
progress.SLOW = float(SLOW)

threads = [threading.Thread(target=fill.__getitem__, args=[dtype]) for dtype in ("float32", "float64")]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.fixture
def fresh(monkeypatch):
    """State of a process that has compiled nothing yet."""
    monkeypatch.setattr(progress, "_announced", threading.Lock())
    monkeypatch.delenv("GPU_OPS_QUIET", raising=False)


@pytest.fixture
def unconfigured(fresh, monkeypatch):
    """Logging without a handler: pytest adds its own to every logger of the hierarchy."""
    monkeypatch.setattr(progress, "LOGGER", logging.Logger("gpu_ops"))
    monkeypatch.setattr(progress.LOGGER, "parent", logging.Logger("root", logging.WARNING))


def stderr_of(folder, slow, **variables):
    """Text that a process using two kernels writes to stderr."""
    environment = {key: value for key, value in os.environ.items() if key != "GPU_OPS_QUIET"}
    with (folder / "run.py").open("w") as file:  # the disk cache requires the kernel's source
        file.write(RUN.replace("SLOW)", f"{slow!r})"))
    done = subprocess.run(
        [sys.executable, file.name],
        env={**environment, "PYTHONPATH": str(ROOT), "GPU_OPS_CACHE_DIR": str(folder / "cache"), **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_one_line_for_all_kernels_that_are_compiled_and_none_for_those_loaded(tmp_path):
    assert stderr_of(tmp_path, "1e6") == f"gpu_ops: {LINE}\n"
    assert stderr_of(tmp_path, "0.01") == ""


def test_a_handler_of_the_application_gets_the_record(unconfigured, capsys):
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append((record.name, record.levelname, record.getMessage()))

    progress.LOGGER.addHandler(Handler())
    progress.LOGGER.setLevel(logging.INFO)
    begin_in_threads(2)
    assert records == [("gpu_ops", "INFO", LINE)]
    assert capsys.readouterr().err == ""


def test_the_logger_is_that_of_the_package_and_has_no_level():
    assert progress.LOGGER is logging.getLogger("gpu_ops")
    assert progress.LOGGER.level == logging.NOTSET


def begin_in_threads(count):
    def compile(index):
        with progress.compilation(f"kernel {index}", "this CPU") as begin:
            begin()

    threads = [threading.Thread(target=compile, args=[index]) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_the_line(unconfigured, capsys):
    begin_in_threads(8)
    assert capsys.readouterr().err == f"gpu_ops: {LINE}\n"


def test_what_is_not_compiled_is_not_announced(unconfigured, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SLOW", 0.0)
    with progress.compilation("kernel", "this CPU"):
        pass
    assert capsys.readouterr().err == ""


def test_a_slow_kernel_is_named_once(unconfigured, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SLOW", 0.0)
    named = threading.Event()
    notice = progress._notice
    monkeypatch.setattr(progress, "_notice", lambda line: (notice(line), "kernel 7" in line and named.set()))
    with progress.compilation("kernel 7", "sm_90", kept=False) as begin:
        begin()
        begin()
        assert named.wait(PATIENCE)
    assert capsys.readouterr().err.splitlines() == [
        "gpu_ops: compiling kernels for sm_90, in each process that uses them",
        "gpu_ops: compiling kernel 7 for sm_90 takes longer than 0 s",
    ]


@pytest.mark.parametrize("handler", [False, True])
@pytest.mark.parametrize(
    ("root", "level", "shown"),
    [
        ("WARNING", "NOTSET", "without a handler"),  # the defaults of logging
        ("INFO", "NOTSET", "always"),
        ("ERROR", "NOTSET", "never"),
        ("WARNING", "INFO", "always"),
        ("WARNING", "WARNING", "never"),
        ("DEBUG", "ERROR", "never"),
    ],
)
def test_the_level_of_the_application_counts(root, level, shown, handler, unconfigured, capsys):
    progress.LOGGER.parent.setLevel(root)
    progress.LOGGER.setLevel(level)
    if handler:
        progress.LOGGER.parent.addHandler(logging.StreamHandler(sys.stderr))
    begin_in_threads(1)
    expected = shown == "always" or (shown == "without a handler" and not handler)
    assert (LINE in capsys.readouterr().err) == expected


def test_disabled_logging_disables_the_notice(unconfigured, monkeypatch, capsys):
    monkeypatch.setattr(progress.LOGGER.manager, "disable", logging.INFO)
    begin_in_threads(1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["1", "yes"])
def test_quiet_silences_all_progress(value, unconfigured, monkeypatch, capsys):
    monkeypatch.setenv("GPU_OPS_QUIET", value)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    begin_in_threads(1)
    with progress.visible("loading"), progress.steps("measuring", 1) as advance:
        advance()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "kernel", [pytest.param("raw", marks=needs_nvrtc), pytest.param("numba", marks=needs_numba_cuda)]
)
def test_gpu_kernels_go_through_the_same_notice(kernel, fresh, tmp_path, monkeypatch, caplog):
    """A kernel is compiled, then loaded by a simulated second process."""
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "gpu_ops")
    kernel = scale(scale_tree(tmp_path)) if kernel == "raw" else numba_kernels.scale_kernel(2.0)
    for records in (["compiling kernels for sm_80, once; later processes load them"], []):
        monkeypatch.setattr(progress, "_announced", threading.Lock())
        caplog.clear()
        jit.forget()
        jit.compile_kernel(kernel, "sm_80")
        assert [record.getMessage() for record in caplog.records if record.name == "gpu_ops"] == records
    jit.forget()
