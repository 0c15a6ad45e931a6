# docker build -f docker/cpu.Dockerfile -t gleaner-cpu .
# docker run --rm --shm-size=2g gleaner-cpu
FROM python:3.11-slim-bookworm

# A C compiler, since reasoning_gym imports pycosat, which has no wheel; and make.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make && rm -rf /var/lib/apt/lists/*

WORKDIR /gleaner
COPY . .
RUN make setup
CMD ["make", "demo"]
