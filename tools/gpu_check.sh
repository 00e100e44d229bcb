#!/usr/bin/env bash
# Everything that only a GPU can tell, in one go of under ten minutes on one H100 or H200, without a network.
#
#   tools/gpu_check.sh [WHEEL | FOLDER_OF_WHEELS]... [--output TABLE.md] [--only CHECK] [--dry-run] [--tiny]
#
# The machine's `python3` (or $PYTHON) must have torch. Wheels that it lacks, megatron-core first of all, are given by path
# and installed into a folder that is removed afterwards; `--dry-run` lists what is still missing. The table says what was
# measured, what was expected and whether it holds; the exit code is not 0 when something does not.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
limit=590 # seconds; the table is written after every check, so a run that is cut off has one, too

wheels=()
while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do
    if [ -d "$1" ]; then
        for wheel in "$1"/*.whl; do wheels+=("$wheel"); done
    else
        wheels+=("$1")
    fi
    shift
done
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ ${#wheels[@]} -gt 0 ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "${wheels[@]}"
fi
PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH} timeout "$limit" "$python" "$root/tools/gpu_check.py" "$@"
