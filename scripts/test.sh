#!/usr/bin/env bash
# Sets everything up on a bare machine, then runs the default tests on all cores; `--full`: more cases of each, as CI does.
# Arguments go to pytest: `scripts/test.sh tests/rope/test_rope.py -k yarn`, `scripts/test.sh -m slow`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev emulator mpi
# The processes share the cores: threads of NumPy's BLAS, which spin while they wait, would double what references cost.
export OPENBLAS_NUM_THREADS=1
if [[ ${1:-} == --full ]]; then set -- -m 'not slow' "${@:2}"; fi
exec .venv/bin/python -m pytest -n auto --dist worksteal "$@"
