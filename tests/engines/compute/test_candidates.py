"""Which compute paths are tried for a model, in which order, and what happens when one does not work."""

import gc
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.compute.assembly import assemble_model
from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.plain_path import PlainPath
from engines.compute.runner import ModelRunner
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.lora.apply import LoraLinear
from engines.model.loader import load_model
from tests.support.engines.engine_harness import DEVICE, engine_config, model_folder
from tests.support.engines.tiny_models import HYBRID

TRITON = {"attention": "triton", "device": DEVICE.type, "context_length": 96}
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def candidates_of(name: str, **settings: Any) -> tuple[PagedModel, Iterator[ComputePath], EngineConfig]:
    config = engine_config(name, **settings)
    model = PagedModel.of(load_model(config), config)
    return model, candidate_paths(model, config, threads=1), config


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("llama", CPU, ["NativePath"]),
        ("llama", {**CPU, "exact": True}, ["NativePath"]),
        ("llama", {**CPU, "attention": "native"}, ["NativePath"]),
        ("llama", {**CPU, "attention": "sdpa"}, ["PlainPath"]),
        ("llama", {**CPU, "attention": "sdpa", "exact": True}, ["ExactPath"]),
        ("gemma2", CPU, ["PlainPath"]),
        ("gemma2", {**CPU, "exact": True}, ["ExactPath"]),
        ("llama", TRITON, ["RecordedPath", "DevicePath"]),
        ("llama", {**TRITON, "cuda_graphs": False}, ["DevicePath"]),
        (min(HYBRID), TRITON, ["PlainPath"]),
    ],
    ids=str,
)
def test_paths_are_tried_from_the_fastest_on(name: str, settings: dict[str, Any], expected: list[str]) -> None:
    model, paths, config = candidates_of(name, **settings)
    tried = []
    for path in paths:
        tried.append(type(path).__name__)
        # Complete as it is: the trash block is there before anything is allocated.
        ModelRunner(path, config, model).check_health()
    assert tried == expected


def test_a_device_path_that_is_given_up_leaves_the_model_as_it_was() -> None:
    model, paths, _ = candidates_of("llama", **TRITON)
    before = {name: type(module) for name, module in model.loaded.model.named_modules()}
    next(paths)
    assert any(isinstance(module, LoraLinear) for module in model.loaded.model.modules())
    assert len(list(paths)) == 1
    assert {name: type(module) for name, module in model.loaded.model.named_modules()} == before


class Failing(PlainPath):
    """A path that fails in one of its steps."""

    def __init__(self, model: PagedModel, block_size: int, *, step: str) -> None:
        super().__init__(model, block_size)
        self._step = step

    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        if self._step == "raises":
            raise RuntimeError("no such instruction on this device")
        return logits.flip(-1) if self._step == "is wrong" else logits

    def warm_up(self) -> None:
        if self._step == "is cold":
            raise RuntimeError("no memory left to warm up with")


def failing(steps: Sequence[str]) -> Callable[..., Iterator[ComputePath]]:
    def paths(model: PagedModel, config: EngineConfig, *, threads: int) -> Iterator[ComputePath]:
        yield from (Failing(model, config.block_size, step=step) for step in steps)

    return paths


MESSAGES = {
    "raises": "on cpu failed, trying the next compute path: no such instruction on this device",
    "is wrong": "on cpu failed, trying the next compute path: llama: the engine's logits differ from the model's",
    "is cold": "on cpu failed, trying the next compute path: no memory left to warm up with",
}


def test_a_path_that_does_not_work_is_followed_by_the_next(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assembled = assemble_model(engine_config("llama", **CPU), failing([*MESSAGES, "works"]))
    given_up = [text for text in caplog.messages if "trying the next compute path" in text]
    assert len(given_up) == len(MESSAGES)
    for message, expected in zip(given_up, MESSAGES.values(), strict=True):
        assert expected in message
    assembled.runner.check_health()


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (["is cold", "is wrong"], pytest.raises(ModelRefused, match="logits differ from the model's own")),
        (["is wrong", "is cold"], pytest.raises(RuntimeError, match="no memory left to warm up with")),
    ],
    ids=["in the self-test", "while warming up"],
)
def test_what_the_last_path_raises_is_raised(steps: list[str], error: Any) -> None:
    with error:
        assemble_model(engine_config("llama", **CPU), failing(steps))


def test_a_kv_cache_that_is_too_small_is_no_fault_of_the_path(caplog) -> None:
    with pytest.raises(ModelRefused, match="kv_cache_bytes = 16 holds 0 tokens"):
        assemble_model(engine_config("llama", **CPU, kv_cache_bytes=16), failing(["works", "works"]))
    assert "trying the next compute path" not in caplog.text


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
def test_a_model_on_a_cpu_does_not_keep_its_file_in_memory(name: str, attention: str, tmp_path: Path) -> None:
    source = tmp_path / "a model of its own"
    shutil.copytree(model_folder(name), source)
    assembled = assemble_model(engine_config(source=str(source), attention=attention, **CPU))
    gc.collect()
    assert str(source) not in Path("/proc/self/maps").read_text()
    assembled.runner.check_health()


def test_nothing_follows_the_kernels_that_take_the_layers_out_of_the_model() -> None:
    model, paths, _ = candidates_of("llama", **CPU)
    next(paths)
    assert len(model.loaded.model.model.layers) == 0
    assert next(paths, None) is None
