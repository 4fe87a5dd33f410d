#!/usr/bin/env bash
# Runs everything that needs a GPU, on a machine that may have no network, and reports. Installs nothing: the packages
# must be installed already; gpu_ops is taken from this checkout.
#
#   scripts/gpu_check.sh OUTDIR [--part N/4]...       default: all parts, in this order
#
#     1  facts of the machine; one GPU test of every file and backend, and the emulator against the GPU; one case per op
#     2  attention: benchmarks, and the tiles that autotune prefers
#     3  benchmarks of the other ops
#     4  all tests marked `gpu`
#
# A part takes at most 8 minutes: unfinished work is stopped then, and reported. All output goes to OUTDIR as it is produced:
# logs, tests*.jsonl, perf/*.csv, tune.jsonl, summary.txt, and after each part report.md with its pictures.
#
#   GPU_OPS_PYTHON          the interpreter (default: python3)
#   GPU_OPS_CHECK_JOBS      test processes, where pytest-xdist is installed (default: one per core)
#   GPU_OPS_CHECK_SECONDS   of a part (default: 460)
#   GPU_OPS_CHECK_TESTS     test files (default: all)
#   GPU_OPS_CHECK_DRY=1     no GPU needed: lists the tests and benchmarks instead of running them
#
# Every step is attempted even if others fail; the exit code is 1 if one failed.
# shellcheck disable=SC2329  # the steps are functions that `step` calls by name
set -uo pipefail

usage() {
    echo "usage: scripts/gpu_check.sh OUTDIR [--part N/4]..." >&2
    exit 2
}

(($#)) || usage
target=$1
shift
parts=()
while (($#)); do
    [[ $1 == --part && ${2:-} =~ ^[1-4]/4$ ]] || usage
    parts+=("${2%/4}")
    shift 2
done
((${#parts[@]})) || parts=(1 2 3 4)
mkdir -p "$target" || exit 2
out=$(cd "$target" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${GPU_OPS_PYTHON:-python3}
dry=${GPU_OPS_CHECK_DRY:-0}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
deadline=0

say() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }

# step NAME: runs the function of that name in a separate shell, with output to NAME.log, and notes how it ended.
step() {
    local name=$1 start=$SECONDS code
    if ((SECONDS >= deadline)); then
        say "CUT OFF $name: no time was left for it"
        return
    fi
    ("$name") >"$out/$name.log" 2>&1
    code=$?
    if ((code == 0)); then
        say "ok      $name, $((SECONDS - start)) s"
    elif ((code == 124 || code == 137)); then
        say "CUT OFF $name after $((SECONDS - start)) s; what it had found by then is kept"
    else
        say "FAILED  $name, exit code $code, $((SECONDS - start)) s; the end of $name.log:"
        tail -n 15 "$out/$name.log" | sed 's/^/        /' | tee -a "$out/summary.txt"
        failed=1
    fi
}

# limited COMMAND...: runs it within the time limit of the part.
limited() { timeout --signal=INT --kill-after=10 "$((deadline - SECONDS))" "$@"; }

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

packages() {
    local name missing=()
    for name in numpy numba ml_dtypes cupy numba_cuda pytest hypothesis rich; do has "$name" || missing+=("$name"); done
    for name in xdist pynvml torch matplotlib; do has "$name" || echo "optional, not installed: $name"; done
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
    limited nvidia-smi 2>&1
    limited nvidia-smi -q -d CLOCK,PERFORMANCE,POWER 2>&1
    limited "$python" -m gpu_ops --json
}

device() {
    if [[ $dry == 1 ]]; then return; fi
    limited "$python" - <<'PY'
import sys
from gpu_ops.core import device as devices
missing = devices.cuda_missing() or devices.compiler_missing("raw") or devices.compiler_missing("numba")
print(missing or devices.current_device("cuda"))
sys.exit(missing is not None)
PY
}

# tested LOG [ARGUMENTS...]: the tests marked gpu, with a line per result in LOG.
tested() {
    # pytest-benchmark, where it is installed, warns of xdist, and warnings are errors here.
    local options=(-p tests.support.report_log -p no:benchmark -m gpu -p no:cacheprovider --continue-on-collection-errors)
    export GPU_OPS_TEST_LOG="$out/$1"
    shift
    if [[ $dry == 1 ]]; then options+=(--collect-only -q); fi
    # shellcheck disable=SC2086  # names of files
    limited "$python" -m pytest "${options[@]}" "$@" ${GPU_OPS_CHECK_TESTS:-}
}

# parallel LOG: the same in several processes, which mostly compile. The BLAS of each keeps to one thread.
parallel() {
    if has xdist && [[ $dry != 1 ]]; then
        OPENBLAS_NUM_THREADS=1 tested "$1" -n "${GPU_OPS_CHECK_JOBS:-$(nproc)}"
    else
        tested "$1"
    fi
}

first_tests() { GPU_OPS_TEST_FIRST=1 parallel tests_first.jsonl; }
tests() { parallel tests.jsonl; }

# measured ARGUMENTS...: benchmarks, saved after each case.
measured() {
    if [[ $dry == 1 ]]; then
        "$python" -m perf --device cuda --list "$@"
    else
        limited "$python" -m perf --device cuda --save "$out/perf" "$@"
    fi
}

others() { "$python" -c 'from perf.cli import bench_names; print(*[n for n in bench_names() if n != "attention"])'; }

first_benchmarks() { measured --quick --first 1; }
attention() { measured --quick --op attention; }
attention_decode() { measured --op attention --grid decode --no-memory; }
attention_field() { measured --op attention --grid field --no-memory; }
attention_options() { measured --op attention --grid options --no-memory; }
benchmarks() { measured --quick --op $(others); }
benchmarks_full() { measured --op $(others); }

tune() {
    if [[ $dry == 1 ]]; then
        "$python" -m perf.tune --list
    else
        limited "$python" -m perf.tune --save "$out/tune.jsonl"
    fi
}

report() { "$python" -m perf.gpu_report "$out"; }

steps=(
    [1]="packages machine device first_tests first_benchmarks"
    [2]="attention tune attention_decode attention_field attention_options"
    [3]="benchmarks benchmarks_full"
    [4]="tests"
)
for part in "${parts[@]}"; do
    say "part $part of 4"
    deadline=$((SECONDS + ${GPU_OPS_CHECK_SECONDS:-460}))
    for name in ${steps[$part]}; do step "$name"; done
    deadline=$((SECONDS + 20))
    step report
done
if ((failed)); then say "something failed"; else say "all done"; fi
exit "$failed"
