"""Makes tests independent of their start and surroundings, and keeps the last output of a test process that dies.

A shell's background jobs ignore Ctrl-C, and so do all of their children; a loaded machine draws examples slowly.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings


def restore_signals() -> None:
    """Set the handlers that Python starts with, and block no signal: a child inherits ignored and blocked signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGQUIT", "SIGALRM", "SIGCHLD"):  # not SIGHUP: nohup ignores it on purpose
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def load_hypothesis_profile() -> None:
    """Set no time limit for an example or for drawing one. A CI run repeats the same examples, so that a failure
    comes from the change; manual runs explore new ones."""
    settings.register_profile("gpu_ops", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", settings.get_profile("gpu_ops"), derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "gpu_ops")


class LastWords:
    """Plugin of a pytest-xdist worker: writes stacks at a crash or a timeout, and each test with the peak memory
    before it, to files, which outlive the process."""

    def __init__(self, config: pytest.Config, folder: Path, worker: str) -> None:
        stacks, exit_at_once = config.stash[fault_handler_stderr_fd_key], os._exit
        with (folder / f"{worker}.stacks").open("wb") as file:
            os.dup2(file.fileno(), stacks)

        def exit_with_stacks(status: int, process: int = os.getpid()) -> None:
            if os.getpid() == process:  # not in a fork; execnet ends a worker this way when it loses its pipe
                faulthandler.dump_traceback(stacks)
            exit_at_once(status)

        os._exit = exit_with_stacks
        self._file = (folder / f"{worker}.tests").open("w")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
        self._file.write(f"{nodeid}, after a peak of {peak} MB\n")
        self._file.flush()


class Deaths:
    """Plugin of the process that starts the workers: reports how each dead worker ended."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpu_ops_tests_"))
        self._deaths: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["last_words"] = str(self._folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error: object) -> None:
        worker = node.gateway.id
        files = {suffix: self._folder / f"{worker}.{suffix}" for suffix in ("tests", "stacks")}
        if error and files["tests"].exists():
            tests, stacks = (file.read_text(errors="replace") for file in files.values())
            last = "".join(tests.splitlines(keepends=True)[-3:])
            self._deaths[worker] = f"{worker} ended by {_end_of(node)}; its last tests:\n{last}{stacks}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report) -> None:  # called after the hook above
        report.longrepr += "\n" + self._deaths.pop(report.node.gateway.id, "")

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for death in self._deaths.values():  # between two tests
            terminalreporter.section("a test process died")
            terminalreporter.write_line(death)

    def pytest_unconfigure(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        self._folder.rmdir()


def _end_of(node) -> str:
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    status = None
    with contextlib.suppress(Exception):  # its exit status may not be available in time
        status = process.wait(timeout=60)
    if status is None:
        return "an unknown end"
    if status >= 0:
        return f"exit status {status}"
    end = signal.Signals(-status).name
    return f"{end}, which the kernel sends when memory runs out" if end == "SIGKILL" else end


def keep_last_words(config: pytest.Config) -> None:
    """Register the plugin of this process if tests are distributed over several processes."""
    if hasattr(config, "workerinput"):
        folder, worker = (config.workerinput[key] for key in ("last_words", "workerid"))
        config.pluginmanager.register(LastWords(config, Path(folder), worker))
    elif getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Deaths())
