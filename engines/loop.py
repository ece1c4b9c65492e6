"""The engine loop: admit, schedule, run, sample, emit, again and again, on one thread that owns everything."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Protocol

import torch

from engines.interface.errors import AdapterError, AdapterRefused, EngineError, EngineStopped, NonFiniteLogits
from engines.interface.protocol import Adapter, FinishReason, TokenDelta, TokenLogprob
from engines.planning.prefill_pace import PrefillPace
from engines.planning.scheduler import Chunk, Scheduler, StepPlan
from engines.planning.sequence import TokenSequence
from engines.sampling.sampler import Draws, Sampled, Sampler
from engines.sampling.step_results import Outcomes, StepResult, rows_of_chunks
from engines.tensors.batch import Carried, StepBatch

logger = logging.getLogger(__name__)

_POLL_S = 0.05
"""How often the loop checks running adapter loads while nothing else can run."""

Event = TokenDelta | EngineError
Emit = Callable[[Sequence[tuple[TokenSequence, Event]]], None]
Command = Callable[["EngineLoop"], None]


class Runner(Protocol):
    """Computes chunks. Running the same chunk again is harmless as long as it was not committed, if `repeatable`."""

    repeatable: bool

    def forward(self, chunks: Sequence[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        """The batch, and logits [wanted rows, vocab]."""

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """As `forward`, for chunks of one token after which the next token is drawn, in their order. `carried` may hold
        the tokens themselves. Does not wait for the device. None where this is not possible.
        """

    def check_health(self) -> None:
        """Compute something that depends on no request; raises whatever it raises."""


class AdapterLoads(Protocol):
    """The part of the adapter cache that the loop needs and the scheduler does not."""

    def want(self, adapter: Adapter, tenant: str) -> None: ...
    def unwant(self, adapter: Adapter) -> None: ...
    def poll(self) -> dict[Adapter, AdapterError]:
        """Take in finished loads; returns what failed."""

    @property
    def is_loading(self) -> bool: ...


@dataclass(slots=True)
class LoopCounters:
    """The loop's share of `engines.interface.protocol.EngineCounters`, counted as it goes."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed_requests: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class EngineLoop:
    """`post` may be called from any thread; everything else happens on the thread that calls `run`.

    `emit` takes the events of a step. `on_end` is called once, with the reason. The caller that posted requests then
    ends the remaining ones, since a failed loop may have lost track of them. `pace` None: only the scheduler's own
    limit bounds the prefill beside decoding.
    """

    runner: Runner
    scheduler: Scheduler
    adapters: AdapterLoads
    emit: Emit
    on_end: Callable[[EngineStopped], None]
    pace: PrefillPace | None = None
    sampler: Sampler = Draws
    counters: LoopCounters = field(default_factory=LoopCounters)
    failed: bool = False
    last_progress: float = field(default_factory=time.monotonic)
    _commands: deque[Command] = field(default_factory=deque)
    _wake: Condition = field(default_factory=Condition)
    _sequences: dict[str, TokenSequence] = field(default_factory=dict)
    _flight: Outcomes | None = None
    _stopping: bool = False
    _ended: bool = False

    def post(self, command: Command) -> bool:
        """Run the command between two steps. False when the loop has ended and runs nothing any more."""
        with self._wake:
            if self._ended:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def stop(self) -> None:
        def command(loop: "EngineLoop") -> None:
            loop._stopping = True

        self.post(command)

    def add(self, sequence: TokenSequence) -> None:
        """A command: queue a request."""
        if self.scheduler.is_idle:
            self.last_progress = time.monotonic()
        self.counters.requests += 1
        self._sequences[sequence.request_id] = sequence
        if sequence.request.adapter:
            self.adapters.want(sequence.request.adapter, sequence.request.tenant)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """A command: end a request without output; unknown ids are ignored."""
        self.counters.aborted += self._drop(request_id)

    def displace(self, request_id: str) -> None:
        """A command: as `abort`, for a request whose error the caller of this delivers."""
        self.counters.failed_requests += self._drop(request_id)

    def _drop(self, request_id: str) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)
        return sequence is not None

    def run(self) -> None:
        """Step until `stop`, or until a failure that is no request's fault."""
        try:
            while not self._stopping:
                self._obey()
                if not self._stopping and not self.step():
                    self._wait()
        except Exception:
            logger.exception("the engine loop failed")
            self.failed = True
        finally:
            with self._wake:
                self._ended = True
            self.counters.failed_requests += len(self._sequences)
            self.on_end(EngineStopped("The engine has failed." if self.failed else "The engine was stopped."))

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()(self)

    def _wait(self) -> None:
        with self._wake:
            if not self._commands:
                self._wake.wait(_POLL_S if self.adapters.is_loading or not self.scheduler.is_idle else None)

    def step(self) -> bool:
        """One step; False when nothing could run. Decoding comes first: its tokens are emitted before the prefill."""
        for adapter, error in self.adapters.poll().items():
            self._fail([s for s in self._sequences.values() if s.request.adapter == adapter], error)
        started = time.monotonic()
        if self._flight is not None:
            self._land(self._flight, started)
        else:
            plan = self.scheduler.plan()
            if not plan:
                if self.scheduler.is_idle or self.adapters.is_loading:
                    self.last_progress = started
                return False
            if not plan.prefill:
                self._flight = self._draw(self._decode(plan.decode))
            if self._flight is None:
                self._run(plan)
        self.last_progress = time.monotonic()
        self.counters.step_seconds += self.last_progress - started
        return True

    def _run(self, plan: StepPlan) -> None:
        """Two forwards, one for decoding and one for the prefill. On the CPU the kernels for few and for many rows
        round differently. Also, decoded tokens need not wait for the prefill.
        """
        failures: list[tuple[TokenSequence, EngineError]] = []
        progressed = [self._timed(chunks, failures) for chunks in (plan.decode, plan.prefill) if chunks]
        self._conclude(failures, any(progressed))

    def _conclude(self, failures: list[tuple[TokenSequence, EngineError]], progressed: bool) -> None:
        if not progressed:
            # Every request of the step failed: are the requests at fault, or the device? If this raises, the engine is
            # broken, and they end as all others do.
            self.runner.check_health()
        self._emit(failures)
        self.counters.steps += 1

    def _land(self, flight: Outcomes, started: float) -> None:
        """Take in what was decoded. If the next step only decodes, its forward is launched first. Rows of requests that
        end here are then computed in vain and dropped.
        """
        ahead = self._decode_ahead(flight)
        self._flight = None
        failures: list[tuple[TokenSequence, EngineError]] = []
        live = [chunk for chunk in flight.chunks if self._is_live(chunk.sequence)]
        outcomes: list[StepResult] | None = None
        try:
            outcomes = flight.collect()
        except Exception:
            logger.exception("decoding failed")
        if outcomes is not None:
            progressed = self._commit([outcome for outcome in outcomes if self._is_live(outcome.chunk.sequence)])
        else:
            ahead, progressed = None, bool(live) and self._compute(live, failures)
        if ahead is not None:
            self._flight = self._draw(ahead, without=flight.revised)
            self._learn(0, time.monotonic() - started)
        self._conclude(failures, progressed or not live)

    def _decode_ahead(self, flight: Outcomes) -> tuple[StepBatch, torch.Tensor] | None:
        following = self.scheduler.plan_ahead(flight.drawn)
        if not following:
            return None
        places, chunks = zip(*following, strict=True)
        return self._decode(chunks, flight.carried(places))

    def _decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """Decode without waiting for the device. None where this is not possible or fails; `_compute` then finds the
        request at fault.
        """
        try:
            return self.runner.decode(chunks, carried)
        except Exception:
            logger.exception("decoding ahead failed")
            return None

    def _draw(
        self, decoded: tuple[StepBatch, torch.Tensor] | None, without: Collection[TokenSequence] = ()
    ) -> Outcomes | None:
        """Have the device draw the tokens of the requests that remain. None: as for `_decode`."""
        if decoded is None:
            return None
        batch, logits = decoded
        rows = [
            (chunk, row, row)
            for row, chunk in enumerate(batch.chunks)
            if self._is_live(chunk.sequence) and chunk.sequence not in without
        ]
        try:
            # A copy, since the next forward writes to the same logits.
            return Outcomes(rows, logits.to(torch.float32, copy=True), self.sampler) if rows else None
        except Exception:
            logger.exception("drawing ahead failed")
            return None

    def _is_live(self, sequence: TokenSequence) -> bool:
        return self._sequences.get(sequence.request_id) is sequence

    def _timed(self, chunks: Sequence[Chunk], failures: list[tuple[TokenSequence, EngineError]]) -> bool:
        """Compute the chunks, and learn how much prefill fits into the next step."""
        started = time.monotonic()
        progressed = self._compute(chunks, failures)
        tokens = sum(chunk.length for chunk in chunks)
        self._learn(tokens if tokens > len(chunks) else 0, time.monotonic() - started)
        return progressed

    def _learn(self, prefill_tokens: int, seconds: float) -> None:
        """How long computing so many tokens, or decoding, has taken."""
        if self.pace is not None:
            if prefill_tokens:
                self.pace.prefilled(prefill_tokens, seconds)
            else:
                self.pace.decoded(seconds)
            self.scheduler.prefill_limit = self.pace.tokens

    def _compute(self, chunks: Sequence[Chunk], failures: list[tuple[TokenSequence, EngineError]]) -> bool:
        """Run chunks together, or one by one when that fails, so that one request cannot fail another. Adds the
        requests that failed alone to `failures`. Returns whether any did not fail.
        """
        try:
            batch, logits = self.runner.forward(chunks)
            outcomes = Outcomes(rows_of_chunks(batch), logits, self.sampler).collect()
        except Exception as exc:
            request_ids = [chunk.sequence.request_id for chunk in chunks]
            logger.exception("a forward pass failed", extra={"request_ids": request_ids})
            if len(chunks) > 1 and self.runner.repeatable:
                return any([self._compute([chunk], failures) for chunk in chunks])
            error = exc if isinstance(exc, EngineError) else EngineError("The model could not be run for this request.")
            failures += [(chunk.sequence, error) for chunk in chunks]
            return False
        return self._commit(outcomes)

    def _commit(self, outcomes: Sequence[StepResult]) -> bool:
        """Returns whether the outcome of at least one request is not a failure."""
        events: list[tuple[TokenSequence, Event]] = []
        for outcome in outcomes:
            chunk, sequence = outcome.chunk, outcome.chunk.sequence
            sequence.prompt_logprobs += outcome.scores
            self._count(chunk)
            self.scheduler.commit(chunk)
            if chunk.completes:
                event = self._advance(sequence, outcome.draw)
                if not isinstance(event, EngineError):
                    self.scheduler.share(sequence)
                events.append((sequence, event))
        self._emit(events)
        return sum(isinstance(event, EngineError) for _, event in events) < len(outcomes)

    def _count(self, chunk: Chunk) -> None:
        if chunk.length == 1 and chunk.sequence.num_output:
            self.counters.decode_tokens += 1
        else:
            self.counters.prefill_tokens += chunk.length

    def _advance(self, sequence: TokenSequence, draw: Sampled | None) -> Event:
        """The next event of a sequence whose tokens are all computed."""
        sampling = sequence.request.sampling
        if (draw is not None and draw.token_id is None) or _has_nan(sequence):
            return _not_finite(sequence)
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if draw is not None and draw.token_id is not None:
            sequence.append(draw.token_id)
            self.counters.generated_tokens += 1
            token_ids = (draw.token_id,)
            logprobs = (draw.logprob,) if draw.logprob is not None else ()
        first = not sequence.delivered
        sequence.delivered = True
        cached = sequence.cached_len or 0 if first else 0
        self.counters.prompt_tokens += sequence.num_prompt if first else 0
        self.counters.cached_tokens += cached
        return TokenDelta(
            token_ids,
            logprobs,
            _finish_reason(token_ids, sequence, sampling.stop_token_ids, sampling.max_tokens),
            cached_tokens=cached,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
            timing=sequence.timing() if first else None,
        )

    def _emit(self, events: Sequence[tuple[TokenSequence, Event]]) -> None:
        for sequence, event in events:
            if isinstance(event, EngineError):
                self.counters.failed_requests += 1
                self._end(sequence)
            elif event.finish_reason is not None:
                self.counters.finished += 1
                self._end(sequence)
        if events:
            self.emit(events)

    def _end(self, sequence: TokenSequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.finish(sequence)
        if sequence.request.adapter:
            self.adapters.unwant(sequence.request.adapter)

    def _fail(self, sequences: Sequence[TokenSequence], error: EngineError) -> None:
        self._emit([(sequence, error) for sequence in sequences if sequence.request_id in self._sequences])


def _not_finite(sequence: TokenSequence) -> EngineError:
    """The adapter's fault, if there is one: the self-test has seen the base model compute finite values."""
    if sequence.request.adapter is not None:
        return AdapterRefused("With this adapter the model computes NaN or infinity: its values are too large.")
    return NonFiniteLogits("The model produced a value that is not finite for this request.")


def _has_nan(sequence: TokenSequence) -> bool:
    return not sequence.delivered and any(p is not None and math.isnan(p.logprob) for p in sequence.prompt_logprobs)


def _finish_reason(
    token_ids: tuple[int, ...], sequence: TokenSequence, stop_token_ids: frozenset[int], max_tokens: int
) -> FinishReason | None:
    if token_ids and token_ids[-1] in stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_output >= max_tokens else None
