#!/usr/bin/env bash
# Builds the environment of one framework from the package index, anew when what it is built from has changed, and runs the
# integration tests in it:
#   tests/integrations/run.sh nemo_aligner | nemo_rl | megatron_rl | verl [arguments of pytest]
# The environment lies in $CALCLIP_ENV, by default in .venv/NAME. Checkouts that no index has are named by NEMO_ALIGNER_SRC
# (branch llama-nemotron-dev; with it GRPO is tested instead of the released PPO), NEMO_RL_SRC and MEGATRON_LM_SRC.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1
shift
folder=tests/integrations/$name
environment=${CALCLIP_ENV:-.venv/$name}
sources=$(cat pyproject.toml "$folder"/*.txt tests/integrations/run.sh | sha256sum)
if [ "$(cat "$environment/complete" 2>/dev/null)" != "$sources" ]; then
    "${PYTHON:-python3.11}" -m venv --clear "$environment"
    "$environment/bin/pip" install --quiet -r "$folder/requirements.txt" -e .
    # The frameworks themselves ask for a GPU's worth of packages that the code under test does not touch.
    if [ -f "$folder/no_deps.txt" ]; then
        "$environment/bin/pip" install --quiet --no-deps -r "$folder/no_deps.txt"
    fi
    echo "$sources" > "$environment/complete"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$environment/bin/python" -W ignore -m pytest -m integration -W ignore "$folder" "$@"
