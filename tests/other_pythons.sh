#!/bin/sh
# The quick tests under each supported Python, or under PYTHONS, that VENV is not made of:  sh tests/other_pythons.sh VENV
# They take the CUDA build of torch, with or without a GPU; each has an environment beside VENV, of 8 GB. A Python that
# this machine does not have is named, and only a test or an install that fails makes this fail.
set -eu
cd "$(dirname "$0")/.."
venv=${1:?"give the folder of the environment: sh tests/other_pythons.sh .venv"}
# === takes no build for CPUs, which == would
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
        echo "test-pythons: no Python $version here, so nothing is tested with it"
        continue
    fi
    there="$there $version"
    # all at once, since an install has one core busy; plain pip brings CUDA
    PYTHON=$found PIP_QUIET=1 NVIDIA_VISIBLE_DEVICES="${NVIDIA_VISIBLE_DEVICES:-none}" make venv VENV=".venv-$version" &
done
wait

failed=
for version in $there; do
    echo "test-pythons: Python $version"
    make test-quick VENV=".venv-$version" || failed="$failed $version" # makes again what could not be installed
done
if [ -n "$failed" ]; then
    echo "test-pythons: failed with Python$failed" >&2
    exit 1
fi
