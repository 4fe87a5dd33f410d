"""pip install with progress for a terminal and a log: the package being downloaded, its size, and the time so far.

    .venv/bin/python scripts/pip_install.py ARGUMENTS...      those of `pip install`

A terminal has one line that changes; anything else gets a line per package, and one every five seconds in between.
The output of pip is shown if it fails. Standard library only, because nothing is installed yet.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time

LOG_EVERY = 5.0  # seconds
TERMINAL_EVERY = 0.5
DOWNLOAD = re.compile(
    r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?(?P<name>[\w.]+?)-\d\S*(?P<size> \([^)]+\))?"
)
STAGES = {
    "Collecting": "looking up packages",
    "Obtaining": "reading pyproject.toml",
    "Installing build dependencies": "fetching setuptools",
    "Building": "building gpu_ops",
    "Installing collected packages": "unpacking all of them",
}


def main(arguments: list[str]) -> int:
    """Run pip; returns its exit status."""
    command = [sys.executable, "-u", "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    pip = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(pip, lines), daemon=True).start()
    terminal = sys.stdout.isatty()
    start = last = time.monotonic()
    doing, printed = "starting pip", []
    while True:
        try:
            line = lines.get(timeout=TERMINAL_EVERY if terminal else LOG_EVERY)
        except queue.Empty:
            line = ""
        if line is None:
            break
        printed.append(line)
        before, doing = doing, stage(line) or doing
        now = time.monotonic()
        new = doing != before and doing.startswith("downloading")
        if terminal or new or now - last >= LOG_EVERY:
            last = now
            text = f"  {doing}, {now - start:.0f} s"
            print(f"\r\x1b[K{text[:78]}" if terminal else text, end="" if terminal else "\n", flush=True)
    if terminal:
        print("\r\x1b[K", end="", flush=True)
    if pip.wait():
        print("".join(printed), end="", file=sys.stderr)
    return pip.returncode


def stage(line: str) -> str:
    """Describe the step of pip that prints this line; empty for any other."""
    if match := DOWNLOAD.match(line):
        return f"downloading {match['name']}{match['size'] or ''}"
    return next((words for start, words in STAGES.items() if line.strip().startswith(start)), "")


def _read(pip: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert pip.stdout is not None
    for line in pip.stdout:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
