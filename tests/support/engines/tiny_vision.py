"""Tiny random vision models of real architectures, and random images as their processors would prepare them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Idefics3Config,
    LlavaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from engines.interface.protocol import GenerateRequest, HostTensor, PromptImage, SamplingParams
from tests.support.engines.engine_harness import prompt_of
from tests.support.engines.tiny_models import DELTA_NET, SIZES, save_random

IMAGE = 7
START, END = 8, 9
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 10, "vision_start_token_id": START, "vision_end_token_id": END}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.15,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.15,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2.5-vl": lambda: Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2]}},
        vision_config={**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 16},
        **_QWEN_IDS,
    ),
    "qwen3-vl": lambda: Qwen3VLConfig(
        text_config={**SIZES, "head_dim": 32, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision_config={**_QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_IDS,
    ),
    "qwen3-5": lambda: Qwen3_5Config(
        text_config={
            **SIZES,
            "head_dim": 32,
            **DELTA_NET,
            "rope_parameters": {
                **_MROPE,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        vision_config={**_QWEN_VISION, "num_position_embeddings": 64},
        **_QWEN_IDS,
    ),
    "llava": lambda: LlavaConfig(
        text_config={**SIZES, "model_type": "llama"},
        vision_config={**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config={**SIZES, "model_type": "llama"}, vision_config=_SIGLIP, image_token_id=IMAGE, scale_factor=2
    ),
    "idefics3": lambda: Idefics3Config(
        text_config={**SIZES, "model_type": "llama"}, vision_config=_SIGLIP, image_token_id=IMAGE, scale_factor=2
    ),
    "gemma3": lambda: Gemma3Config(
        text_config={
            **SIZES,
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "initializer_range": 0.04,
        },
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    ),
}


@dataclass(frozen=True, slots=True)
class TinyImage:
    """`token_ids`: what stands for it in a prompt, marks around it left out."""

    token_ids: tuple[int, ...]
    tensors: dict[str, np.ndarray[Any, Any]]

    def host(self) -> dict[str, HostTensor]:
        return {name: HostTensor(a.dtype.str, a.shape, a.tobytes()) for name, a in self.tensors.items()}

    def inputs(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.tensors.items()}


def image_for(name: str, seed: int) -> TinyImage:
    """Random pixels; the Qwen models' differ in size too."""
    rng = np.random.default_rng(seed)
    if name.startswith("qwen"):
        height, width = 2 * int(rng.integers(1, 4)), 2 * int(rng.integers(1, 4))
        pixels = rng.standard_normal((height * width, 3 * 2 * 4 * 4)).astype(np.float32)
        grid = np.array([[1, height, width]], dtype=np.int64)
        return TinyImage((IMAGE,) * (height * width // 4), {"pixel_values": pixels, "image_grid_thw": grid})
    if name in ("smolvlm", "idefics3"):
        tiles = int(rng.integers(1, 4))
        pixels = rng.standard_normal((1, tiles, 3, 32, 32)).astype(np.float32)
        token_ids = tuple(token for tile in range(tiles) for token in (11 + tile, *(IMAGE,) * 4))
        mask = np.ones((1, tiles, 32, 32), dtype=np.int64)
        return TinyImage(token_ids, {"pixel_values": pixels, "pixel_attention_mask": mask})
    tokens = 4 if name == "gemma3" else 16
    return TinyImage((IMAGE,) * tokens, {"pixel_values": rng.standard_normal((1, 3, 32, 32)).astype(np.float32)})


def asking(*parts: int | TinyImage, max_tokens: int = 8, **sampling: Any) -> GenerateRequest:
    """Text of so many random tokens, and images, in their order."""
    token_ids: list[int] = []
    images: list[PromptImage] = []
    for place, part in enumerate(parts):
        if isinstance(part, int):
            token_ids += [20 + t % 280 for t in prompt_of(part, seed=place)]
            continue
        token_ids.append(START)
        digest = repr(sorted((name, array.tobytes()) for name, array in part.tensors.items()))
        images.append(PromptImage(len(token_ids), len(part.token_ids), digest, part.host()))
        token_ids += [*part.token_ids, END]
    params = SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, "logprobs": 0, **sampling})
    return GenerateRequest(f"v{next(_IDS)}", tuple(token_ids), params, images=tuple(images))


_IDS = count()


def kv_bytes(name: str, num_blocks: int) -> int:
    """Of this many blocks of 16 tokens."""
    text = CONFIGS[name]().get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = sum(kind != "linear_attention" for kind in getattr(text, "layer_types", None) or ["full_attention"] * 3)
    return num_blocks * 16 * layers * text.num_key_value_heads * 2 * int(head_dim) * 4


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    return save_random(AutoModelForImageTextToText, CONFIGS[name](), folder, seed=seed)
