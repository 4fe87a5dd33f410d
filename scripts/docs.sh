#!/usr/bin/env bash
# Builds the documentation site into OUTDIR (default build/docs): open OUTDIR/index.html, no server needed.
#
#   scripts/docs.sh [OUTDIR] [--no-run]      --no-run: snippets are shown without their output, kernels not compiled
#
# A broken link, a public name without a page or docstring, a snippet that raises or takes too long: each is reported, the
# rest is built, and the exit status is 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh docs plot emulator mpi
exec .venv/bin/python -m scripts.docs.build "$@"
