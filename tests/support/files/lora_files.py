"""Adapters for tests: made and saved by PEFT, or written tensor by tensor."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from engines.lora.format.targets import LoraTargets
from engines.lora.format.weights import AdapterWeights, read_adapter
from tests.support.engines.tiny_models import CONFIGS

MAX_RANK = 64
MAX_BYTES = 1 << 30


def random_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()


def targets_of(name: str) -> LoraTargets:
    with torch.device("meta"):
        return LoraTargets.of(AutoModelForCausalLM.from_config(CONFIGS[name]()))


def save_with_peft(
    model: PreTrainedModel, config: LoraConfig, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """A random adapter, not the identity that a fresh one is. `model` is wrapped in place."""
    config.init_lora_weights = False
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    wrapped.to(dtype).save_pretrained(folder)


def write_adapter(folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    return folder


def write_vision_adapter(folder: Path, base: str) -> Path:
    """Of the queries of the first layer of `cluster/examples/tiny-vision`, which are as wide as the layer."""
    width, module = 128, "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    tensors = {"lora_A": torch.ones(4, width) / width, "lora_B": torch.ones(width, 4)}
    config = {"base_model_name_or_path": base, "target_modules": ["q_proj"]}
    return write_adapter(folder, config, {f"{module}.{name}.weight": tensor for name, tensor in tensors.items()})


def adapter_at(folder: Path) -> Adapter:
    digest = adapter_digest((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes())
    return Adapter(digest, str(folder))


def read(folder: Path, targets: LoraTargets, *, max_rank: int = MAX_RANK, max_bytes: int = MAX_BYTES) -> AdapterWeights:
    return read_adapter(adapter_at(folder), targets, max_rank=max_rank, max_bytes=max_bytes)


def deltas(weights: AdapterWeights) -> dict[str, torch.Tensor]:
    """scale * B A in float32 by path: [out, in], of experts [experts, out, in]."""
    return {path: pair.scale * (pair.B.float() @ pair.A.float()) for path, pair in weights.pairs.items()}


def load_with_peft(name: str, folder: Path, seed: int = 0) -> PeftModel:
    return PeftModel.from_pretrained(random_model(name, seed), str(folder)).eval()
