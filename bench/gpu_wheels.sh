#!/usr/bin/env bash
# Fills .whl/ with what bench/gpu_check.sh needs beside torch on a machine without a package index, for that machine's Python (default 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
version="${1:-3.12}"
rm -rf .whl
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform any -c constraints.txt -d .whl flashinfer-python apache-tvm-ffi nvidia-ml-py requests urllib3 idna certifi
du -sh .whl
