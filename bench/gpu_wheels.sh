#!/usr/bin/env bash
# Fills .whl/ with what bench/gpu_check.sh needs beside torch on a machine without a package index, for that machine's Python (default 3.12).
# flashinfer's wheel comes without the sources of kernels that nothing here uses: 25 MiB instead of 60.
set -euo pipefail
cd "$(dirname "$0")/.."
version="${1:-3.12}"
python="${PYTHON:-python3}"
rm -rf .whl
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform any -c constraints.txt -d .whl flashinfer-python apache-tvm-ffi nvidia-ml-py requests urllib3 idna certifi
"$python" - <<'PYTHON'
import re
import zipfile
from pathlib import Path

(whole,) = Path(".whl").glob("flashinfer_python-*.whl")
# sources are top-level files of csrc; what they include lies in the other four
kept = re.compile(r"flashinfer/data/(csrc/[^/]+|include/.+|spdlog/.+|cccl/.+|cutlass/(include|tools/util/include)/.+)")
small = whole.with_suffix(".small")
with zipfile.ZipFile(whole) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as target:
    names = [name for name in source.namelist() if not name.startswith("flashinfer/data/") or kept.fullmatch(name)]
    for name in names:
        data = source.read(name)
        if name.endswith(".dist-info/RECORD"):
            lines = data.decode().splitlines()
            data = "".join(f"{line}\n" for line in lines if line.rsplit(",", 2)[0] in set(names)).encode()
        target.writestr(name, data)
small.replace(whole)
PYTHON
du -sh .whl
