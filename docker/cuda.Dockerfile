# docker build -f docker/cuda.Dockerfile -t gleaner-cuda .
# docker run --rm --gpus all --shm-size=16g gleaner-cuda
# The driver is the host's, R580 or later (CUDA 13); the CUDA libraries come with the wheels of torch and vLLM.
FROM python:3.12-slim-bookworm

# Triton compiles with gcc against Python's headers, which this image has; pycosat has no wheel.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev make wget && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /gleaner
COPY . .
RUN make setup GPU=1
ENV PATH=/gleaner/.venv/bin:$PATH PYTHONPATH=/gleaner
CMD ["make", "smoke"]
