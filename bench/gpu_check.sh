#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: are the FlashInfer and Triton paths right there, and how fast? Minutes; prints each result as it comes and
# a table last. Exits with 1 for a wrong result only (a check that raises is one), with 2 where nothing could be checked. Needs a Python with CUDA's torch, nvcc and ninja, and, where there is no package
# index, the wheels that bench/gpu_wheels.sh has put into .whl/.
#   bench/gpu_check.sh              on the GPU
#   bench/gpu_check.sh --cpu        dry run on a CPU: small shapes, FlashInfer's compiled modules replaced by a torch reference, Triton's interpreted
# PYTHON picks the interpreter, by default the one in .venv; further arguments: .venv/bin/python -m bench.gpu_check --help
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
export PYTHONUNBUFFERED=1 TVM_FFI_DISABLE_TORCH_C_DLPACK=1
if compgen -G '.whl/*.whl' >/dev/null; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    take() { "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$@"; }
    if ! take .whl/*.whl; then
        echo "bench/gpu_check.sh: .whl/ cannot be taken as a whole; one wheel after the other, without those that fail" >&2
        for wheel in .whl/*.whl; do
            take "$wheel" || echo "bench/gpu_check.sh: left out $wheel" >&2
        done
    fi
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! said="$("$python" -c 'import bench.gpu_check' 2>&1)"; then
    echo "bench/gpu_check.sh: $python cannot run the check: ${said##*$'\n'}" >&2
    echo "it needs torch and numpy: run 'make install' first, or name a Python that has them: PYTHON=/path/to/python bench/gpu_check.sh" >&2
    exit 2
fi
"$python" -m bench.gpu_check "$@"
