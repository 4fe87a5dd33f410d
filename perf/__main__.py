"""``python -m perf``: every bench in this folder."""

from perf.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
