"""Adapters that PEFT saved are read as PEFT applies them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper
from transformers import PreTrainedModel

from engines.lora.format.targets import LoraTargets, TargetKind
from tests.support.files.lora_files import deltas, load_with_peft, random_model, read, save_with_peft, targets_of

CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "q and v only": ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4}),
    "all linear layers": ("llama", {"target_modules": "all-linear", "r": 8, "lora_alpha": 12}),
    "a regular expression": ("llama", {"target_modules": r".*\.(?:q|o)_proj|model\.layers\.[01]\.mlp\.\w+_proj"}),
    "rank-stabilised": ("qwen3", {"target_modules": "all-linear", "r": 3, "lora_alpha": 7, "use_rslora": True}),
    "patterns of ranks and alphas": (
        "qwen2",
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "r": 4,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"(layers\.[02]\..*)?k_proj": 6, "down_proj": 3},
            "alpha_pattern": {r".*\.[02]\.mlp\.\w+": 5, "model.layers.2.self_attn.q_proj": 1, "q_proj": 3},
            "use_rslora": True,
        },
    ),
    "some layers": ("mistral", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]}),
    "some layers by pattern": (
        "llama",
        {"target_modules": ["o_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    ),
    "excluded modules": ("llama", {"target_modules": "all-linear", "exclude_modules": ["v_proj", "down_proj"]}),
    "excluded by expression": ("llama", {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"}),
    "the output head": ("llama", {"target_modules": ["lm_head", "q_proj"], "r": 5}),
    "the embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"], "r": 5}),
    "an embedding that scales": ("gemma3", {"target_modules": ["embed_tokens", "v_proj"], "r": 5}),
    "tied head": ("llama-tied", {"target_modules": ["lm_head", "gate_proj"]}),
    "tied embedding": ("llama-tied", {"target_modules": ["embed_tokens"]}),
    "weights of linear layers as parameters": (
        "llama",
        {
            "target_modules": ["k_proj"],
            "target_parameters": ["q_proj.weight", "layers.1.mlp.up_proj.weight"],
            "alpha_pattern": {"q_proj": 100, "up_proj.weight": 3},
        },
    ),
    "multi-head latent attention": ("deepseek-v3", {"target_modules": "all-linear", "r": 2}),
    "experts": ("qwen3-moe", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 3}),
    "one parameter of experts": ("qwen3-moe", {"target_parameters": ["experts.down_proj"], "r": 3, "lora_alpha": 4}),
    "experts, router and attention": (
        "qwen3-moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["gate_up_proj", "gate.weight"],
            "rank_pattern": {"experts.gate_up_proj": 5},
            "alpha_pattern": {"gate": 100, r"mlp\.gate\.weight": 3},
            "use_rslora": True,
        },
    ),
    "transposed experts": (
        "gpt-oss",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
            "r": 3,
        },
    ),
}


def _delta_in_peft(layer: LoraLayer) -> torch.Tensor:
    """As [out, in], of experts [experts, out, in]."""
    delta = layer.get_delta_weight("default")
    if isinstance(layer, Embedding):
        return delta.t()
    is_transposed = isinstance(layer, ParamWrapper) and delta.ndim == 3 and not layer._did_swap_in_out_features
    return delta.transpose(1, 2) if is_transposed else delta


def _deltas_in_peft(model: PeftModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            path = name.replace(".base_layer", "")
            if isinstance(layer, ParamWrapper) and layer.parameter_name != "weight":  # experts
                path = f"{path}.{layer.parameter_name}"
            found[path] = _delta_in_peft(layer)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_module_gets_the_change_that_peft_gives_it(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, fields = CASES[case]
    save_with_peft(random_model(name), LoraConfig(task_type="CAUSAL_LM", **fields), tmp_path, dtype)
    ours = deltas(read(tmp_path, targets_of(name)))
    peft = _deltas_in_peft(load_with_peft(name, tmp_path))
    assert ours.keys() == peft.keys()
    for path, expected in peft.items():
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(ours[path], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_model_with_the_changes_added_computes_what_the_peft_model_computes(case: str, tmp_path: Path) -> None:
    name, fields = CASES[case]
    save_with_peft(random_model(name), LoraConfig(task_type="CAUSAL_LM", **fields), tmp_path)
    model = random_model(name)
    if model.config.tie_word_embeddings:  # PEFT changes one side only
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    _add(model, deltas(read(tmp_path, LoraTargets.of(model))))
    ids = torch.randint(0, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_with_peft(name, tmp_path)(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert (random_model(name)(input_ids=ids).logits - expected).abs().max() > 1e-2


def _add(model: PreTrainedModel, changes: Mapping[str, torch.Tensor]) -> None:
    targets = LoraTargets.of(model).targets
    with torch.no_grad():
        for path, delta in changes.items():
            module_path, _, name = path.rpartition(".")
            if targets[path].kind is TargetKind.EXPERTS:
                experts = model.get_submodule(module_path)
                getattr(experts, name).add_(delta.transpose(1, 2) if experts.is_transposed else delta)
            else:
                is_embedding = targets[path].kind is TargetKind.EMBEDDING
                model.get_submodule(path).weight.add_(delta.t() if is_embedding else delta)
