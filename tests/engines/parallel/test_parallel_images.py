"""Images in a model over several processes: the tokens of transformers' plain forward and of PEFT."""

from dataclasses import replace
from typing import Any

import pytest

from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from tests.support.engines.engine_harness import DrivenEngine
from tests.support.engines.vision_harness import assert_plain, folder, mixed, vision_adapter, with_peft

TWO: dict[str, Any] = {"tensor_parallel": 2, "attention": "sdpa", "threads": 1, "kv_cache_bytes": 4 << 20}


@pytest.mark.parametrize(
    "name", ["qwen2.5-vl", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llava", "smolvlm"))]
)
def test_images_and_adapters_in_one_batch_give_the_tokens_of_transformers_and_peft(name: str) -> None:
    """In small chunks, and with features that are computed again for each request."""
    config = EngineConfig(source=str(folder(name)), context_length=192, max_step_tokens=24, image_cache_bytes=1, **TWO)
    bound = vision_adapter(name, "language", r".*(language_model|text_model).*(q_proj|down_proj)")
    adapted = with_peft(name, bound)
    with DrivenEngine(config) as engine:
        for _ in range(2):  # the second time from the prefix cache
            requests = [*mixed(name), *(replace(made, adapter=bound) for made in mixed(name)[:3])]
            for made, result in zip(requests, engine.generate(*requests), strict=True):
                assert_plain(name, made, result, adapted if made.adapter else None)
        assert engine.stats().counters.images_encoded > 2, "there are two images"


@pytest.mark.slow
def test_a_vision_model_that_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(ModelRefused, match="tensor_parallel must be 1 for qwen3_vl_text, not 2: transformers has no"):
        DrivenEngine(EngineConfig(source=str(folder("qwen3-vl")), **TWO))
