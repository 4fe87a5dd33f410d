# PYTHON_ARGCOMPLETE_OK
"""Command ``gpu-ops``, also ``python -m gpu_ops``: shows devices and backends of this machine. Its subcommands run,
serve, train, quantise and plan models, show cards, and compile kernels ahead."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import NoReturn

from gpu_ops.cli.parser import COMMANDS, make_parser
from gpu_ops.cli.terminal import run_command
from gpu_ops.errors import GpuOpsError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status; after a typed error print one line on stderr and return 2."""
    parser = make_parser()
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
    options = parser.parse_args(argv)
    command = importlib.import_module(f"gpu_ops.cli.{COMMANDS[options.command]}")
    try:
        return int(command.run(options))
    except GpuOpsError as error:
        words = " ".join(str(error).split()).removeprefix(f"{options.command}: ")
        print(f"{options.command}: {words}", file=sys.stderr)
        return 2


def script() -> NoReturn:
    """Run the console script ``gpu-ops``."""
    run_command(main)


if __name__ == "__main__":
    script()
