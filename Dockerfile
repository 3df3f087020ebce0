# ttrain in an image:  docker build -t ttrain --build-arg TORCH_INDEX=<package index with CPU builds of torch> .
# Without the argument torch comes from pip's own index, for Linux with the CUDA libraries and 4 GB more.
# Use it:  docker run --rm -v "$PWD:/work" ttrain train.steps=100
FROM python:3.12-slim
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# Programs that test torch itself, which some builds carry, take 80 MB.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11,<2.16" && \
    rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch/test"
COPY . /source
RUN pip install --no-cache-dir /source && rm -rf /source
WORKDIR /work
ENV XDG_CACHE_HOME=/tmp/cache
ENTRYPOINT ["ttrain"]
