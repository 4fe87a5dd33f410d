#!/usr/bin/env bash
# Runs a command as N ranks on this machine, by mpiexec, each with its share of the cores.
#
#   scripts/launch.sh N [--restarts R] COMMAND...     e.g. scripts/launch.sh 4 python train.py
#
# --restarts R: start again, at most R times, if a rank has failed; the program loads its last checkpoint.
# .venv/bin comes first in PATH. Set NUMBA_NUM_THREADS or OPENBLAS_NUM_THREADS to choose threads yourself.
set -euo pipefail

fail() { printf 'launch: %s\n' "$*" >&2; exit 2; }
usage="usage: scripts/launch.sh N [--restarts R] COMMAND..."

ranks=${1:-}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "N must be a number of ranks, got '$ranks'; $usage"
shift
restarts=0
if [[ ${1:-} == --restarts ]]; then
    restarts=${2:-}
    [[ $restarts =~ ^[0-9]+$ ]] || fail "--restarts must be a number, got '$restarts'; $usage"
    shift 2
fi
(($#)) || fail "no command; $usage"

venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin
PATH=$venv:$PATH
command -v mpiexec >/dev/null || fail "no mpiexec; pip install '.[mpi]' in the checkout brings one"

threads=$(($(nproc) / ranks))
threads=$((threads > 0 ? threads : 1))
export NUMBA_NUM_THREADS=${NUMBA_NUM_THREADS:-$threads} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$threads}
# Open MPI alone refuses root and more ranks than cores; containers and small machines have both
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

# mpiexec's status can be 0 though a rank ended by os._exit(0) and the others were killed: ranks note here that they
# start and leave, and that one of them chose the job's status
GPU_OPS_LAUNCH_NOTES=$(mktemp)
export GPU_OPS_LAUNCH_NOTES
trap 'rm -f "$GPU_OPS_LAUNCH_NOTES"' EXIT
some_have_not_left() {
    local word inside=0
    while read -r word; do
        case $word in
            here) inside=$((inside + 1)) ;;
            left) inside=$((inside - 1)) ;;
            aborted) return 1 ;;
        esac
    done <"$GPU_OPS_LAUNCH_NOTES"
    ((inside > 0))
}

# A signal that ends this script ends the ranks. While bash waits for a command in the foreground it handles none, and
# commands in the background ignore Ctrl-C and read nothing, unless told otherwise.
job=
trap '[[ -z $job ]] || kill -TERM "$job"; ended=143' TERM
trap '[[ -z $job ]] || kill -TERM "$job"; ended=129' HUP
trap : INT  # the ranks get it too
for ((left = restarts; ; left--)); do
    ended='' status=0
    : >"$GPU_OPS_LAUNCH_NOTES"
    (
        trap - INT TERM HUP
        exec mpiexec -n "$ranks" "$@"
    ) <&0 &
    job=$!
    while :; do
        status=0
        wait "$job" || status=$?
        kill -0 "$job" 2>/dev/null || break
    done
    job=
    # 130: Ctrl-C
    if [[ -n $ended ]]; then exit "$ended"; fi
    if ((status == 0)) && some_have_not_left; then
        echo "launch: a rank ended (by os._exit?) without leaving the job; exit status 1" >&2
        status=1
    fi
    if ((status == 0 || status == 130 || left == 0)); then exit "$status"; fi
    echo "launch: exit status $status; starting again ($((left - 1)) restarts left)" >&2
done
