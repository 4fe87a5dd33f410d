#!/usr/bin/env bash
# Makes .venv at the repository root and installs gpu_ops into it, editable, with the CUDA extra that the driver requires.
#
#   scripts/setup.sh [EXTRA...]        e.g. `scripts/setup.sh dev plot`; no extra: what `python -m perf` needs
#
# Safe to repeat: if nothing changed it returns in well under a second.
#   GPU_OPS_PYTHON  the interpreter to build .venv from (default: the first Python >= 3.11 found)
#   GPU_OPS_CUDA    none, 12 or 13: which CUDA extra to install, instead of asking the driver
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

usable() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    if [[ -n ${GPU_OPS_PYTHON:-} ]]; then
        usable "$GPU_OPS_PYTHON" || fail "GPU_OPS_PYTHON=$GPU_OPS_PYTHON is not a Python >= 3.11"
        echo "$GPU_OPS_PYTHON"
        return
    fi
    local name
    for name in python3 python python3.13 python3.12 python3.11 python3.14; do
        if usable "$name"; then echo "$name"; return; fi
    done
    fail "no Python >= 3.11 found; install one, or name it: GPU_OPS_PYTHON=/path/to/python3.12 $0"
}

# Prints the major CUDA version the installed driver supports, or nothing. Asks libcuda itself: the text of nvidia-smi
# changes between driver branches and is only the fallback.
driver_cuda() {
    case ${GPU_OPS_CUDA:-} in
        none) return ;;
        12 | 13) echo "$GPU_OPS_CUDA"; return ;;
        '') ;;
        *) fail "GPU_OPS_CUDA=$GPU_OPS_CUDA: want none, 12 or 13" ;;
    esac
    .venv/bin/python - <<'PY' && return
import ctypes, sys
for name in ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"):
    try:
        cuda = ctypes.CDLL(name)
    except OSError:
        continue
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
        cuda.cuDriverGetVersion(ctypes.byref(version))
        print(version.value // 1000)
    sys.exit(0)
sys.exit(1)  # no libcuda where the loader looks
PY
    if command -v nvidia-smi >/dev/null 2>&1; then
        { nvidia-smi 2>/dev/null || true; } | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\)\..*/\1/p' | head -n 1
    fi
}

if [[ ! -x .venv/bin/python ]] || ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version)"
    if ! log=$("$python" -m venv --clear .venv 2>&1); then
        rm -rf .venv
        fail "\`$python -m venv\` failed (on Debian and Ubuntu: apt install python3-venv):"$'\n'"$log"
    fi
fi

cuda=$(driver_cuda)
extras=("$@")
case $cuda in
    '') ;;
    12) extras+=(cuda12) ;;
    [0-9] | 10 | 11) echo "setup: the driver supports CUDA $cuda; GPU kernels need 12 or newer: installing for CPU" >&2 ;;
    *) extras=($(printf '%s\n' ${extras[@]+"${extras[@]}"} | grep -vx emulator || true) cuda13) ;;  # has its compilers
esac
list=$(IFS=,; echo "${extras[*]-}")

# Inputs of an up-to-date environment: the declared dependencies, the extras, the place (editable installs
# and the scripts in .venv/bin hold absolute paths).
state="$(pwd) [$list] $(cksum <pyproject.toml)"
stamp=.venv/.setup-${list//,/-}
if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then exit 0; fi

# MB on disk; NumPy, Numba and LLVM, which are always needed, take 320
declare -A sizes=([emulator]=390 [mpi]=18 [dev]=200 [docs]=80 [plot]=60 [tokenizers]=30 [cuda12]=1700 [cuda13]=1700)
size=320
for extra in ${extras[@]+"${extras[@]}"}; do size=$((size + ${sizes[$extra]:-0})); done
echo "setup: installing gpu_ops${list:+[$list]} with NumPy, Numba and what they need into .venv: about $size MB"
.venv/bin/python scripts/pip_install.py --editable ".${list:+[$list]}"
printf '%s' "$state" >"$stamp"
echo "setup: done in $SECONDS s; .venv takes $(du -sm .venv | cut -f1) MB"
