"""A deterministic engine without a model: for tests, load tests of the service, and trying a configuration out.

It keeps every promise of `protocol.Engine`. Tokens depend only on the prompt, the adapter's content and (above
temperature 0) the seed. Stop ids, lengths, log-probabilities, the queue limit, the prefix cache, adapter slots and
aborts behave as with a model.

Every position has the same distribution over ranks: logits 0, -1, -2 … -(RANKS-1). A hash of the text so far says which
token has which rank.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

from engines.host.delivery import deliver
from engines.interface.errors import EngineError, EngineStopped, QueueFull, RequestRefused
from engines.interface.protocol import (
    Adapter,
    EngineCounters,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelFacts,
    Output,
    OutputSink,
    SamplingParams,
    Timing,
    TokenDelta,
    TokenLogprob,
)
from engines.planning.places import whom_to_displace

RANKS = 24
_BLOCK_TOKENS = 16

Script = Callable[[GenerateRequest], Iterable[int | EngineError] | None]
"""What to reply to a request: token ids, or an error that ends it. None: made up by hashing. If the request has stop
ids, a script that does not end in one is followed by one."""


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """`reply_tokens` None: replies run to `max_tokens`. Otherwise they end after 1 … 2 × reply_tokens, at a stop id.

    `step_s` is the pause after each step, in seconds. `tokens_per_step` is what each running request gets per step.
    """

    vocab_size: int = 32_000
    context_length: int = 32_768
    kv_capacity_tokens: int = 1 << 22
    max_running: int = 256
    max_waiting: int = 1024
    max_adapters: int = 16
    reply_tokens: int | None = None
    step_s: float = 0.0
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        for name in ("context_length", "kv_capacity_tokens", "max_running", "max_adapters", "tokens_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}.")
        if self.vocab_size <= RANKS:
            raise ValueError(f"vocab_size must be greater than {RANKS}, not {self.vocab_size!r}.")
        if self.max_waiting < 0 or self.step_s < 0:
            raise ValueError(f"max_waiting and step_s must not be negative: {self.max_waiting!r}, {self.step_s!r}.")


@dataclass(slots=True)
class _Generation:
    request: GenerateRequest
    sink: OutputSink
    tokens: Iterator[int | EngineError]
    cached_tokens: int = 0
    num_generated: int = 0
    started: bool = False
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.request.prompt_token_ids) + self.num_generated) // _BLOCK_TOKENS)


@dataclass(slots=True)
class _Counters:
    """The `EngineCounters` of this engine: it never preempts, refuses no adapter and takes no images."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed_requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0


@dataclass(slots=True)
class _State:
    """What the loop works on. It belongs to the event loop's thread."""

    waiting: deque[_Generation] = field(default_factory=deque)
    running: dict[str, _Generation] = field(default_factory=dict)
    known_blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    counters: _Counters = field(default_factory=_Counters)


class FakeEngine:
    """An `Engine` whose steps run as a task of the event loop that started it."""

    def __init__(self, config: FakeConfig | None = None, script: Script | None = None) -> None:
        self._config = config or FakeConfig()
        self._script = script
        self._state = _State()
        self._work = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._loop: asyncio.Task[None] | None = None
        self._last_step_at = time.monotonic()

    @property
    def facts(self) -> ModelFacts:
        config = self._config
        return ModelFacts(config.vocab_size, config.context_length, config.kv_capacity_tokens)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
        state = self._state
        ended = [*state.running.values(), *state.waiting]
        state.counters.failed_requests += len(ended)
        state.running.clear()
        state.waiting.clear()
        deliver([(g.sink, Output(g.request.request_id, EngineStopped("The engine was closed."))) for g in ended])

    def submit(self, request: GenerateRequest, sink: OutputSink) -> None:
        if self._loop is None:
            raise EngineStopped("The engine is not running.")
        self._check(request)
        state = self._state
        if len(state.running) >= self._config.max_running and len(state.waiting) >= self._config.max_waiting:
            self._make_room(request.tenant)
        state.waiting.append(_Generation(request, sink, self._tokens(request)))
        state.counters.requests += 1
        if not self._work.is_set():
            self._last_step_at = time.monotonic()
            self._work.set()

    def _make_room(self, tenant: str) -> None:
        full = QueueFull(self._config.max_waiting)
        displaced = whom_to_displace([(g.request.tenant, g) for g in self._state.waiting], tenant)
        if displaced is None:
            raise full
        self._state.waiting.remove(displaced)
        self._state.counters.failed_requests += 1
        deliver([(displaced.sink, Output(displaced.request.request_id, full))])

    def abort(self, request_id: str) -> None:
        state = self._state
        waiting = next((g for g in state.waiting if g.request.request_id == request_id), None)
        if waiting is not None:
            state.waiting.remove(waiting)
        elif state.running.pop(request_id, None) is None:
            return
        state.counters.aborted += 1

    def pause(self) -> None:
        """Stop stepping, as an engine whose device hangs."""
        self._unpaused.clear()

    def resume(self) -> None:
        self._unpaused.set()

    def stats(self) -> EngineStats:
        state, config = self._state, self._config
        used = sum(generation.num_blocks for generation in state.running.values())
        total = config.kv_capacity_tokens // _BLOCK_TOKENS
        busy = bool(state.running or state.waiting)
        return EngineStats(
            running=len(state.running),
            waiting=len(state.waiting),
            queued_tokens=sum(len(generation.request.prompt_token_ids) for generation in state.waiting),
            blocks_total=total,
            blocks_free=max(0, total - used),
            blocks_cached=len(state.known_blocks),
            adapter_slots_total=config.max_adapters,
            adapter_slots_pinned=len(self._pinned()),
            adapters=tuple(state.adapters),
            adapters_in_memory=len(state.adapters),
            stalled_s=time.monotonic() - self._last_step_at if busy else 0.0,
            failed=self._loop is None,
            counters=EngineCounters(**asdict(state.counters)),
        )

    def _check(self, request: GenerateRequest) -> None:
        prompt, config = request.prompt_token_ids, self._config
        if request.images:
            raise RequestRefused("images", "This model takes no images.")
        if not prompt:
            raise RequestRefused("prompt", "prompt must have at least one token.")
        worst = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
        if worst is not None:
            raise RequestRefused("prompt", f"prompt holds the token id {worst}, vocabulary size {config.vocab_size}.")
        total = len(prompt) + request.sampling.max_tokens
        limit = min(config.context_length, config.kv_capacity_tokens)
        if total > limit:
            raise RequestRefused("max_tokens", f"prompt and max_tokens have {total} tokens, the limit is {limit}.")
        waiting = (generation.request.request_id for generation in self._state.waiting)
        if request.request_id in self._state.running or request.request_id in waiting:
            raise RequestRefused("request_id", f"request_id {request.request_id!r} is in use.")

    def _tokens(self, request: GenerateRequest) -> Iterator[int | EngineError]:
        reply = self._script(request) if self._script is not None else None
        if reply is None:
            return _made_up(request, self._config)
        return _scripted(request, reply, self._config)

    async def _run(self) -> None:
        state = self._state
        while True:
            if not (state.running or state.waiting):
                self._work.clear()
            await self._work.wait()
            await self._unpaused.wait()
            self._admit()
            outputs = [output for generation in list(state.running.values()) for output in self._step(generation)]
            self._last_step_at = time.monotonic()
            state.counters.steps += 1
            for request_id in deliver(outputs):
                self.abort(request_id)
            await asyncio.sleep(self._config.step_s)

    def _admit(self) -> None:
        state = self._state
        for _ in range(len(state.waiting)):
            if len(state.running) >= self._config.max_running:
                return
            generation = state.waiting.popleft()
            adapter = generation.request.adapter
            if adapter is not None and not self._load(adapter):
                state.waiting.append(generation)  # every slot is pinned: the others go first
                continue
            generation.cached_tokens = self._take_from_prefix_cache(generation.request)
            generation.admitted_at = time.monotonic()
            state.running[generation.request.request_id] = generation

    def _step(self, generation: _Generation) -> Iterator[tuple[OutputSink, Output]]:
        request = generation.request
        try:
            delta = _delta(generation, self._config)
        except EngineError as exc:
            self._state.counters.failed_requests += 1
            del self._state.running[request.request_id]
            yield generation.sink, Output(request.request_id, exc)
            return
        self._state.counters.generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._state.counters.finished += 1
            del self._state.running[request.request_id]
        yield generation.sink, Output(request.request_id, delta)

    def _pinned(self) -> set[str]:
        running = self._state.running.values()
        return {g.request.adapter.digest for g in running if g.request.adapter is not None}

    def _load(self, adapter: Adapter) -> bool:
        """Make the adapter resident; False when other requests use every slot."""
        slots = self._state.adapters
        if adapter.digest in slots:
            slots.move_to_end(adapter.digest)
            return True
        if len(slots) >= self._config.max_adapters:
            pinned = self._pinned()
            victim = next((digest for digest in slots if digest not in pinned), None)
            if victim is None:
                return False
            del slots[victim]
            self._state.counters.adapter_evictions += 1
        slots[adapter.digest] = None
        self._state.counters.adapter_loads += 1
        return True

    def _take_from_prefix_cache(self, request: GenerateRequest) -> int:
        """How many prompt tokens were computed before; the last token of a prompt is always computed."""
        known, prompt, state = self._state.known_blocks, request.prompt_token_ids, self._state
        digest, cached, hit = _adapter_digest(request), 0, request.sampling.prompt_logprobs is None
        for end in range(_BLOCK_TOKENS, len(prompt) + 1, _BLOCK_TOKENS):
            digest = _digest(digest, prompt[end - _BLOCK_TOKENS : end])
            hit = hit and digest in known and end < len(prompt)
            cached = end if hit else cached
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._config.kv_capacity_tokens // _BLOCK_TOKENS:
            known.popitem(last=False)
        state.counters.prompt_tokens += len(prompt)
        state.counters.cached_tokens += cached
        return cached


def _delta(generation: _Generation, config: FakeConfig) -> TokenDelta:
    """The next tokens of one request. Raises the next `EngineError` of its script."""
    request, sampling = generation.request, generation.request.sampling
    token_ids: list[int] = []
    finish: FinishReason | None = FinishReason.LENGTH if generation.num_generated >= sampling.max_tokens else None
    while finish is None and len(token_ids) < config.tokens_per_step:
        token = next(generation.tokens)
        if isinstance(token, EngineError):
            raise token
        token_ids.append(token)
        generation.num_generated += 1
        if token in sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif generation.num_generated == sampling.max_tokens:
            finish = FinishReason.LENGTH
    first, generation.started = not generation.started, True
    return TokenDelta(
        token_ids=tuple(token_ids),
        logprobs=_logprobs(token_ids, sampling, sampling.logprobs, config.vocab_size),
        finish_reason=finish,
        cached_tokens=generation.cached_tokens if first else 0,
        prompt_logprobs=_prompt_logprobs(request, config) if first else (),
        timing=_timing(generation) if first else None,
    )


def _timing(generation: _Generation) -> Timing:
    admitted_at = generation.admitted_at
    return Timing(admitted_at - generation.submitted_at, time.monotonic() - admitted_at)


def _prompt_logprobs(request: GenerateRequest, config: FakeConfig) -> tuple[TokenLogprob | None, ...]:
    count = request.sampling.prompt_logprobs
    if count is None:
        return ()
    return (None, *_logprobs(request.prompt_token_ids[1:], request.sampling, count, config.vocab_size))


def _logprobs(
    token_ids: Sequence[int], sampling: SamplingParams, count: int | None, vocab_size: int
) -> tuple[TokenLogprob, ...]:
    """The token has the rank that its id says; its neighbours in the vocabulary have the other ranks."""
    if count is None:
        return ()
    values = _rank_logprobs(sampling.temperature)
    found = []
    for token in token_ids:
        rank = token % RANKS if sampling.temperature else 0
        top = tuple(((token - rank + r) % vocab_size, values[r]) for r in range(min(count, RANKS)))
        found.append(TokenLogprob(token, values[rank], top))
    return tuple(found)


def _rank_logprobs(temperature: float) -> list[float]:
    scale = 1.0 / max(temperature, 1e-6) if temperature else 1.0
    total = math.log(sum(math.exp(-rank * scale) for rank in range(RANKS)))
    return [-rank * scale - total for rank in range(RANKS)]


def _scripted(
    request: GenerateRequest, reply: Iterable[int | EngineError], config: FakeConfig
) -> Iterator[int | EngineError]:
    yield from reply
    stop_ids = request.sampling.stop_token_ids
    if stop_ids:
        yield min(stop_ids)
    yield from _made_up(request, config)


def _made_up(request: GenerateRequest, config: FakeConfig) -> Iterator[int]:
    sampling = request.sampling
    state = _digest(_adapter_digest(request), request.prompt_token_ids)
    if sampling.temperature:
        state = _digest(state, (sampling.seed & 0xFFFF_FFFF, sampling.seed >> 32 & 0xFFFF_FFFF))
    stop_ids = sampling.stop_token_ids
    end = None
    if config.reply_tokens is not None and stop_ids:
        end = int.from_bytes(state[:4], "little") % (2 * config.reply_tokens)
    index = 0
    while index != end:
        block = blake2b(state, digest_size=64, salt=index.to_bytes(8, "little")).digest()
        for offset in range(0, 64, 4):
            if index == end:
                break
            token = int.from_bytes(block[offset : offset + 4], "little") % config.vocab_size
            for _ in stop_ids:  # as often as it takes, unless every token stops
                token = (token + 1) % config.vocab_size if token in stop_ids else token
            yield token
            index += 1
    while True:
        yield min(stop_ids)


def _adapter_digest(request: GenerateRequest) -> bytes:
    return request.adapter.digest.encode() if request.adapter is not None else b"base"


def _digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + b"".join(token.to_bytes(4, "little") for token in token_ids), digest_size=16).digest()
