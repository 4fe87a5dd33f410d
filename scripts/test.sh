#!/usr/bin/env bash
# Sets everything up on a bare machine, then runs the default tests (all but those marked slow) on all cores.
# Arguments go to pytest: `scripts/test.sh tests/rope/test_rope.py -k yarn`, `scripts/test.sh -m slow`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev emulator mpi
# The processes share the cores: threads of NumPy's BLAS, which spin while they wait, would double what references cost.
export OPENBLAS_NUM_THREADS=1
exec .venv/bin/python -m pytest -n auto --dist worksteal "$@"
