"""Adapters under the names of other exporters and of older versions of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    InklingConfig,
    NemotronHConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
)
from transformers.models.qwen3_5 import Qwen3_5ForConditionalGeneration

from engines.interface.errors import AdapterRefused
from engines.lora.format.targets import LoraTargets
from tests.support.files.lora_files import deltas, load_with_peft, read, targets_of, write_adapter

R, EXPERTS, HIDDEN, INNER = 4, 4, 64, 48  # as in tiny_models
LAYER = "base_model.model.model.layers.0"


def _pair(module: str, inputs: int, outputs: int, *lead: int, seed: int = 0, r: int = R) -> dict[str, torch.Tensor]:
    """A and B with separate leading sizes, if two are given."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (lead[:1], lead[1:]) if lead else ((), ())
    return {
        f"{module}.lora_A.weight": torch.randn(*a, r, inputs, generator=generator),
        f"{module}.lora_B.weight": torch.randn(*b, outputs, r, generator=generator),
    }


def _delta(tensors: dict[str, torch.Tensor], module: str, scale: float = 2.0) -> torch.Tensor:
    return scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]


def _single_experts() -> dict[str, torch.Tensor]:
    tensors = dict[str, torch.Tensor]()
    for layer in range(3):
        for index in range(EXPERTS):
            expert = f"base_model.model.model.layers.{layer}.mlp.experts.{index}"
            tensors |= _pair(f"{expert}.gate_proj", HIDDEN, INNER, seed=3 * index)
            tensors |= _pair(f"{expert}.up_proj", HIDDEN, INNER, seed=3 * index + 1)
            tensors |= _pair(f"{expert}.down_proj", INNER, HIDDEN, seed=3 * index + 2)
    return tensors


def test_single_experts_of_transformers_4_are_applied_as_peft_converts_them(tmp_path: Path) -> None:
    write_adapter(tmp_path, {"target_modules": ["gate_proj", "up_proj", "down_proj"]}, _single_experts())
    ours = deltas(read(tmp_path, targets_of("qwen3-moe")))
    wrappers = [
        (name.replace(".base_layer", ""), layer)
        for name, layer in load_with_peft("qwen3-moe", tmp_path).get_base_model().named_modules()
        if isinstance(layer, ParamWrapper)
    ]
    assert len(wrappers) == len(ours) == 6
    for name, layer in wrappers:
        expected = layer.get_delta_weight("default")
        torch.testing.assert_close(ours[f"{name}.{layer.parameter_name}"], expected, rtol=1e-5, atol=1e-5)


def test_what_peft_saves_after_converting_single_experts_is_the_same_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "old", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}, _single_experts())
    load_with_peft("qwen3-moe", tmp_path / "old").save_pretrained(tmp_path / "new")
    targets = targets_of("qwen3-moe")
    old, new = deltas(read(tmp_path / "old", targets)), deltas(read(tmp_path / "new", targets))
    assert old.keys() == new.keys()
    for path, delta in old.items():
        torch.testing.assert_close(new[path], delta, rtol=1e-5, atol=1e-5)


def test_rank_stabilised_single_experts_keep_the_scale_they_were_trained_with(tmp_path: Path) -> None:
    """PEFT doubles rank and alpha of the fused gate and up, which makes it alpha / sqrt(r) times the root of two."""
    tensors = _single_experts()
    write_adapter(tmp_path, {"use_rslora": True}, tensors)
    ours = deltas(read(tmp_path, targets_of("qwen3-moe")))["model.layers.0.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(ours[3, :INNER], _delta(tensors, f"{LAYER}.mlp.experts.3.gate_proj", 8 / R**0.5))


def test_a_missing_single_expert_is_refused(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in _single_experts().items() if "layers.1.mlp.experts.2.up" not in name}
    write_adapter(tmp_path, {}, tensors)
    with pytest.raises(AdapterRefused, match="is one of 3 adapted experts; all 4 of them must be"):
        read(tmp_path, targets_of("qwen3-moe"))


@pytest.mark.parametrize("shared", ["none", "A", "B", "both"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_three_dimensional_experts_are_gate_down_and_up(name: str, shared: str, tmp_path: Path) -> None:
    inner, path = (96 if name == "gpt-oss" else INNER), f"{LAYER.replace('0', '1')}.mlp.experts"
    lead = {"none": (EXPERTS, EXPERTS), "A": (1, EXPERTS), "B": (EXPERTS, 1), "both": (1, 1)}[shared]
    tensors = _pair(f"{path}.w1", HIDDEN, inner, *lead, seed=1) | _pair(f"{path}.w3", HIDDEN, inner, *lead, seed=2)
    tensors |= _pair(f"{path}.w2", inner, HIDDEN, *lead, seed=3)
    ours = deltas(read(write_adapter(tmp_path, {}, tensors), targets_of(name)))
    gate_up = ours["model.layers.1.mlp.experts.gate_up_proj"].expand(EXPERTS, -1, -1)
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if name == "gpt-oss" else gate_up.chunk(2, dim=1)
    for found, projection in ((gate, "w1"), (up, "w3"), (ours["model.layers.1.mlp.experts.down_proj"], "w2")):
        expected = _delta(tensors, f"{path}.{projection}")
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=1e-5)


def test_the_rank_of_three_dimensional_experts_need_not_be_that_of_the_configuration(tmp_path: Path) -> None:
    """That exporter divides the rank among the active experts and keeps the scale."""
    tensors = _pair(f"{LAYER}.mlp.experts.w2", INNER, HIDDEN, EXPERTS, EXPERTS, r=1)
    weights = read(write_adapter(tmp_path, {}, tensors), targets_of("qwen3-moe"))
    assert weights.rank == 1
    assert weights.pairs["model.layers.0.mlp.experts.down_proj"].scale == 2.0


def test_an_adapter_of_the_gate_alone_leaves_up_as_it_is(tmp_path: Path) -> None:
    tensors = _pair(f"{LAYER}.mlp.experts.w1", HIDDEN, INNER, EXPERTS, EXPERTS)
    ours = deltas(read(write_adapter(tmp_path, {}, tensors), targets_of("qwen3-moe")))
    (gate_up,) = ours.values()
    torch.testing.assert_close(gate_up[:, :INNER], _delta(tensors, f"{LAYER}.mlp.experts.w1"))
    assert not gate_up[:, INNER:].any()


@pytest.mark.parametrize("name", ["unembed_tokens", "model.unembed_tokens", "lm_head", "language_model.lm_head"])
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_unembed_tokens_is_the_output_head(name: str, model: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _pair(f"base_model.model.{name}", HIDDEN, 320))
    assert set(read(tmp_path, targets_of(model)).pairs) == {"lm_head"}


def test_attn_is_self_attn(tmp_path: Path) -> None:
    write_adapter(tmp_path, {"target_modules": ["q_proj"]}, _pair(f"{LAYER}.attn.q_proj", HIDDEN, 64))
    assert set(read(tmp_path, targets_of("gpt-oss")).pairs) == {"model.layers.0.self_attn.q_proj"}


def test_names_without_peft_s_prefix_are_understood(tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _pair("model.layers.0.self_attn.v_proj", HIDDEN, 64))
    assert set(read(tmp_path, targets_of("llama")).pairs) == {"model.layers.0.self_attn.v_proj"}


def test_the_same_module_with_and_without_prefix_is_refused(tmp_path: Path) -> None:
    pair = _pair("model.layers.0.self_attn.v_proj", HIDDEN, 64)
    write_adapter(tmp_path, {}, pair | {f"base_model.model.{name}": tensor for name, tensor in pair.items()})
    with pytest.raises(AdapterRefused, match="twice"):
        read(tmp_path, targets_of("llama"))


def test_two_names_of_one_module_are_refused(tmp_path: Path) -> None:
    pair = _pair("base_model.model.lm_head", HIDDEN, 320) | _pair("base_model.model.model.unembed_tokens", HIDDEN, 320)
    with pytest.raises(AdapterRefused, match="as another module in the file does"):
        read(write_adapter(tmp_path, {}, pair), targets_of("llama"))


_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def _qwen3_5() -> LoraTargets:
    config = Qwen3_5Config(
        text_config={
            **_TEXT,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    )
    with torch.device("meta"):
        return LoraTargets.of(Qwen3_5ForConditionalGeneration(config))


def test_separate_in_projections_are_joined_where_the_model_fuses_them(tmp_path: Path) -> None:
    module = f"{LAYER}.linear_attn"
    tensors = _pair(f"{module}.in_proj_q", HIDDEN, 32, seed=1) | _pair(f"{module}.in_proj_k", HIDDEN, 32, seed=2)
    tensors |= _pair(f"{module}.in_proj_v", HIDDEN, 32, seed=3)
    weights = read(write_adapter(tmp_path, {}, tensors), _qwen3_5())
    expected = torch.cat([_delta(tensors, f"{module}.in_proj_{which}") for which in "qkv"])
    assert weights.rank == 3 * R
    found = deltas(weights)["model.language_model.layers.0.linear_attn.in_proj_qkv"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_scales_of_joined_projections_may_differ(tmp_path: Path) -> None:
    module = f"{LAYER}.linear_attn"
    tensors = _pair(f"{module}.in_proj_q", HIDDEN, 32, seed=1) | _pair(f"{module}.in_proj_v", HIDDEN, 32, seed=3)
    bfloat16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_adapter(tmp_path, {"alpha_pattern": {"in_proj_v": 1.2}}, bfloat16)
    found = deltas(read(tmp_path, _qwen3_5()))["model.language_model.layers.0.linear_attn.in_proj_qkv"]
    floats = {name: tensor.float() for name, tensor in bfloat16.items()}
    torch.testing.assert_close(found[:32], _delta(floats, f"{module}.in_proj_q"), rtol=1e-5, atol=1e-5)
    assert not found[32:64].any()
    torch.testing.assert_close(found[64:], _delta(floats, f"{module}.in_proj_v", 0.3), rtol=1e-5, atol=1e-5)


def test_a_part_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _pair(f"{LAYER}.linear_attn.in_proj_q", HIDDEN, 31))
    with pytest.raises(AdapterRefused, match=r"do not fit .* 64 inputs and 32 outputs"):
        read(tmp_path, _qwen3_5())


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""])
def test_the_language_model_of_a_vision_model_is_found_under_any_prefix(prefix: str, tmp_path: Path) -> None:
    tensors = _pair(f"base_model.model.{prefix}layers.3.self_attn.q_proj", HIDDEN, 128)
    write_adapter(tmp_path, {"target_modules": ["q_proj"]}, tensors)
    assert set(read(tmp_path, _qwen3_5()).pairs) == {"model.language_model.layers.3.self_attn.q_proj"}


def test_a_vision_tower_is_found_under_its_old_prefix(tmp_path: Path) -> None:
    config = Qwen2VLConfig(text_config=_TEXT, vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64})
    with torch.device("meta"):
        targets = LoraTargets.of(AutoModelForImageTextToText.from_config(config))
    write_adapter(tmp_path, {}, _pair("base_model.model.visual.blocks.0.attn.proj", 32, 32))
    assert set(read(tmp_path, targets).pairs) == {"model.visual.blocks.0.attn.proj"}


def _nemotron() -> LoraTargets:
    config = NemotronHConfig(
        vocab_size=320,
        hidden_size=64,
        layers_block_type=["mamba", "moe", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        n_routed_experts=4,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    with torch.device("meta"):
        return LoraTargets.of(AutoModelForCausalLM.from_config(config))


def test_experts_without_a_gate_have_up_first_and_an_empty_third(tmp_path: Path) -> None:
    path = "base_model.model.backbone.layers.1.mixer.experts"
    tensors = _pair(f"{path}.w1", HIDDEN, INNER, 4, 4) | _pair(f"{path}.w2", INNER, HIDDEN, 4, 4)
    tensors |= {f"{path}.w3.lora_A.weight": torch.empty(0, R, 0), f"{path}.w3.lora_B.weight": torch.empty(0, 0, R)}
    ours = deltas(read(write_adapter(tmp_path, {}, tensors), _nemotron()))
    assert set(ours) == {"model.layers.1.mixer.experts.up_proj", "model.layers.1.mixer.experts.down_proj"}
    torch.testing.assert_close(ours["model.layers.1.mixer.experts.up_proj"], _delta(tensors, f"{path}.w1"))


def test_gate_and_x_of_mamba_are_the_first_rows_of_its_in_projection(tmp_path: Path) -> None:
    path = "base_model.model.backbone.layers.0.mixer"
    tensors = _pair(f"{path}.gate_proj", HIDDEN, 64, seed=1) | _pair(f"{path}.x_proj", HIDDEN, 64, seed=2)
    found = deltas(read(write_adapter(tmp_path, {}, tensors), _nemotron()))["model.layers.0.mixer.in_proj"]
    expected = torch.cat([_delta(tensors, f"{path}.gate_proj"), _delta(tensors, f"{path}.x_proj")])
    torch.testing.assert_close(found[:128], expected, rtol=1e-5, atol=1e-5)
    assert not found[128:].any()


def _inkling() -> LoraTargets:
    text = {**_TEXT, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_intermediate_size": 48}
    config = InklingConfig(text_config={**text, "n_routed_experts": 4, "n_shared_experts": 2})
    with torch.device("meta"):
        return LoraTargets.of(AutoModelForImageTextToText.from_config(config))


def test_a_fused_gate_and_up_is_split_where_the_model_keeps_them_apart(tmp_path: Path) -> None:
    path = "base_model.model.language_model.layers.0.mlp.gate_up_proj"
    tensors = _pair(path, HIDDEN, 192)
    ours = deltas(read(write_adapter(tmp_path, {}, tensors), _inkling()))
    gate, up = (ours[f"model.language_model.layers.0.mlp.{name}"] for name in ("gate_proj", "up_proj"))
    torch.testing.assert_close(torch.cat([gate, up]), _delta(tensors, path))


def test_a_fused_gate_and_up_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _pair("base_model.model.language_model.layers.0.mlp.gate_up_proj", HIDDEN, 194))
    with pytest.raises(AdapterRefused, match="which 2 modules do not share evenly"):
        read(tmp_path, _inkling())


def test_names_of_raw_checkpoints_are_understood(tmp_path: Path) -> None:
    layer = "base_model.model.language_model.layers.0.attn"
    tensors = _pair(f"{layer}.wk_dv", HIDDEN, 2048) | _pair("base_model.model.language_model.lm_head", HIDDEN, 320)
    pairs = read(write_adapter(tmp_path, {}, tensors), _inkling()).pairs
    assert set(pairs) == {"model.language_model.layers.0.self_attn.k_proj", "lm_head"}


def test_shared_experts_side_by_side_are_taken_apart(tmp_path: Path) -> None:
    path = "base_model.model.language_model.layers.1.mlp.shared_experts"
    tensors = _pair(f"{path}.w1", HIDDEN, 2 * INNER, seed=1) | _pair(f"{path}.w2", 2 * INNER, HIDDEN, seed=2)
    ours = deltas(read(write_adapter(tmp_path, {}, tensors), _inkling()))
    gate, down = (
        ours[f"model.language_model.layers.1.mlp.shared_experts.{name}"] for name in ("gate_proj", "down_proj")
    )
    torch.testing.assert_close(gate.flatten(0, 1), _delta(tensors, f"{path}.w1"), rtol=1e-5, atol=1e-5)
    side_by_side = down.transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(side_by_side, _delta(tensors, f"{path}.w2"), rtol=1e-5, atol=1e-5)
