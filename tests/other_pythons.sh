#!/bin/sh
# Run the quick tests under each supported Python (or those of PYTHONS) except VENV's:  sh tests/other_pythons.sh VENV
# They use the CUDA build of torch, with or without a GPU. Each Python gets an environment of 8 GB next to VENV. A Python
# that is not installed is reported and skipped; a failing install or test fails this script.
set -eu
cd "$(dirname "$0")/.."
venv=${1:?"give the folder of the environment: sh tests/other_pythons.sh .venv"}
# === excludes the CPU build, which == accepts
export MODERNBERT_TORCH="${MODERNBERT_TORCH:-torch===2.13.0}"

is_version() { # PYTHON VERSION
    "$1" -c "import sys, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null
}

there=
for version in ${PYTHONS:-3.11 3.12 3.13}; do
    if is_version "$venv/bin/python" "$version"; then continue; fi
    found=
    for python in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python3; do
        if [ -z "$found" ] && is_version "$python" "$version"; then found=$python; fi
    done
    if [ -z "$found" ]; then
        echo "test-pythons: Python $version is not installed, so it is not tested"
        continue
    fi
    there="$there $version"
    # in parallel, since an install uses one core; plain pip installs CUDA
    PYTHON=$found PIP_QUIET=1 NVIDIA_VISIBLE_DEVICES="${NVIDIA_VISIBLE_DEVICES:-none}" make venv VENV=".venv-$version" &
done
wait

failed=
for version in $there; do
    echo "test-pythons: Python $version"
    make test-quick VENV=".venv-$version" || failed="$failed $version" # repeats an install that failed
done
if [ -n "$failed" ]; then
    echo "test-pythons: failed with Python$failed" >&2
    exit 1
fi
