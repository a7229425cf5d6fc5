# For machines with NVIDIA GPUs (driver 580 or newer, for CUDA 13). torch brings CUDA's libraries, so the small base image
# is enough; torch.compile needs gcc and Python's headers to build kernels at run time. NCCL loads libibverbs, which loads
# the network adapter's library from ibverbs-providers; without either NCCL silently uses TCP between machines.
# ibv_devinfo (ibverbs-utils) lists the adapters.
#   docker build -t modernbert-train .
#   docker run --gpus all --ipc=host -v "$PWD/work:/work" modernbert-train python -m modernbert_train doctor
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc git libc6-dev python3.12 python3.12-dev python3.12-venv \
        ibverbs-providers ibverbs-utils libibverbs1 librdmacm1t64 rdma-core \
    && rm -rf /var/lib/apt/lists/*

# The base image has the user ubuntu (1000).
RUN install -d -o ubuntu -g ubuntu /opt/modernbert-train /opt/venv /work
USER ubuntu
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# Packages are a separate layer: they have many gigabytes, and change less often than the project.
ENV PYTHON=python3.12 MODERNBERT_LIST=image.txt
COPY --chown=ubuntu:ubuntu requirements /opt/modernbert-train/requirements
RUN sh /opt/modernbert-train/requirements/install.sh /opt/venv

COPY --chown=ubuntu:ubuntu . /opt/modernbert-train
RUN sh /opt/modernbert-train/requirements/install.sh /opt/venv

WORKDIR /work
CMD ["python", "-m", "modernbert_train", "--help"]
