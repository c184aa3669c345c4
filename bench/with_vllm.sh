#!/usr/bin/env bash
# Trains the tiny model on two stock vLLM servers behind the proxy; bench/with_vllm.py says what is checked.
#
#   bench/with_vllm.sh [--steps N] [--passes ours folder mirror]
#
# The first run makes vLLM's environment (3.5 GB, minutes) in ${VLLM_VENV:-~/.cache/async-grpo/vllm}; PYTHON names ours.
set -euo pipefail
python=${PYTHON:-python}
"$python" "$(dirname "$0")/peers.py" vllm >/dev/null
exec "$python" "$(dirname "$0")/with_vllm.py" "$@"
