"""One model over several processes: the tokens of transformers and PEFT, and nothing left when one of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.compute.assembly import assemble_model
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.plain_path import PlainPath
from engines.interface.config import EngineConfig
from engines.interface.errors import AdapterRefused, EngineError, EngineStopped, ModelRefused
from engines.interface.protocol import GenerateRequest, PromptImage, SamplingParams
from engines.lora.format.pairs import LoraPair
from engines.lora.shards import Shards
from engines.parallel.messages import ChunkMessage
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.tensors.batch import StepBatch, build_batch
from engines.torch_engine import TorchEngine
from serve_app.cli.processes import command_line
from tests.support.engines.engine_harness import (
    Collector,
    DrivenEngine,
    adapter,
    assert_greedy,
    engine_config,
    followers,
    kv_bytes,
    model_folder,
    plain_model,
    prompt_of,
    request,
)
from tests.support.waiting import eventually

TWO = {"tensor_parallel": 2, "attention": "sdpa"}


def test_base_and_adapters_in_one_batch_give_the_tokens_of_transformers_and_peft() -> None:
    """In small chunks, with a pool that is too small for all and fewer slots than adapters."""
    bounds = (None, *(adapter("llama", kind) for kind in ("q-v", "all", "head", "embedding", "wide")))
    settings = {"kv_cache_bytes": kv_bytes("llama", 8) // 2, "max_step_tokens": 24, "max_adapters": 3}
    with DrivenEngine(engine_config("llama", **TWO, **settings, context_length=96)) as engine:
        requests = [
            request(prompt_of(length), adapter=bound, max_tokens=6, logprobs=0)
            for bound in bounds
            for length in (1, 20, 40)
        ]
        for made, result in zip(requests, engine.generate(*requests), strict=True):
            assert_greedy("llama", made, result)
        twice = [engine.one(request(prompt_of(40), max_tokens=6)) for _ in range(2)]
        assert twice[1].cached_tokens == 32
        assert twice[0].token_ids == twice[1].token_ids
        scored = engine.one(request(prompt_of(30), max_tokens=0, prompt_logprobs=0))
        assert len(scored.prompt_logprobs) == 30
        assert len(followers()) == 1
    assert not followers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-tied", ("head", "embedding")),
        ("qwen2", ("all",)),
        ("qwen3", ("all", "q-v")),
        ("mistral", ("all",)),
        ("gemma2", ("all",)),
        ("gemma3", ("q-v",)),
        ("qwen3-moe", ("q-v", "router", "experts")),
        ("deepseek-v3", ("mla", "experts")),
    ],
)
def test_each_architecture_gives_the_tokens_of_its_plain_forward(name: str, kinds: tuple[str, ...]) -> None:
    with DrivenEngine(engine_config(name, **TWO)) as engine:
        requests = [
            request(prompt_of(length), adapter=bound, max_tokens=6, logprobs=0)
            for bound in (None, *(adapter(name, kind) for kind in kinds))
            for length in (1, 40)
        ]
        for made, result in zip(requests, engine.generate(*requests), strict=True):
            assert_greedy(name, made, result)


def test_a_process_that_ends_fails_the_engine_and_everybody_is_told() -> None:
    with DrivenEngine(engine_config("llama", **TWO)) as engine:
        assert not engine.stats().failed
        (pid,) = followers()
        os.kill(pid, signal.SIGKILL)
        result = engine.run(_generate_one(engine))
        assert isinstance(result.error, EngineError)
        eventually(lambda: engine.stats().failed)


@pytest.mark.slow
def test_an_engine_that_is_closed_while_it_starts_leaves_nobody_behind() -> None:
    async def main() -> None:
        engine = TorchEngine(engine_config("llama", **TWO))
        starting = asyncio.create_task(engine.start())
        await asyncio.to_thread(eventually, followers)
        await engine.close()
        with pytest.raises(EngineStopped):
            await starting

    asyncio.run(main())
    assert not followers()


@pytest.mark.slow
def test_a_start_that_is_cancelled_leaves_nobody_behind() -> None:
    async def main() -> None:
        starting = asyncio.create_task(TorchEngine(engine_config("llama", **TWO)).start())
        await asyncio.to_thread(eventually, followers)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.to_thread(eventually, lambda: not followers())

    asyncio.run(main())


class Exhausted(PlainPath):
    """There is no memory left once the engine is up."""

    is_up = False

    def warm_up(self) -> None:
        self.is_up = True

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.is_up:
            raise torch.OutOfMemoryError("no memory left on this device")
        return super().forward(batch)


def exhausted(model: PagedModel, config: EngineConfig, *, threads: int) -> Iterator[ComputePath]:
    yield Exhausted(model, config.block_size)


def test_a_forward_that_raises_ends_the_engine_for_the_others_may_be_out_of_step() -> None:
    assemble = partial(assemble_model, candidates=exhausted)
    with DrivenEngine(engine_config("llama", **TWO), assemble) as engine:
        result = engine.run(_generate_one(engine))
        assert isinstance(result.error, EngineError)
        eventually(lambda: engine.stats().failed)


async def _generate_one(engine: DrivenEngine) -> Any:
    sink, made = Collector(), request(prompt_of(20), max_tokens=300)
    sink.expect(made.request_id)
    engine.engine.submit(made, sink)
    await sink.until(lambda: sink.results[made.request_id].ended)
    return sink.results[made.request_id]


@pytest.mark.slow
def test_nobody_outlives_a_leader_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "lead.py"
    program.write_text(
        textwrap.dedent(f"""
            import sys, time
            from engines.interface.config import EngineConfig
            from engines.parallel.group import TensorGroup

            group = TensorGroup(EngineConfig({str(model_folder("llama"))!r}, tensor_parallel=3, threads=1))
            print(*group.pids, flush=True)
            time.sleep(600)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment) as leader:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 2
        leader.kill()
    eventually(lambda: not any("engines.parallel.follower" in command_line(pid) for pid in pids))


@pytest.mark.slow
def test_a_model_that_cannot_be_split_is_refused_and_nobody_is_left() -> None:
    with pytest.raises(
        ModelRefused, match="tensor_parallel must be 1 for gpt_oss, not 2: transformers has no plan to split it"
    ):
        DrivenEngine(engine_config("gpt-oss", **TWO))
    assert not followers()


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (3, "tensor_parallel = 3 does not divide num_attention_heads = 4 of llama"),
        (4, "tensor_parallel = 4 does not divide num_key_value_heads = 2 of llama"),
    ],
)
def test_heads_that_do_not_divide_are_refused(size: int, sentence: str) -> None:
    with pytest.raises(ModelRefused, match=sentence):
        Shards.of(plain_model("llama"), 0, size)


@pytest.mark.parametrize(
    ("change", "what"), [({"exact": True}, "exact"), ({"attention": "native"}, "attention 'native'")]
)
def test_what_computes_whole_models_only_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel must be 1 with {what}, not 2"):
        EngineConfig("model", tensor_parallel=2, **change)


STYLES = {
    "layers.*.q1": "colwise",
    "layers.*.o2": "rowwise",
    "head": "colwise_gather_output",
    "layers.*.experts": "moe_tp_experts",
    "layers.*.experts.gate_up": "packed_colwise",
    "layers.*.experts.down": "rowwise",
    "layers.*.others": "moe",
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 18), (7, 5)])
def test_the_parts_of_an_adapter_together_are_the_whole(size: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    pair, x = LoraPair(torch.randn(3, inputs), torch.randn(outputs, 3), 0.5), torch.randn(inputs)
    shards = [Shards(rank, size, STYLES) for rank in range(size)]
    whole = pair.B @ (pair.A @ x)
    columns = [shard.part_of("layers.7.q1", pair) for shard in shards]
    torch.testing.assert_close(torch.cat([part.B @ (part.A @ x) for part in columns]), whole)
    rows = [shard.part_of("layers.7.o2", pair) for shard in shards]
    shares = x.split([shard.in_features("layers.7.o2", inputs) for shard in shards])
    narrow = torch.stack([part.A @ share for part, share in zip(rows, shares, strict=True)]).sum(0)
    torch.testing.assert_close(pair.B @ narrow, whole)
    assert all(shard.part_of("head", pair) is pair for shard in shards)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_the_parts_of_an_adapter_of_experts_together_are_the_whole(size: int, shared: bool) -> None:
    """Gate and up lie one after the other, and each process has a part of both."""
    torch.manual_seed(0)
    experts, width, rank, inputs = 3, 8, 2, 5
    count = 1 if shared else experts
    pair = LoraPair(torch.randn(count, rank, inputs), torch.randn(experts, 2 * width, rank), 0.5)
    shards = [Shards(n, size, STYLES) for n in range(size)]
    parts = [shard.part_of("layers.7.experts.gate_up", pair) for shard in shards]
    assert all(part.A is pair.A for part in parts)
    gates, ups = zip(*(part.B.chunk(2, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], dim=1), pair.B)
    down = LoraPair(torch.randn(experts, rank, width), torch.randn(count, inputs, rank), 0.5)
    parts = [shard.part_of("layers.7.experts.down", down) for shard in shards]
    assert all(part.B is down.B for part in parts)
    assert torch.equal(torch.cat([part.A for part in parts], dim=2), down.A)
    assert all(shard.sums_up("layers.7.experts") for shard in shards)


@pytest.mark.parametrize("odd", ["is_transposed", "has_bias", "has_post_expert_norm"])
def test_an_adapter_of_experts_whose_parts_do_not_add_up_is_refused(odd: str) -> None:
    class OddExperts(torch.nn.Module):
        pass

    model: Any = torch.nn.ModuleDict({"experts": OddExperts(), "q": torch.nn.Linear(2, 2)})
    config = SimpleNamespace(model_type="odd", num_attention_heads=4)
    model.config = SimpleNamespace(get_text_config=lambda: config)
    model.tp_plan = {"q": "colwise", "experts": "moe_tp_experts", "experts.down_proj": "rowwise"}
    pair = LoraPair(torch.ones(3, 1, 2), torch.ones(3, 2, 1), 1.0)
    assert Shards.of(model, 0, 2).part_of("experts.down_proj", pair).A.shape == (3, 1, 1)
    setattr(model["experts"], odd, True)
    with pytest.raises(AdapterRefused, match="split over devices by 'moe_tp_experts of OddExperts'"):
        Shards.of(model, 0, 2).part_of("experts.down_proj", pair)


def test_an_adapter_of_what_is_split_in_another_way_is_refused() -> None:
    pair = LoraPair(torch.ones(1, 2), torch.ones(2, 1), 1.0)
    with pytest.raises(AdapterRefused, match=r"'layers\.0\.others\.up', which is split over devices by 'moe'"):
        Shards(0, 2, STYLES).part_of("layers.0.others.up", pair)


@given(
    start=st.integers(0, 40),
    length=st.integers(1, 40),
    after=st.integers(0, 2),
    scores=st.booleans(),
    slot=st.integers(-1, 3),
)
def test_a_chunk_that_was_sent_makes_the_same_batch(
    start: int, length: int, after: int, scores: bool, slot: int
) -> None:
    sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0 if scores else None)
    images = (PromptImage(start, 1, "digest", {}), PromptImage(start + 3, 2, "digest", {}))
    prompt = prompt_of(start + length + after)
    sequence = TokenSequence.of(GenerateRequest("r", prompt, sampling, images=images), NO_SINK)
    sequence.blocks, sequence.slot = [9, 4, 7, 1, 3, 2], slot
    sent = Chunk(sequence, start, length)
    made = ChunkMessage.of(sent, 16).chunk(0)
    one, other = (build_batch([chunk], 16, torch.device("cpu")) for chunk in (sent, made))
    assert sequence.token_ids[start] == made.sequence.token_ids[start]
    for name in ("token_ids", "positions", "kv_slots", "fresh_blocks", "logit_rows", "slots"):
        values = getattr(one, name), getattr(other, name)
        assert values == (None, None) or torch.equal(*values), name
    assert (made.completes, made.end) == (sent.completes, sent.end)
    assert [(image.start, image.length) for image in made.sequence.request.images] == [(start, 1), (start + 3, 2)]


def test_a_model_without_a_plan_is_refused() -> None:
    config = SimpleNamespace(model_type="odd", num_attention_heads=4)
    model = SimpleNamespace(tp_plan={}, config=SimpleNamespace(get_text_config=lambda: config))
    with pytest.raises(ModelRefused, match="for odd, not 2: transformers has no plan"):
        Shards.of(model, 0, 2)
