"""The engine's interface: token ids in, token ids out.

An engine knows neither text nor HTTP nor Ray. `serve_app` uses it through `Engine` alone. So another engine (another
runtime, or the deterministic one in `fake.py`) can run behind the same service.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engines.interface.errors import EngineError


class FinishReason(StrEnum):
    """Why a generation ended: STOP when the last token is one of the request's stop ids, LENGTH at `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The caller that builds it checks the values; the engine does not.

    - `temperature` 0 is greedy. `top_k` 0 keeps all tokens.
    - `seed` fixes every draw of the request, whatever else is in the batch.
    - `max_tokens` 0 scores the prompt without generating (with `prompt_logprobs`).
    - `logprobs` / `prompt_logprobs`: how many of the most likely alternatives to report (0 = the token itself only),
      None for no log-probabilities at all.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter by content: `digest` of its config and weights, `directory` where that content was last seen.

    Every cache is keyed by the digest. The engine checks it against what it reads, and raises `AdapterChanged` when the
    directory holds other content.
    """

    digest: str
    directory: str


BFLOAT16 = "bfloat16"
"""A `HostTensor.dtype` that numpy does not have."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: `data` holds `shape` values of the numpy type `dtype`, or `BFLOAT16`, in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: its `length` tokens begin at `start`. `tensors`: inputs of the model's vision tower, by
    argument. Caches are keyed by `digest`: images that differ for the model have different digests.
    """

    start: int
    length: int
    digest: str
    tensors: Mapping[str, HostTensor]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. It is accounted to `tenant`: waiting requests are served fairly across tenants and adapters.
    `images`: those of the prompt, in its order.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: Adapter | None = None
    tenant: str = ""
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the temperature-scaled distribution (temperature 0: unscaled), before top-k
    and top-p. `top`: the N most likely (token id, log-probability), most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """What a request waited for until its first delta. `queued_s`: until it was admitted to the batch, its adapter's
    load included. `prefill_s`: from there, also if it was preempted meanwhile.
    """

    queued_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step produced for one request.

    `logprobs` has one entry per token if they were requested, else none. `finish_reason` is set on the last delta of a
    request; with STOP the last token is the stop token. Three fields are set on the first delta only: `cached_tokens`
    (prompt tokens taken from the prefix cache), `prompt_logprobs` (one per prompt token, the first None) and `timing`,
    which does not count when deltas are compared.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    timing: Timing | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Output:
    """One request's share of a step: tokens, or the error that ended it."""

    request_id: str
    event: TokenDelta | EngineError


class OutputSink(Protocol):
    """Takes the outputs of a step for the requests that were submitted with it.

    Called once per step on the thread of the event loop that started the engine, so a transport can write one frame
    per step, whatever the number of requests.
    """

    def deliver(self, outputs: Sequence[Output]) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the service needs to know of the loaded model. `context_length` in tokens, prompt and completion."""

    vocab_size: int
    context_length: int
    kv_capacity_tokens: int
    takes_images: bool = False


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counts of one engine since its start. Values only grow; each is exported as a metric of its name.

    A request that the engine has taken ends as `finished`, `aborted` or `failed_requests`. One that loses its place in
    a full queue has failed: its caller did not give it up. `prompt_tokens` and `cached_tokens` count a request once,
    when its prompt is computed. `prefill_tokens` and `decode_tokens` count computed tokens, including those of a
    preempted request again. `images_encoded` counts runs of the vision tower. `images_reused` counts an image when its
    first token is computed with features that were kept from an earlier run.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed_requests: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    adapter_loads: int = 0
    adapter_load_seconds: float = 0.0
    adapter_evictions: int = 0
    adapter_refusals: int = 0
    images_encoded: int = 0
    images_reused: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, cheap enough to take every second.

    `stalled_s`: seconds since the last finished step while there was work to do, 0 when idle. Readiness depends on it.
    `adapters` holds the digests in device slots, least recently used first. `queued_tokens`: tokens of prompts that
    have to be computed yet, of waiting and of running requests. `adapters_in_memory` and `adapter_bytes` count the
    adapters in host memory, those in slots too. `adapters_loading`: those that are read, or wait for it.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    adapter_slots_total: int = 0
    adapter_slots_pinned: int = 0
    adapters: tuple[str, ...] = ()
    adapters_in_memory: int = 0
    adapter_bytes: int = 0
    adapters_loading: int = 0
    stalled_s: float = 0.0
    failed: bool = False
    counters: EngineCounters = EngineCounters()


class Engine(Protocol):
    """The engine as the service uses it. All methods are called from the event loop that ran `start`."""

    @property
    def facts(self) -> ModelFacts: ...

    async def start(self) -> None:
        """Load the model and begin stepping. Raises `ModelRefused` when it cannot be computed exactly."""

    async def close(self) -> None:
        """End every request with `EngineStopped`, free everything, join the loop's thread."""

    def submit(self, request: GenerateRequest, sink: OutputSink) -> None:
        """Queue a request. Its outputs reach `sink` until one has a `finish_reason` or is an error.

        Raises `RequestRefused`, `QueueFull` or `EngineStopped` at once; then nothing was queued. When the queue is
        full, the last waiting request of a tenant with more of them may be ended with `QueueFull` instead.
        """

    def abort(self, request_id: str) -> None:
        """End a request without further output and free what it holds; unknown or finished ids are ignored."""

    def stats(self) -> EngineStats: ...
