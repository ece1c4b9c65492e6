"""Engines over tiny vision models, requests with images, and transformers' plain forward over them."""

import inspect
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForImageTextToText

from engines.interface.config import EngineConfig
from engines.interface.protocol import Adapter, GenerateRequest
from tests.support.engines import tiny_vision
from tests.support.engines.engine_harness import DrivenEngine, Result
from tests.support.engines.tiny_vision import IMAGE, asking, image_for
from tests.support.files.lora_files import adapter_at, save_with_peft

_FOLDER = tempfile.TemporaryDirectory(prefix="vision-tests-")


@cache
def folder(name: str) -> Path:
    return tiny_vision.save(name, Path(_FOLDER.name) / name)


@cache
def plain(name: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder(name)).eval()


class VisionEngines:
    """Engines by model and settings, closed together."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, str], DrivenEngine] = {}

    def __call__(self, name: str, **settings: Any) -> DrivenEngine:
        key = (name, repr(sorted(settings.items())))
        if key not in self._started:
            hard = {"threads": 1, "kv_cache_bytes": 8 << 20, "max_running": 16, "context_length": 192, **settings}
            self._started[key] = DrivenEngine(EngineConfig(source=str(folder(name)), **hard))
        return self._started[key]

    def close(self) -> None:
        for engine in self._started.values():
            engine.close()


@torch.inference_mode()
def assert_plain(name: str, made: GenerateRequest, result: Result, model: Any = None) -> None:
    """Each token is the likeliest after those before it, by the plain forward over the whole text with its images. A
    plain forward takes a sampled image token for an image: what comes from there on is not compared.
    """
    assert result.error is None
    assert len(result.token_ids) == made.sampling.max_tokens
    count = result.token_ids.index(IMAGE) + 1 if IMAGE in result.token_ids else len(result.token_ids)
    assert count > 1
    text = [*made.prompt_token_ids, *result.token_ids[: count - 1]]
    rows = torch.log_softmax(plain_logits(model or plain(name), made, text), dim=-1)[len(made.prompt_token_ids) - 1 :]
    own = rows[torch.arange(count), result.token_ids[:count]]
    assert (rows.amax(dim=-1) - own).max() < 1e-4
    assert [score.logprob for score in result.logprobs[:count]] == pytest.approx(own.tolist(), abs=3e-4)


@torch.inference_mode()
def plain_logits(model: Any, made: GenerateRequest, text: Sequence[int]) -> torch.Tensor:
    """Of one plain forward over a text that begins with the request's prompt."""
    ids = torch.tensor([text])
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    takes = inspect.signature(model.model.forward).parameters
    types = (ids == IMAGE).int()
    inputs = {kind: types for kind in ("mm_token_type_ids", "token_type_ids") if kind in takes}
    tensors = _tensors(made)
    inputs |= {
        "attention_mask": torch.ones_like(ids),
        **{n: t.to(model.dtype) if t.is_floating_point() else t for n, t in tensors.items()},
    }
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    return logits.float()


def _tensors(made: GenerateRequest) -> dict[str, torch.Tensor]:
    """All images of a request as one call of the model takes them."""
    if not made.images:
        return {}
    host = [{name: _torch(tensor) for name, tensor in image.tensors.items()} for image in made.images]
    names = host[0].keys()
    has_tiles = "pixel_attention_mask" in names  # those of all images stand in one row
    return {name: torch.cat([h[name] for h in host], dim=int(has_tiles)) for name in names}


def _torch(tensor: Any) -> torch.Tensor:
    found = torch.frombuffer(bytearray(tensor.data), dtype={"<f4": torch.float32, "<i8": torch.int64}[tensor.dtype])
    return found.view(tensor.shape)


def mixed(name: str) -> list[GenerateRequest]:
    """Text alone, one image, two images, an image at the beginning, at the end."""
    first, second = image_for(name, 1), image_for(name, 2)
    return [
        asking(17),
        asking(5, first, 9),
        asking(3, first, 4, second, 6),
        asking(first, 12),
        asking(21, second),
        asking(40),
    ]


def seen(result: Result) -> object:
    return result.token_ids, result.logprobs, result.error


def vision_adapter(name: str, kind: str, target_modules: str) -> Adapter:
    place = Path(_FOLDER.name) / f"{name}-{kind}"
    base = AutoModelForImageTextToText.from_pretrained(folder(name))
    torch.manual_seed(1)
    save_with_peft(base, LoraConfig(r=4, target_modules=target_modules), place)
    return adapter_at(place)


def with_peft(name: str, bound: Adapter) -> Any:
    """The plain model with an adapter on it."""
    base = AutoModelForImageTextToText.from_pretrained(folder(name))
    return PeftModel.from_pretrained(base, bound.directory).eval().base_model.model
