"""How long a LoRA adapter takes to read and check: all linear layers of a 30-layer model, rank 8, bfloat16.

python tests/bench/read_adapter.py
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.files.lora_files import LoraTargets, adapter_at, read_adapter, write_adapter

SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


def main() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=30, **SIZES))
    targets = LoraTargets.of(model)
    tensors = {}
    for path, target in targets.targets.items():
        if ".layers." in path:
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(8, target.in_features).bfloat16()
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(target.out_features, 8).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        adapter = adapter_at(write_adapter(Path(folder), {"r": 8, "target_modules": "all-linear"}, tensors))
        times = []
        for _ in range(50):
            started = time.process_time()
            weights = read_adapter(adapter, targets, max_rank=64, max_bytes=1 << 30)
            times.append(time.process_time() - started)
    print(f"{len(tensors)} tensors, {weights.nbytes} bytes: best of {len(times)} {min(times) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
