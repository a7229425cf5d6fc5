#!/bin/sh
# The tests of this folder with a CUDA build of torch, on a GPU that computes nothing:
#
#   sh tests/cuda_build/run.sh VENV          all of them, slow ones too, in an environment that is made if need be
#   sh tests/cuda_build/run.sh VENV quick    those marked cuda_quick; an environment that is there is taken as it is
#
# MODERNBERT_TORCH names the torch; VENV is made anew where it has another. Where the CUDA build cannot be installed the
# tests are skipped, and this says why.
set -eu
cd "$(dirname "$0")/../.."
venv=${1:?"give the folder of the environment: sh tests/cuda_build/run.sh .venv-cuda"}
# === takes no build for CPUs, which == would
export MODERNBERT_TORCH="${MODERNBERT_TORCH:-torch===2.13.0}" MODERNBERT_LIST=cuda.txt
export NVIDIA_VISIBLE_DEVICES="${NVIDIA_VISIBLE_DEVICES:-none}" # plain pip, which brings CUDA

serves() { # VENV
    "$1/bin/python" -c 'import sys, pytest, torch, triton; sys.exit(torch.version.cuda is None)' 2>/dev/null
}

which="not gpu"
if [ "${2:-}" = quick ]; then which=cuda_quick; fi
if [ "$which" = "not gpu" ] || ! serves "$venv"; then
    if ! sh requirements/install.sh "$venv"; then
        echo "test-cuda: skipped: $MODERNBERT_TORCH with its CUDA libraries cannot be installed into $venv (see above)"
        exit 0
    fi
fi
if ! serves "$venv"; then
    echo "test-cuda: skipped: the torch in $venv is no CUDA build; remove that folder, or set MODERNBERT_TORCH"
    exit 0
fi
# FlashAttention-4 lies in a folder of its own, which one test looks into: other tests would take it, and cannot run it
flash=$venv/flash-attn-4
if [ "$which" = "not gpu" ] && ! cmp -s requirements/flash.txt "$flash/list.txt"; then
    rm -rf "$flash" "$flash.partial"
    if "$venv/bin/python" -m pip install --quiet --no-deps --require-hashes --target "$flash.partial" -r requirements/flash.txt; then
        cp requirements/flash.txt "$flash.partial/list.txt"
        mv "$flash.partial" "$flash"
    else
        echo "test-cuda: without FlashAttention-4: requirements/flash.txt cannot be installed into $flash (see above)"
    fi
fi
echo "test-cuda: $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)') in $venv"
# folders of passed tests go, or a whole run leaves 9 GB of them
CUDA_BUILD=1 exec "$venv/bin/python" -m pytest tests/cuda_build -m "$which" -p no:xdist --durations=15 -o tmp_path_retention_policy=failed
