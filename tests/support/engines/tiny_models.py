"""Tiny random models of real architectures, saved as ordinary folders. Nothing is downloaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB = 320

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # The usual 0.02 gives logits so flat that a wrong token would not show.
    "initializer_range": 0.15,
}

# Tied embeddings, scaled up: with larger weights the logits would all sit at the final soft cap.
_GEMMA = {**SIZES, "initializer_range": 0.04, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}

DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=32),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=24),
    "gemma2": lambda: Gemma2Config(**_GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
    "gpt-oss": lambda: GptOssConfig(
        **SIZES, head_dim=16, sliding_window=24, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "qwen3-5": lambda: Qwen3_5TextConfig(**SIZES, **DELTA_NET, head_dim=32),
    "qwen3-next": lambda: Qwen3NextConfig(
        **SIZES,
        **DELTA_NET,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    ),
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
}

HYBRID = frozenset({"qwen3-5", "qwen3-next", "lfm2"})
"""Those with layers that carry a state from token to token."""


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    return save_random(AutoModelForCausalLM, CONFIGS[name](), folder, seed=seed)


def save_random(kind: Any, config: PreTrainedConfig, folder: Path, *, seed: int) -> Path:
    """A random model of this architecture in `folder`, float32. `kind`: the class of transformers that makes it."""
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norm weights and biases start at 1 and 0; a mistake in them would not show.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if parameter_name.endswith("sinks"):
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
