"""``python -m perf.pictures [FILE.csv or folder ...] [--to DIR]``: pictures of saved runs, as SVG files."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from gpu_ops.cli.terminal import run_command
from perf.pictures import draw_all

HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures. Without arguments: all of perf/results into this folder, with the pictures without a run."""
    parser = argparse.ArgumentParser(prog="python -m perf.pictures", description=__doc__)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="saved runs, or folders of them; default: perf/results"
    )
    parser.add_argument("--to", type=Path, default=HERE, metavar="DIR", help="default: perf/pictures")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("pictures need matplotlib: pip install matplotlib (the `plot` extra)")
    try:
        for path in draw_all(args.runs or [HERE.parent / "results"], args.to, general=not args.runs):
            print(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    run_command(main)
