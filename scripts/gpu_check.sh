#!/usr/bin/env bash
# Runs everything that needs a GPU, on a machine that may have no network: what the machine is, all tests marked `gpu`
# (the emulator against the GPU among them), every benchmark of an op with CUDA kernels. Installs nothing: the packages
# must be there, gpu_ops is taken from this checkout.
#
#   scripts/gpu_check.sh OUTDIR        logs, tests.xml, perf/*.csv and summary.txt land in OUTDIR
#
#   GPU_OPS_PYTHON         the interpreter (default: python3)
#   GPU_OPS_CHECK_JOBS     test processes, where pytest-xdist is installed (default: 4)
#   GPU_OPS_CHECK_DRY=1    no GPU needed: lists the tests and benchmarks instead of running them
#
# Every step is attempted whatever became of the others; the exit code is 1 when one failed.
# shellcheck disable=SC2329  # the steps are functions that `step` calls by name
set -uo pipefail
if (($# != 1)); then
    echo "usage: scripts/gpu_check.sh OUTDIR" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${GPU_OPS_PYTHON:-python3}
dry=${GPU_OPS_CHECK_DRY:-0}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
: >"$out/summary.txt"

say() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }

# step NAME: runs the function of that name, in a shell of its own, into NAME.log and notes how it ended.
step() {
    local name=$1 start=$SECONDS code
    ("$name") >"$out/$name.log" 2>&1
    code=$?
    if ((code == 0)); then
        say "ok      $name, $((SECONDS - start)) s"
    else
        say "FAILED  $name, exit code $code, $((SECONDS - start)) s; the end of $name.log:"
        tail -n 15 "$out/$name.log" | sed 's/^/        /' | tee -a "$out/summary.txt"
        failed=1
    fi
}

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

packages() {
    local name missing=()
    for name in numpy numba ml_dtypes cupy numba_cuda pytest hypothesis rich; do has "$name" || missing+=("$name"); done
    for name in xdist pynvml torch; do has "$name" || echo "optional, not installed: $name"; done
    "$python" --version || return
    "$python" -m pip list --disable-pip-version-check
    if ((${#missing[@]})) && [[ $dry != 1 ]]; then
        echo "needed, not installed: ${missing[*]}"
        return 1
    fi
}

machine() {
    git log -1 --format='commit %H, %cd' 2>/dev/null
    uname -a
    nvidia-smi 2>&1
    nvidia-smi -q -d CLOCK,PERFORMANCE,POWER 2>&1
    "$python" -m gpu_ops --json
}

device() {
    "$python" - <<'PY'
import sys
from gpu_ops.core import device as devices
missing = devices.cuda_missing() or devices.compiler_missing("raw") or devices.compiler_missing("numba")
print(missing or devices.current_device("cuda"))
sys.exit(missing is not None)
PY
}

tests() {
    local options=(-m gpu -p no:cacheprovider --continue-on-collection-errors --junitxml "$out/tests.xml")
    if [[ $dry == 1 ]]; then
        "$python" -m pytest "${options[@]}" --collect-only -q
        return
    fi
    if has xdist; then options+=(-n "${GPU_OPS_CHECK_JOBS:-4}"); fi
    "$python" -m pytest "${options[@]}"
}

benchmarks() {
    if [[ $dry == 1 ]]; then
        "$python" -m perf --device cuda --list
    else
        "$python" -m perf --device cuda --save "$out/perf"
    fi
}

step packages
step machine
if [[ $dry != 1 ]]; then step device; fi
step tests
step benchmarks
if ((failed)); then say "something failed"; else say "all done"; fi
exit "$failed"
