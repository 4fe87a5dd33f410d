#!/usr/bin/env bash
# Installs what users of several GPUs get, the extra nccl13 (or nccl12) with mpi, into a separate environment
# (.venv-nccl13; 510 MB), and runs the host's code up to libnccl with the real nccl4py. No driver is needed.
#
#   scripts/test_nccl.sh [12|13]        default: 13
#
#   GPU_OPS_PYTHON  the interpreter to build the environment from (default: that of .venv, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=("pytest>=9" "hypothesis>=6.100")
python=${GPU_OPS_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=$(command -v "$python" || command -v python3)

major=${1:-13}
venv=.venv-nccl$major
if ! "$venv/bin/python" -c '' 2>/dev/null; then "$python" -m venv --clear "$venv"; fi
# Installed again if the declared dependencies or the place have changed.
state="$(pwd) ${tools[*]} $(cksum <pyproject.toml)"
if [[ ! -f $venv/.installed || $(<"$venv/.installed") != "$state" ]]; then
    echo "test_nccl: installing gpu_ops[mpi,nccl$major] into $venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[mpi,nccl$major]" "${tools[@]}"
    printf '%s' "$state" >"$venv/.installed"
fi
exec "$venv/bin/python" -m pytest -p no:cacheprovider -m "not slow" -q tests/distributed/test_real_nccl.py
