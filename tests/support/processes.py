"""Other processes of a test: a fresh interpreter, a forked child. All waits for them are limited."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600  # seconds: not even a busy machine takes this long


def python(*arguments: object, status: int = 0, **variables: str) -> str:
    """Output of ``python arguments``, run from the repository root; it must exit with ``status``."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    # negative: a signal, such as the kernel's when memory runs out, which leaves no message
    assert done.returncode == status, (
        f"exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    return done.stdout


def in_background(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start ``python arguments`` as a shell does in the background, with SIGINT ignored, in a separate session."""
    return subprocess.Popen(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ends_with_all_it_started(process: subprocess.Popen[str]) -> bool:
    """Terminate a process of :func:`in_background`. True if all processes that it started end as well."""
    process.terminate()
    process.communicate(timeout=PATIENCE)  # reads until none of them has the pipes
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(process.pid, 9)
    return False


def exit_code(child: int) -> int:
    """Exit code of a forked child, which is killed if it hangs."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
