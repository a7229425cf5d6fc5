#!/bin/sh
# The tests of this folder in an environment of their own, with the CUDA build of torch:  sh tests/cuda_build/run.sh VENV
# Where that cannot be had the tests are skipped, and this says why.
set -eu
cd "$(dirname "$0")/../.."
venv=${1:?"give the folder of the environment: sh tests/cuda_build/run.sh .venv-cuda"}
# === takes no build for CPUs, which == would
export MODERNBERT_TORCH="${MODERNBERT_TORCH:-torch===2.13.0}" MODERNBERT_LIST=cuda.txt
export NVIDIA_VISIBLE_DEVICES="${NVIDIA_VISIBLE_DEVICES:-none}" # plain pip, which brings CUDA
if ! sh requirements/install.sh "$venv"; then
    echo "test-cuda: skipped: $MODERNBERT_TORCH with its CUDA libraries cannot be installed into $venv (see above)"
    exit 0
fi
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    echo "test-cuda: skipped: the torch in $venv is no CUDA build; remove that folder, or set MODERNBERT_TORCH"
    exit 0
fi
CUDA_BUILD=1 exec "$venv/bin/python" -m pytest tests/cuda_build
