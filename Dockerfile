# radixserve in a container: docker build -t radixserve . && docker run -p 30000:30000 radixserve [flags of `radixserve serve`]
#
# TORCH_VARIANT  cpu (default), or cuda: adds the `gpu` extra. FlashInfer compiles its kernels on the GPU's machine at the first start, with nvcc, so the
#                image begins from one with CUDA's compiler:
#                docker build -t radixserve:cuda --build-arg TORCH_VARIANT=cuda --build-arg BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .
#                docker run --gpus all -p 30000:30000 -v radixserve-cache:/home/radixserve/.cache -v /models:/models radixserve:cuda --model-path /models/...
# BASE_IMAGE     default: python:PYTHON_VERSION-slim. One without Python gets Debian's or Ubuntu's.
# PIP_OPTIONS    more options for pip, as one string. On Linux the index's plain torch is the large CUDA build; for a small CPU image
#                pass your index of CPU wheels here, e.g. --build-arg PIP_OPTIONS="--extra-index-url <address>".
ARG PYTHON_VERSION=3.11
ARG BASE_IMAGE=python:${PYTHON_VERSION}-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_VARIANT=cpu
ARG PIP_OPTIONS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# for the CPU kernels, built here once for every kind of x86-64 processor; the final image has no compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && { command -v python >/dev/null || apt-get install -y --no-install-recommends python3-venv python-is-python3; } \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY radixserve ./radixserve
# PIP_OPTIONS is split into words on purpose
# hadolint ignore=SC2086
RUN case "${TORCH_VARIANT}" in \
        cpu) extras="" ;; \
        cuda) extras="[gpu]" ;; \
        *) echo "TORCH_VARIANT: expected cpu or cuda, got ${TORCH_VARIANT}" >&2; exit 1 ;; \
    esac \
    && /opt/venv/bin/pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt ".${extras}" \
    && if [ "${TORCH_VARIANT}" = cpu ] && [ "$(uname -m)" = x86_64 ]; then cd / && /opt/venv/bin/python -m radixserve.native --all-levels --into-package; fi

FROM ${BASE_IMAGE}
ARG TORCH_VARIANT=cpu
# what FlashInfer and Triton compile with, beside nvcc; pip's ninja is in the environment. On Arm the CPU kernels are for one processor, and
# built on first use.
# the list is split into words on purpose
# hadolint ignore=SC2086
RUN packages=""; \
    if [ "${TORCH_VARIANT}" = cuda ]; then packages="g++ python3-dev"; \
    elif [ "$(uname -m)" != x86_64 ]; then packages="g++"; fi; \
    command -v python >/dev/null || packages="${packages} python3-venv python-is-python3"; \
    if [ -n "${packages}" ]; then \
        apt-get update && apt-get install -y --no-install-recommends ${packages} && rm -rf /var/lib/apt/lists/*; \
    fi
# OpenMP comes with torch; an image may have a user of this number already
RUN { ! getent passwd 1000 >/dev/null || userdel --remove "$(getent passwd 1000 | cut -d: -f1)"; } \
    && useradd --create-home --uid 1000 radixserve \
    && install -d -o radixserve -g radixserve /home/radixserve/.cache
COPY --from=build /opt/venv /opt/venv
# compiled kernels go where the volume keeps them; FlashInfer's are there by themselves
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/home/radixserve/.cache/triton
USER 1000:1000
WORKDIR /home/radixserve
# the default model is fetched and converted once into this directory: mount a volume to keep it
VOLUME /home/radixserve/.cache
EXPOSE 30000
STOPSIGNAL SIGTERM
# the port is the server's own: whatever follows --port on its command line
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import re, urllib.request; found = re.findall(rb'--port[\\0=](\\d+)', open('/proc/1/cmdline', 'rb').read()); urllib.request.urlopen('http://127.0.0.1:%s/health' % (found[-1].decode() if found else '30000'), timeout=4)"]
# --host stands here and not in CMD, so that it stays when flags are given; a later --host wins
ENTRYPOINT ["radixserve", "serve", "--host", "0.0.0.0"]
