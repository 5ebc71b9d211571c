# An image for NVIDIA GPUs. The host needs the driver and the NVIDIA Container Toolkit, nothing else:
#   docker build -t reason_llm .
#   docker run --rm --gpus all -v "$PWD:/work" -v "$HOME/.cache/huggingface:/cache" reason_llm \
#     train configs/gsm8k_qwen2.5-1.5b_24gb.yaml
# The package contains configs/, so the command works in an empty folder; runs/ appears in /work.
FROM python:3.11-slim-bookworm

# Triton compiles a small C module at the first start; Python's headers are in the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint requirements/lock-gpu.txt '.[gpu]' \
    && useradd --create-home --uid 1000 reason \
    && mkdir /work /cache \
    && chown reason /work /cache

ENV HF_HOME=/cache
USER 1000
WORKDIR /work
ENTRYPOINT ["reason-llm"]
CMD ["--help"]
