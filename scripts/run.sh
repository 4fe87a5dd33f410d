#!/usr/bin/env bash
# Sets everything up on a bare machine, then measures the main cases of the ops on it, in about two minutes:
# `python -m perf --quick`. Arguments are passed on: `scripts/run.sh --all` for every case, `scripts/run.sh --save results`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python -m perf --quick "$@"
