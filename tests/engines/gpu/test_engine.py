"""The engine on Triton kernels and recorded decode steps: the tokens of transformers and PEFT, as elsewhere."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from triton import knobs

from engines.compute.assembly import assemble_model
from engines.compute.device_candidates import row_adapters
from engines.compute.device_path import DevicePath, MakeBackend, backend_for
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.recorded_path import RecordedPath
from engines.gpu.attention import TritonBackend
from engines.gpu.graphs import Capture, CudaCapture, DecodeGraphs, Forward, Run, repeat
from engines.gpu.lora import SlotTables
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.planning.scheduler import Chunk
from engines.torch_engine import Assemble
from tests.support.engines.engine_harness import (
    DEVICE,
    DrivenEngine,
    Engines,
    adapter,
    assert_greedy,
    engine_config,
    kv_bytes,
    prompt_of,
    request,
)

SETTINGS = {"attention": "triton", "device": DEVICE.type, "context_length": 96}


class Counting(DecodeGraphs):
    """Notes how many rows each replay has."""

    def __init__(self, replayed: list[int], forward: Forward, capture: Capture, **sizes: Any) -> None:
        super().__init__(forward, capture, **sizes)
        self._replayed = replayed

    def run(self, chunks: Sequence[Chunk], *rest: Any) -> Any:
        self._replayed.append(len(chunks))
        return super().run(chunks, *rest)


def assembled(
    make_graphs: Callable[..., DecodeGraphs] = DecodeGraphs, make_backend: MakeBackend | None = None
) -> Assemble:
    """The recorded path, then the device path, with a part of them exchanged."""

    def candidates(model: PagedModel, config: EngineConfig, *, threads: int) -> Iterator[ComputePath]:
        own_backend = backend_for(config.attention, DEVICE)
        path = DevicePath(model, row_adapters(model, config), make_backend or own_backend, config.block_size)
        sizes = {"block_size": config.block_size, "width": 96 // config.block_size, "max_rows": config.max_running}

        def graphs(forward: Forward) -> DecodeGraphs:
            return make_graphs(forward, CudaCapture() if DEVICE.type == "cuda" else repeat, **sizes, device=DEVICE)

        yield RecordedPath(path, graphs)
        yield path

    return partial(assemble_model, candidates=candidates)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        "gpt-oss",
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
        pytest.param("qwen3-next", marks=pytest.mark.slow),
    ],
)
def test_each_architecture_gives_the_tokens_of_its_plain_forward(name: str, engines: Engines) -> None:
    engine = engines(name, **SETTINGS, max_step_tokens=24, max_step_tokens_decoding=19)
    requests = [request(prompt_of(length), max_tokens=6, logprobs=0) for length in (1, 17, 40)]
    for made, result in zip(requests, engine.generate(*requests), strict=True):
        assert_greedy(name, made, result)


@pytest.mark.parametrize("cuda_graphs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_adapters_and_base_in_one_batch_give_the_tokens_of_peft(cuda_graphs: bool, engines: Engines) -> None:
    engine = engines("llama", **SETTINGS, cuda_graphs=cuda_graphs)
    kinds = ("q-v", "all", "head", "embedding", "wide")
    requests = [
        request(prompt_of(20), adapter=bound, max_tokens=6, logprobs=0)
        for bound in (None, *(adapter("llama", kind) for kind in kinds))
    ]
    results = engine.generate(*requests)
    for made, result in zip(requests, results, strict=True):
        assert_greedy("llama", made, result)
    assert len({tuple(result.token_ids) for result in results}) == len(requests), "a change of nothing proves nothing"


@pytest.mark.slow
def test_preemption_and_slots_that_change_hands_change_nothing(engines: Engines) -> None:
    settings = {"kv_cache_bytes": kv_bytes("llama", 8), "max_step_tokens": 24, "max_adapters": 2}
    engine = engines("llama", **SETTINGS, **settings)
    bounds = (None, *(adapter("llama", kind) for kind in ("q-v", "all", "wide")))
    for made, result in engine.until_preempted(
        lambda: [
            request(prompt_of(length), adapter=bound, max_tokens=30, logprobs=0)
            for length, bound in zip((13, 14, 15, 16), bounds, strict=True)
        ]
    ):
        assert_greedy("llama", made, result)


def test_decoding_goes_through_graphs_but_for_adapters_that_change_more_than_linear_layers() -> None:
    replayed: list[int] = []
    assemble = assembled(partial(Counting, replayed))
    with DrivenEngine(engine_config("llama", **SETTINGS), assemble) as engine:
        for bound, expected in ((None, 3), (adapter("llama", "all"), 3), (adapter("llama", "embedding"), 0)):
            replayed.clear()
            engine.one(request(prompt_of(20), adapter=bound, max_tokens=4))
            # The first token comes from the prefill; the probe by which the harness waits is one token of the base.
            assert replayed == [1] * (expected + 1)


@pytest.mark.slow
def test_decoding_that_runs_ahead_of_the_host_gives_the_same_tokens(engines: Engines) -> None:
    stops = frozenset(range(0, 320, 9))
    kinds: list[dict[str, Any]] = [
        {"adapter": adapter("llama", "all")},
        {"temperature": 1.0, "stop_token_ids": stops},
        {"temperature": 0.9, "top_p": 0.8, "stop_token_ids": stops, "adapter": adapter("llama", "q-v")},
        {"repetition_penalty": 1.5, "temperature": 0.7, "logprobs": 2},
    ]
    found = []
    for overlap in (True, False):
        engine = engines("llama", **SETTINGS, overlap=overlap, kv_cache_bytes=kv_bytes("llama", 10))
        requests = [
            request(prompt_of(14 + index), max_tokens=8, **{"seed": index, **kinds[index % len(kinds)]})
            for index in range(6)
        ]
        found.append([result.token_ids for result in engine.generate(*requests, arrivals=[0, 0, 0, 0, 12, 16])])
    assert found[0] == found[1]
    assert any(len(token_ids) < 8 for token_ids in found[0]), "somebody should have met a stop token"


def test_more_rows_than_there_is_a_graph_for_are_computed_without() -> None:
    assemble = assembled(partial(DecodeGraphs, buckets=(1, 2)))
    with DrivenEngine(engine_config("llama", **SETTINGS), assemble) as engine:
        requests = [request(prompt_of(5, seed), max_tokens=4, logprobs=0) for seed in range(3)]
        for made, result in zip(requests, engine.generate(*requests), strict=True):
            assert_greedy("llama", made, result)


class Refusing:
    """A `Capture` that records a few times, and then no more."""

    def __init__(self, recordings: int) -> None:
        self._left = recordings

    def __call__(self, compute: Run) -> Run:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return repeat(compute)


@pytest.mark.parametrize(
    ("recordings", "message"),
    [
        (0, "failed, trying the next compute path: operation not permitted when stream is capturing"),
        (
            3,
            "failed, trying the next compute path: decode steps are not recorded as graphs: operation not permitted",
        ),
    ],
    ids=["in the self-test", "while warming up"],
)
def test_graphs_that_cannot_be_recorded_are_done_without(recordings: int, message: str, caplog) -> None:
    replayed: list[int] = []

    def make_graphs(forward: Forward, capture: Capture, **sizes: Any) -> DecodeGraphs:
        return Counting(replayed, forward, Refusing(recordings), **sizes)

    with (
        caplog.at_level(logging.WARNING),
        DrivenEngine(engine_config("llama", **SETTINGS), assembled(make_graphs)) as engine,
    ):
        replayed.clear()
        made = request(prompt_of(20), max_tokens=4, logprobs=0)
        assert_greedy("llama", made, engine.one(made))
    assert message in caplog.text
    assert replayed == []


def test_products_of_adapters_that_are_wrong_are_done_without(monkeypatch, caplog) -> None:
    add = SlotTables.add
    monkeypatch.setattr(SlotTables, "add", lambda *args: add(*args) * 1.1)
    with caplog.at_level(logging.WARNING), DrivenEngine(engine_config("llama", **SETTINGS)) as engine:
        made = request(prompt_of(20), adapter=adapter("llama", "all"), max_tokens=4, logprobs=0)
        assert_greedy("llama", made, engine.one(made))
    assert "adapters are computed one by one" in caplog.text


class Wrong(TritonBackend):
    """Computes something else."""

    def attend(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return q * 0


def test_kernels_that_compute_something_else_are_refused_where_they_are_demanded() -> None:
    assemble = assembled(make_backend=partial(Wrong, num_programs=8))
    with pytest.raises(ModelRefused, match="logits differ"):
        DrivenEngine(engine_config("llama", **SETTINGS), assemble)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a device")
@pytest.mark.parametrize("attention", ["triton", "varlen", "flashinfer"])
def test_without_a_device_they_are_refused(attention: str, monkeypatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ModelRefused, match=f"attention = '{attention}' needs a CUDA device, not cpu"):
        DrivenEngine(engine_config("llama", **{**SETTINGS, "attention": attention}))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a device")
@pytest.mark.parametrize("attention", ["varlen", "flashinfer"])
def test_libraries_are_refused_in_the_interpreter_too(attention: str) -> None:
    with pytest.raises(ModelRefused, match=f"attention = '{attention}' needs a CUDA device, not cpu"):
        DrivenEngine(engine_config("llama", **{**SETTINGS, "attention": attention}))
