#!/usr/bin/env bash
# The default tests against the newest Megatron-Core that is supported, in an environment of its own.
#
#   tools/test_mcore_latest.sh [arguments of pytest]
#
# The environment is built in MCORE_LATEST_VENV (default: .venv/mcore-latest), and again when what it is built from has
# changed, with the versions of constraints.txt but for Megatron-Core itself. What differs between its versions is handled in
# megatron_calclip/learner/versions.py.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.19.2
venv=${MCORE_LATEST_VENV:-.venv/mcore-latest}
python=${PYTHON:-python3.11}

sources=$(cat pyproject.toml constraints.txt tools/test_mcore_latest.sh | sha256sum)
if [ "$(cat "$venv/complete" 2>/dev/null)" != "$sources" ]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    grep -v '^megatron-core==' constraints.txt > "$constraints"
    # Since 0.17 it asks for Python 3.12 but runs on 3.11, and it imports triton without depending on it.
    "$venv/bin/pip" install --quiet --ignore-requires-python -c "$constraints" \
        "megatron-core==$version" triton -e '.[test]'
    echo "$sources" > "$venv/complete"
fi
venv=$(realpath "$venv")
export OMP_NUM_THREADS=1 PATH="$venv/bin:$PATH"  # launch tests start its torchrun
python -c "
from importlib.metadata import version
assert version('megatron-core') == '$version', version('megatron-core')
print('megatron-core', version('megatron-core'))"
exec python -m pytest "$@"
