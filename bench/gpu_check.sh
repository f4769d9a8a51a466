#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: are the FlashInfer and Triton paths right there, and how fast? Minutes; prints each result as it comes and
# a table last. Exits non-zero only for a wrong result. Needs a Python with CUDA's torch, nvcc and ninja, and, where there is no package
# index, the wheels that bench/gpu_wheels.sh has put into .whl/.
#   bench/gpu_check.sh              on the GPU
#   bench/gpu_check.sh --cpu        dry run on a CPU: small shapes, FlashInfer's compiled modules replaced by a torch reference, Triton's interpreted
# PYTHON picks the interpreter, by default the one in .venv; further arguments: .venv/bin/python -m bench.gpu_check --help
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
export PYTHONUNBUFFERED=1 TVM_FFI_DISABLE_TORCH_C_DLPACK=1
if compgen -G '.whl/*.whl' >/dev/null; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl || exit 1
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    echo "bench/gpu_check.sh: $python has no torch; run 'make install' first, or name a Python that has it: PYTHON=/path/to/python bench/gpu_check.sh" >&2
    exit 1
fi
"$python" -m bench.gpu_check "$@"
