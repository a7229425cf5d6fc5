#!/bin/sh
# Makes, mends or updates the Python environment of this project:  sh requirements/install.sh VENV
#
# torch first, then the pinned list with its hashes, then the project itself, editable, and what lets every program of the
# environment import Composer. A mark inside VENV holds the sum of what went in, so that a second call ends at once; while
# an install is under way it says "unfinished", and an environment found so is emptied and made again, because no
# installer can tell which packages a kill left half written.
#
#   PYTHON              the Python to build on; default: the first one found from 3.11 to 3.13
#   MODERNBERT_TORCH    the torch to install; default torch==2.13.0
#   MODERNBERT_LIST     the list to install, beside this file; default pinned.txt; image.txt has no developers' tools
#
# Where only this folder is there yet, and not the project around it, all but the project is installed; a later call
# adds it. So an image keeps its packages when nothing but the project changes.
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

# A user who told pip where packages are, and a machine with a GPU, get what plain pip gives. Elsewhere pip would fetch
# gigabytes of CUDA libraries for nothing; uv knows where the CPU builds are.
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
if command -v flock >/dev/null; then flock 9; fi # of two calls at once the second waits, and finds the work done

project=
if [ -e "$root/pyproject.toml" ]; then project=$root; fi
want=$({ cat "$list" "$here/install.sh" && echo "$torch $project"; } | sha256sum | cut -d ' ' -f 1)
have=$(cat "$mark" 2>/dev/null || true)
if [ "$have" = "$want" ] && "$python" -c '' 2>/dev/null; then exit 0; fi

if [ "$have" = unfinished ]; then
    echo "$venv: the last install did not finish; making it again"
    "$(find_python)" -m venv --clear "$venv"
elif ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    echo unfinished >"$mark"
    "$base" -m venv "$venv"
elif [ -z "$have" ]; then
    echo "$venv: made by someone else; installing into it, and never emptying it"
    mark=/dev/null
fi
echo unfinished >"$mark"
install_torch
"$python" -m pip install --no-deps --require-hashes -r "$list"
if [ -n "$project" ]; then
    "$python" -m pip install --no-deps --no-build-isolation -e "$project"
    "$python" -m modernbert_train.import_stubs --environment # `import composer` works in a user's own files too
fi
echo "$want" >"$venv/.modernbert-train"
