# For machines with NVIDIA GPUs (driver 580 or newer, for CUDA 13). CUDA's libraries come with torch, so the small base
# is enough; gcc and Python's headers are for the kernels that torch.compile builds at run time. NCCL loads libibverbs,
# and that the library for the card out of ibverbs-providers; without either it uses TCP between machines and does not
# say so. ibv_devinfo (ibverbs-utils) shows what it would find.
#   docker build -t modernbert-train .
#   docker run --gpus all --ipc=host -v "$PWD/work:/work" modernbert-train python -m modernbert_train doctor
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc git libc6-dev python3.12 python3.12-dev python3.12-venv \
        ibverbs-providers ibverbs-utils libibverbs1 librdmacm1t64 rdma-core \
    && rm -rf /var/lib/apt/lists/*

# The user ubuntu (1000) comes with the base image.
RUN install -d -o ubuntu -g ubuntu /opt/modernbert-train /opt/venv /work
USER ubuntu
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# The packages first: they are many gigabytes, and change less often than the project.
ENV PYTHON=python3.12 MODERNBERT_LIST=image.txt
COPY --chown=ubuntu:ubuntu requirements /opt/modernbert-train/requirements
RUN sh /opt/modernbert-train/requirements/install.sh /opt/venv

COPY --chown=ubuntu:ubuntu . /opt/modernbert-train
RUN sh /opt/modernbert-train/requirements/install.sh /opt/venv

WORKDIR /work
CMD ["python", "-m", "modernbert_train", "--help"]
