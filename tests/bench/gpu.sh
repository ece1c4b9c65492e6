#!/usr/bin/env bash
# Everything that needs a CUDA device, in one go of under 8 minutes: the kernels and the engine on them are compared
# with their references, then timed. Needs torch, transformers, peft, safetensors, hypothesis and pytest; no Ray, no
# network.
#
#   tests/bench/gpu.sh [OUTPUT_FOLDER]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
output=${1:-$(mktemp -d)}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

timeout 150 "$python" -m pytest -q --no-header -p no:cacheprovider -o addopts= tests/engines/gpu 2>&1 | tee "$output/gpu-parity.txt"
parity=${PIPESTATUS[0]}
timeout 330 "$python" tests/bench/gpu.py --minutes 4.5 2>&1 | tee "$output/gpu-timing.txt"
timing=${PIPESTATUS[0]}
echo "parity: exit $parity, timing: exit $timing; both outputs are in $output"
exit $((parity || timing))
