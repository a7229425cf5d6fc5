#!/bin/sh
# Create, repair or update the Python environment of this project:  sh requirements/install.sh VENV
#
# It installs torch, then the pinned list with its hashes, then the project (editable), then the hook with which every
# program of the environment can import Composer. A mark file in VENV has the hash of these inputs, so a second call ends
# at once. During an install the mark is "unfinished"; an environment with that mark is emptied and created again,
# because no installer can tell which packages a kill left half written.
#
#   PYTHON              the Python to use; default: the first one found from 3.11 to 3.13
#   MODERNBERT_TORCH    the torch to install; default torch==2.13.0
#   MODERNBERT_LIST     the list to install, in this folder; default pinned.txt; image.txt lacks developers' tools
#
# If this folder is without the project around it, everything but the project is installed; a later call adds the
# project. So the layer of packages in an image is reused when only the project changes.
set -eu

venv=${1:?"give the folder of the environment: sh requirements/install.sh .venv"}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
torch=${MODERNBERT_TORCH:-torch==2.13.0}
list=$here/${MODERNBERT_LIST:-pinned.txt}
python=$venv/bin/python
mark=$venv/.modernbert-train

find_python() {
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "no Python 3.11, 3.12 or 3.13 with the venv module among: ${PYTHON:-python3 python3.13 python3.12 python3.11}." \
        "Install one (on Debian and Ubuntu with its -venv package), or name one with PYTHON=/path/to/python3." >&2
    exit 1
}

# Use plain pip if pip is configured with an index or links, or if the machine has a GPU. Elsewhere pip would download
# gigabytes of CUDA libraries that nothing uses; uv knows the index of the CPU builds.
wants_cpu_torch() {
    ! nvidia-smi >/dev/null 2>&1 && [ -z "${NVIDIA_VISIBLE_DEVICES:-}" ] &&
        ! "$python" -m pip config list | grep -E '(find.links|index.url)' >/dev/null
}

install_torch() {
    if wants_cpu_torch && "$python" -m pip install --quiet uv==0.13.8 &&
        "$python" -m uv --no-config pip install --python "$python" --torch-backend cpu "$torch"; then
        return
    fi
    "$python" -m pip install "$torch"
}

mkdir -p "$venv"
exec 9<"$venv"
if command -v flock >/dev/null; then flock 9; fi # a second call at the same time waits, and finds the environment ready

project=
if [ -e "$root/pyproject.toml" ]; then project=$root; fi
want=$({ cat "$list" "$here/install.sh" && echo "$torch $project"; } | sha256sum | cut -d ' ' -f 1)
have=$(cat "$mark" 2>/dev/null || true)
if [ "$have" = "$want" ] && "$python" -c '' 2>/dev/null; then exit 0; fi

if [ "$have" = unfinished ]; then
    echo "$venv: the last install did not finish; creating it again"
    "$(find_python)" -m venv --clear "$venv"
elif ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    echo unfinished >"$mark"
    "$base" -m venv "$venv"
elif [ -z "$have" ]; then
    echo "$venv: created by another program; installing into it, and never emptying it"
    mark=/dev/null
fi
echo unfinished >"$mark"
install_torch
"$python" -m pip install --no-deps --require-hashes -r "$list"
if [ -n "$project" ]; then
    "$python" -m pip install --no-deps --no-build-isolation -e "$project"
    "$python" -m modernbert_train.import_stubs --environment # users' files can `import composer` too
fi
echo "$want" >"$venv/.modernbert-train"
