# PYTHON_ARGCOMPLETE_OK
"""Command ``gpu-ops``, also ``python -m gpu_ops``: shows devices and backends of this machine. Its subcommands run,
serve, train, quantise and plan models, show cards, and compile kernels ahead."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from typing import NoReturn

from gpu_ops.cli.parser import COMMANDS, WITHOUT_JSON, make_parser
from gpu_ops.cli.terminal import run_command
from gpu_ops.errors import FileError, GpuOpsError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status; after a typed error print one line on stderr and return 2."""
    parser = make_parser()
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
    options = parser.parse_args(argv)
    if options.json and options.command in WITHOUT_JSON:
        parser.error(f"{options.command} prints no JSON; omit --json")
    command = importlib.import_module(f"gpu_ops.cli.{COMMANDS[options.command]}")
    try:
        return int(command.run(options))
    except GpuOpsError as error:
        print(f"{options.command or 'gpu-ops'}: {_message(error)}", file=sys.stderr)
        return 2


def _message(error: GpuOpsError) -> str:
    """Message on one line, without the name of the function that begins it, and without ``[Errno N]``."""
    path, text = None, str(error)
    if isinstance(error, FileError) and error.strerror:
        path, text = error.filename, error.strerror
    text = re.sub(r"^(?!GPU_OPS_)[A-Za-z_][\w.]*: ", "", " ".join(text.split()))
    return f"{path}: {text}" if path else text


def script() -> NoReturn:
    """Run the console script ``gpu-ops``."""
    run_command(main)


if __name__ == "__main__":
    script()
