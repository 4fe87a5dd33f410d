"""``python -m perf``: every bench in this folder."""

from gpu_ops.terminal import run_command
from perf.cli import main

if __name__ == "__main__":
    run_command(main)
