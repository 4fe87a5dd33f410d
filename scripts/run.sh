#!/usr/bin/env bash
# Sets everything up on a bare machine, then measures every op on it: `python -m perf --quick`.
# Arguments are passed on: `scripts/run.sh --save results --device cpu`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python -m perf --quick "$@"
