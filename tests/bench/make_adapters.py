"""Random LoRA checkpoints for benches, in a store's layout.

    python tests/bench/make_adapters.py --base FOLDER --root STORE --count 8 [--ranks 4,8,16,64] [--run bench]

They lie under `<root>/<run>/sampler_weights/a0000` … and adapt every linear layer of the decoder, as small random
changes: speed does not depend on the values, and the base's replies stay what they are. About 5 MB each for a
30-layer model of width 576 at rank 8.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

DEMO_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


def shapes(base: str) -> dict[str, tuple[int, int]]:
    """(in, out) of every linear layer of the decoder, by path."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    linears = {path: module for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {path: (m.in_features, m.out_features) for path, m in linears.items() if path != "lm_head"}


def write(folder: Path, base_id: str, linears: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (inputs, outputs) in linears.items():
        for name, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.01
            tensors[f"base_model.model.{path}.lora_{name}.weight"] = values.bfloat16()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_id,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({path.rpartition(".")[2] for path in linears}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make(
    root: Path, run: str, base: str, count: int, ranks: Sequence[int], *, base_id: str = DEMO_BASE
) -> tuple[str, ...]:
    """Make those that are not there yet; their model ids."""
    linears = shapes(base)
    for index in range(count):
        folder = root / run / "sampler_weights" / f"a{index:04d}"
        if not folder.exists():
            write(folder, base_id, linears, ranks[index % len(ranks)], seed=index)
    return tuple(f"tinker://{run}/sampler_weights/a{index:04d}" for index in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the base model's folder")
    parser.add_argument("--base-id", default=DEMO_BASE)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--run", default="bench")
    parser.add_argument("--ranks", default="8", help="taken in turn")
    options = parser.parse_args()
    ranks = [int(rank) for rank in options.ranks.split(",")]
    make(options.root, options.run, options.base, options.count, ranks, base_id=options.base_id)
    print(f"{options.count} checkpoints under {options.run}/sampler_weights/")


if __name__ == "__main__":
    main()
