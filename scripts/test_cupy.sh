#!/usr/bin/env bash
# Installs what a user of a GPU gets, only the extras cuda12 and cuda13, each into a separate environment
# (.venv-cupy12, .venv-cupy13; 2 GB each), and runs the host's code up to a launch with the real CuPy. No driver is needed.
#
#   scripts/test_cupy.sh [12|13...]        default: both
#
#   GPU_OPS_PYTHON  the interpreter to build the environments from (default: that of .venv, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=("pytest>=9" "hypothesis>=6.100")
python=${GPU_OPS_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=$(command -v "$python" || command -v python3)

(($#)) || set -- 12 13
status=0
for major in "$@"; do
    venv=.venv-cupy$major
    if ! "$venv/bin/python" -c '' 2>/dev/null; then "$python" -m venv --clear "$venv"; fi
    # Installed again if the declared dependencies or the place have changed.
    state="$(pwd) ${tools[*]} $(cksum <pyproject.toml)"
    if [[ ! -f $venv/.installed || $(<"$venv/.installed") != "$state" ]]; then
        echo "test_cupy: installing gpu_ops[cuda$major] into $venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[cuda$major]" "${tools[@]}"
        printf '%s' "$state" >"$venv/.installed"
    fi
    "$venv/bin/python" -W error -m pytest -p no:cacheprovider -m 'not slow' -q tests/core/test_real_cupy.py || status=1
done
exit "$status"
