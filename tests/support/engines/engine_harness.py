"""What tests of the engine share: tiny models and adapters on disk, a driven engine, plain references."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Self, TypeVar

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.compute.assembly import assemble_model
from engines.interface.config import EngineConfig
from engines.interface.errors import EngineError
from engines.interface.protocol import (
    Adapter,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Output,
    SamplingParams,
    Timing,
    TokenLogprob,
)
from engines.lora.format.digest import WEIGHTS_FILE
from engines.torch_engine import Assemble, TorchEngine
from serve_app.cli.processes import command_line, descendants
from tests.support.engines import tiny_models
from tests.support.files.lora_files import adapter_at, random_model, save_with_peft

T = TypeVar("T")
_FOLDER = tempfile.TemporaryDirectory(prefix="engine-tests-")
_IDS = count()
KV_BYTES = 8 << 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the Triton kernels are tested: without a CUDA device, in Triton's interpreter."""


@cache
def model_folder(name: str) -> Path:
    """A tiny random model, saved once for all tests."""
    return tiny_models.save(name, Path(_FOLDER.name) / name)


def followers() -> list[int]:
    """The other processes of models that are split over several."""
    return [pid for pid in descendants() if "engines.parallel.follower" in command_line(pid)]


@cache
def plain_model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder(name)).eval()


ADAPTERS: dict[str, dict[str, Any]] = {
    "q-v": {"target_modules": ["q_proj", "v_proj"], "r": 2},
    "all": {
        "target_modules": "all-linear",
        "r": 8,
        "lora_alpha": 6,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 3, "layers.1.self_attn.q_proj": 16},
        "alpha_pattern": {"o_proj": 20},
    },
    "head": {"target_modules": ["lm_head"], "r": 5},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"], "r": 4},
    "wide": {"target_modules": ["gate_proj", "up_proj", "down_proj"], "r": 32},
    "too-wide": {"target_modules": ["q_proj"], "r": 65},
    "mla": {"target_modules": "all-linear", "r": 3},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 3},
    "router": {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"], "r": 2},
    "oss-experts": {
        "target_modules": ["o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        "r": 3,
    },
}


@cache
def adapter(model: str, kind: str, seed: int = 0) -> Adapter:
    """A random adapter that PEFT saved."""
    folder = Path(_FOLDER.name) / f"{model}-{kind}-{seed}"
    base = random_model(model)
    torch.manual_seed(seed)
    save_with_peft(base, LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[kind]), folder)
    return adapter_at(folder)


@cache
def peft_model(model: str, adapter: Adapter) -> Any:
    base = random_model(model)
    base.load_state_dict(plain_model(model).state_dict())
    return PeftModel.from_pretrained(base, adapter.directory).eval()


def reference_model(model: str, adapter: Adapter | None) -> Any:
    return peft_model(model, adapter) if adapter else plain_model(model)


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one plain forward."""
    ids = torch.tensor([token_ids])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits.float()


class NearTie(Exception):
    """Two tokens are so close that rounding decides between them."""


@cache
def reference_greedy(
    name: str, adapter: Adapter | None, prompt: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The likeliest continuation by plain forwards over the whole text, and its log-probabilities."""
    model, known, logprobs = reference_model(name, adapter), list(prompt), []
    for _ in range(max_tokens):
        row = torch.log_softmax(reference_logits(model, known)[-1], dim=-1)
        best, second = row.topk(2).values.tolist()
        if best - second < 1e-3:
            raise NearTie
        known.append(int(row.argmax()))
        logprobs.append(best)
    return tuple(known[len(prompt) :]), tuple(logprobs)


@cache
def clear_prompt(
    name: str, length: int, max_tokens: int, *, bounds: tuple[Adapter | None, ...] = (None,), seed: int = 0
) -> tuple[int, ...]:
    """A prompt after which the model, with each of these adapters, never has a near tie."""
    for attempt in count():
        prompt = prompt_of(length, seed + 100 * attempt)
        try:
            for bound in bounds:
                reference_greedy(name, bound, prompt, max_tokens)
            return prompt
        except NearTie:
            continue
    raise AssertionError


@cache
def reference_logprobs(name: str, adapter: Adapter | None, text: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] after each token of a text."""
    return torch.log_softmax(reference_logits(reference_model(name, adapter), text), dim=-1)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = Random(length * 1000 + seed)
    return tuple(rng.randrange(tiny_models.VOCAB) for _ in range(length))


def request(
    prompt: Sequence[int], *, adapter: Adapter | None = None, tenant: str = "", **sampling: Any
) -> GenerateRequest:
    """Greedy unless told otherwise."""
    params = SamplingParams(**{"max_tokens": 8, "seed": 0, "temperature": 0.0, **sampling})
    return GenerateRequest(f"r{next(_IDS)}", tuple(prompt), params, adapter, tenant)


@dataclass(slots=True)
class Result:
    """All of one request's deltas together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    timings: list[Timing] = field(default_factory=list, compare=False)
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.aborted


class Collector:
    """A sink that gathers what it is given, and wakes whoever waits for more."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.after_end: list[Output] = []
        self._news = asyncio.Event()

    def expect(self, request_id: str) -> None:
        self.results[request_id] = Result()

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            result = self.results[output.request_id]
            if result.ended:
                self.after_end.append(output)
            self._add(result, output)
        self.wake()

    def _add(self, result: Result, output: Output) -> None:
        event = output.event
        if isinstance(event, EngineError):
            result.error = event
            return
        if not result.token_ids and event.prompt_logprobs:
            result.prompt_logprobs = event.prompt_logprobs
        if event.timing is not None:
            result.timings.append(event.timing)
        result.token_ids += event.token_ids
        result.logprobs += event.logprobs
        result.cached_tokens += event.cached_tokens
        result.finish_reason = event.finish_reason

    @property
    def num_tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results.values())

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.wait_for(self._news.wait(), timeout=60)

    def wake(self) -> None:
        """Have everybody who waits look again."""
        self._news.set()
        self._news = asyncio.Event()


class DrivenEngine:
    """An engine with the event loop that it lives on."""

    def __init__(self, config: EngineConfig, assemble: Assemble = assemble_model) -> None:
        self.engine = TorchEngine(config, assemble)
        self._runner = asyncio.Runner()
        try:
            self.run(self.engine.start())
        except BaseException:
            self._runner.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def close(self) -> None:
        self.run(self.engine.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self, *requests: GenerateRequest, arrivals: Sequence[int] = (), aborts: Mapping[int, int] | None = None
    ) -> list[Result]:
        """All results, in order. Request i is submitted once `arrivals[i]` tokens have come out of all together, and
        aborted once it has `aborts[i]` of its own.
        """
        return self.run(self._generate(requests, list(arrivals), aborts or {}))

    def one(self, request: GenerateRequest) -> Result:
        return self.generate(request)[0]

    async def _generate(
        self, requests: Sequence[GenerateRequest], arrivals: list[int], aborts: Mapping[int, int]
    ) -> list[Result]:
        sink = Collector()
        leaving = []
        for index in sorted(range(len(requests)), key=lambda i: arrivals[i] if i < len(arrivals) else 0):
            due = arrivals[index] if index < len(arrivals) else 0
            await sink.until(lambda due=due: sink.num_tokens >= due or _all_ended(sink.results.values()))
            sink.expect(requests[index].request_id)
            self.engine.submit(requests[index], sink)
            if index in aborts:
                leaving.append(asyncio.create_task(self._abort(requests[index], sink, aborts[index])))
        await sink.until(lambda: _all_ended(sink.results.values()))
        await asyncio.gather(*leaving)
        await self.is_idle()
        assert not sink.after_end
        return [sink.results[request.request_id] for request in requests]

    async def _abort(self, request: GenerateRequest, sink: Collector, num_tokens: int) -> None:
        result = sink.results[request.request_id]
        await sink.until(lambda: result.ended or len(result.token_ids) >= num_tokens)
        if not result.ended:
            self.engine.abort(request.request_id)
            result.aborted = True
            sink.wake()

    def until_preempted(
        self, make: Callable[[], Sequence[GenerateRequest]]
    ) -> Iterator[tuple[GenerateRequest, Result]]:
        """Rounds of requests that need more blocks than there are, until one was preempted; when each arrives is up to
        the threads, so one round may do without.
        """
        for _ in range(10):
            requests = make()
            yield from zip(requests, self.generate(*requests), strict=True)
            if self.stats().counters.preemptions:
                return
        raise AssertionError("nothing was preempted")

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def is_idle(self) -> None:
        """Until all is done: a request comes back from the loop after everything that was posted before it."""
        probe = Collector()
        last = request((1,), max_tokens=0)
        probe.expect(last.request_id)
        self.engine.submit(last, probe)
        await probe.until(lambda: _all_ended(probe.results.values()))


def assert_greedy(name: str, made: GenerateRequest, result: Result) -> None:
    """Each token is the one that the plain forward finds likeliest after those before it (or as likely, but for
    rounding), and its log-probability is the plain forward's.
    """
    assert result.error is None
    prompt = made.prompt_token_ids
    rows = reference_logprobs(name, made.adapter, (*prompt, *result.token_ids))[len(prompt) - 1 : -1]
    own = rows[torch.arange(len(result.token_ids)), result.token_ids]
    assert len(result.token_ids) == made.sampling.max_tokens
    assert (rows.amax(dim=-1) - own).max() < 1e-4
    assert [score.logprob for score in result.logprobs] == pytest.approx(own.tolist(), abs=3e-4)


def _all_ended(results: Iterable[Result]) -> bool:
    return all(result.ended for result in results)


class Engines:
    """Engines by model and settings, started when first asked for and closed together."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, tuple[tuple[str, Any], ...]], DrivenEngine] = {}

    def __call__(self, name: str = "llama", **settings: Any) -> DrivenEngine:
        key = (name, tuple(sorted(settings.items())))
        if key not in self._started:
            self._started[key] = DrivenEngine(engine_config(name, **settings))
        return self._started[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in self._started.values():
            engine.close()


def cramped(name: str) -> dict[str, Any]:
    """Settings with which everything is cut and preempted: small chunks, and a pool that is too small for all."""
    return {
        "context_length": 96,
        "kv_cache_bytes": kv_bytes(name, 8),
        "max_step_tokens": 24,
        "max_step_tokens_decoding": 19,
    }


def kv_bytes(name: str, num_blocks: int) -> int:
    """Of this many blocks of 16 tokens of a tiny model."""
    config = tiny_models.CONFIGS[name]()
    if name == "deepseek-v3":
        heads, dims = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, dims = config.num_key_value_heads, 2 * head_dim
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    num_layers = sum(kind.endswith("_attention") and kind != "linear_attention" for kind in layer_types)
    return num_blocks * 16 * num_layers * heads * dims * 4


def engine_config(name: str = "llama", **settings: Any) -> EngineConfig:
    source = str(model_folder(name))
    return EngineConfig(**{"source": source, "threads": 1, "kv_cache_bytes": KV_BYTES, "max_running": 16, **settings})


RAISES, BREAKS = 300, 301
"""Tokens at which `explosive_folder`'s model raises, once or from then on."""

_EXPLOSIVE = f"""
from transformers import LlamaForCausalLM


class ExplosiveForCausalLM(LlamaForCausalLM):
    broken = False

    def forward(self, input_ids=None, **arguments):
        tokens = set(input_ids.flatten().tolist())
        self.broken |= {BREAKS} in tokens
        if self.broken or {RAISES} in tokens:
            raise RuntimeError("the device said no")
        return super().forward(input_ids=input_ids, **arguments)
"""


@cache
def explosive_folder() -> Path:
    """The tiny llama with code of its own, to be loaded with `trust_remote_code`."""
    folder = Path(_FOLDER.name) / "explosive"
    shutil.copytree(model_folder("llama"), folder)
    (folder / "modeling_explosive.py").write_text(_EXPLOSIVE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_explosive.ExplosiveForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def spoilt_adapter(bound: Adapter, name: str, token_id: int) -> Adapter:
    """A copy of an adapter of the embedding that does the same, but for one token, which it makes infinite."""
    folder = Path(_FOLDER.name) / name
    shutil.copytree(bound.directory, folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    for key in [key for key in tensors if "lora_embedding_A" in key]:
        tensors[key] = tensors[key] / 1024
        tensors[key][:, token_id] = 3e38
        other = key.replace("embedding_A", "embedding_B")
        tensors[other] = tensors[other] * 1024
    save_file(tensors, folder / WEIGHTS_FILE)
    return adapter_at(folder)


def scaled_adapter(bound: Adapter, name: str, factor: float) -> Adapter:
    """A copy of an adapter with all weights multiplied."""
    folder = Path(_FOLDER.name) / name
    shutil.copytree(bound.directory, folder)
    tensors = {key: tensor * factor for key, tensor in load_file(folder / WEIGHTS_FILE).items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    return adapter_at(folder)
