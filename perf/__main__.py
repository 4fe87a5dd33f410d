"""``python -m perf``: every bench in this folder."""

from gpu_ops.cli.terminal import run_command
from perf.cli import main

if __name__ == "__main__":
    run_command(main)
