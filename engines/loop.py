"""The engine loop: admit, schedule, run, sample, emit, again and again, on one thread that owns everything."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from threading import Condition
from typing import Protocol

import torch

from engines.batch import StepBatch, wanted_rows
from engines.errors import AdapterError, EngineError, EngineStopped, NonFiniteLogits
from engines.pace import PrefillPace
from engines.protocol import Adapter, FinishReason, TokenDelta, TokenLogprob
from engines.sampler import Sampled, prompt_logprobs, sample
from engines.scheduler import Chunk, Scheduler
from engines.sequence import Sequence

logger = logging.getLogger(__name__)

_POLL_S = 0.05
"""How often the loop looks at running adapter loads while nothing else can run."""

Event = TokenDelta | EngineError
Emit = Callable[[SequenceOf[tuple[Sequence, Event]]], None]
Command = Callable[["EngineLoop"], None]


class Runner(Protocol):
    """Computes chunks. Running the same chunk again is harmless as long as it was not committed, if `repeatable`."""

    repeatable: bool

    def forward(self, chunks: SequenceOf[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        """The batch, and logits [wanted rows, vocab]."""

    def check_health(self) -> None:
        """Compute something that depends on no request; raises whatever it raises."""


class Adapters(Protocol):
    """What the loop needs of the adapter cache beyond what the scheduler does."""

    def want(self, adapter: Adapter) -> None: ...
    def unwant(self, adapter: Adapter) -> None: ...
    def poll(self) -> dict[Adapter, AdapterError]:
        """Take in finished loads; returns what failed."""

    @property
    def is_loading(self) -> bool: ...


@dataclass(slots=True)
class Counters:
    """Only ever grow. Tokens are computed tokens: a preempted prompt counts again."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    finished: int = 0
    failed_requests: int = 0
    step_seconds: float = 0.0


@dataclass(slots=True)
class EngineLoop:
    """`post` may be called from any thread; everything else happens on the thread that calls `run`.

    `emit` takes the events of a step. `on_end` is called once, with why: whoever posted requests ends those that are
    left, since a loop that has failed cannot be trusted to know them. `pace` None: prefill beside decoding is as large
    as the scheduler's own limit.
    """

    runner: Runner
    scheduler: Scheduler
    adapters: Adapters
    emit: Emit
    on_end: Callable[[EngineStopped], None]
    pace: PrefillPace | None = None
    counters: Counters = field(default_factory=Counters)
    failed: bool = False
    last_progress: float = field(default_factory=time.monotonic)
    _commands: deque[Command] = field(default_factory=deque)
    _wake: Condition = field(default_factory=Condition)
    _sequences: dict[str, Sequence] = field(default_factory=dict)
    _stopping: bool = False
    _ended: bool = False

    def post(self, command: Command) -> bool:
        """Have the command run between two steps; False when the loop has ended and nothing will be run any more."""
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

    def add(self, sequence: Sequence) -> None:
        """A command: queue a request."""
        if self.scheduler.is_idle:
            self.last_progress = time.monotonic()
        self.counters.requests += 1
        self._sequences[sequence.request_id] = sequence
        if sequence.request.adapter:
            self.adapters.want(sequence.request.adapter)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """A command: end a request without output; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def run(self) -> None:
        """Step until `stop`, or until something fails that is no request's fault."""
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
            self.on_end(EngineStopped("The engine has failed." if self.failed else "The engine was stopped."))

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()(self)

    def _wait(self) -> None:
        with self._wake:
            if not self._commands:
                self._wake.wait(_POLL_S if self.adapters.is_loading or not self.scheduler.is_idle else None)

    def step(self) -> bool:
        """One step; False when nothing could run. Decoding comes first and its tokens are out before the prefill."""
        for adapter, error in self.adapters.poll().items():
            self._fail([s for s in self._sequences.values() if s.request.adapter == adapter], error)
        started = time.monotonic()
        plan = self.scheduler.plan()
        if not plan:
            if self.scheduler.is_idle or self.adapters.is_loading:
                self.last_progress = started
            return False
        failures: list[tuple[Sequence, EngineError]] = []
        # Two forwards, not one: on the CPU the kernels for few rows and for many differ, also in their rounding, and
        # the tokens of those who decode need not wait for the prefill.
        progressed = [self._timed(chunks, failures) for chunks in (plan.decode, plan.prefill) if chunks]
        if not any(progressed):
            # Every request of the step failed: is it they, or the device? If this raises, the engine is broken, and
            # they end as all others do.
            self.runner.check_health()
        self._emit(failures)
        self.last_progress = time.monotonic()
        self.counters.steps += 1
        self.counters.step_seconds += self.last_progress - started
        return True

    def _timed(self, chunks: SequenceOf[Chunk], failures: list[tuple[Sequence, EngineError]]) -> bool:
        """Compute them, and learn from it how much prefill the next step has time for."""
        started = time.monotonic()
        progressed = self._compute(chunks, failures)
        if self.pace is not None:
            seconds, tokens = time.monotonic() - started, sum(chunk.length for chunk in chunks)
            if tokens > len(chunks):
                self.pace.prefilled(tokens, seconds)
            else:
                self.pace.decoded(seconds)
            self.scheduler.prefill_limit = self.pace.tokens
        return progressed

    def _compute(self, chunks: SequenceOf[Chunk], failures: list[tuple[Sequence, EngineError]]) -> bool:
        """Run chunks together, or one by one when that fails, so that one request cannot fail another. Adds those
        that failed alone to `failures`; returns whether any did not fail.
        """
        try:
            results = _results(*self.runner.forward(chunks))
        except Exception as exc:
            request_ids = [chunk.sequence.request_id for chunk in chunks]
            logger.exception("a forward pass failed", extra={"request_ids": request_ids})
            if len(chunks) > 1 and self.runner.repeatable:
                return any([self._compute([chunk], failures) for chunk in chunks])
            error = exc if isinstance(exc, EngineError) else EngineError("The model could not be run for this request.")
            failures += [(chunk.sequence, error) for chunk in chunks]
            return False
        return self._commit(results)

    def _commit(self, results: SequenceOf["_Result"]) -> bool:
        """Returns whether any request has not failed by its result."""
        events: list[tuple[Sequence, Event]] = []
        for result in results:
            chunk, sequence = result.chunk, result.chunk.sequence
            sequence.prompt_logprobs += result.scores
            self._count(chunk)
            self.scheduler.commit(chunk)
            if chunk.completes:
                event = self._advance(sequence, result.draw)
                if not isinstance(event, EngineError):
                    self.scheduler.share(sequence)
                events.append((sequence, event))
        self._emit(events)
        return sum(isinstance(event, EngineError) for _, event in events) < len(results)

    def _count(self, chunk: Chunk) -> None:
        if chunk.length == 1 and chunk.sequence.num_output:
            self.counters.decode_tokens += 1
        else:
            self.counters.prefill_tokens += chunk.length

    def _advance(self, sequence: Sequence, draw: Sampled | None) -> Event:
        """The next event of a sequence whose tokens are all computed."""
        sampling = sequence.request.sampling
        if (draw is not None and draw.token_id is None) or _has_nan(sequence):
            return NonFiniteLogits("The model produced a value that is not finite for this request.")
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if draw is not None and draw.token_id is not None:
            sequence.append(draw.token_id)
            token_ids = (draw.token_id,)
            logprobs = (draw.logprob,) if draw.logprob is not None else ()
        first = not sequence.delivered
        sequence.delivered = True
        cached = sequence.cached_len or 0 if first else 0
        self.counters.cached_tokens += cached
        return TokenDelta(
            token_ids,
            logprobs,
            _finish_reason(token_ids, sequence, sampling.stop_token_ids, sampling.max_tokens),
            cached_tokens=cached,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
        )

    def _emit(self, events: SequenceOf[tuple[Sequence, Event]]) -> None:
        for sequence, event in events:
            if isinstance(event, EngineError):
                self.counters.failed_requests += 1
                self._end(sequence)
            elif event.finish_reason is not None:
                self.counters.finished += 1
                self._end(sequence)
        if events:
            self.emit(events)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.finish(sequence)
        if sequence.request.adapter:
            self.adapters.unwant(sequence.request.adapter)

    def _fail(self, sequences: SequenceOf[Sequence], error: EngineError) -> None:
        self._emit([(sequence, error) for sequence in sequences if sequence.request_id in self._sequences])


@dataclass(frozen=True, slots=True)
class _Result:
    """What a chunk's logits say: the next token, if one is wanted, and the scores of prompt tokens, if wanted."""

    chunk: Chunk
    draw: Sampled | None
    scores: list[TokenLogprob | None]


def _results(batch: StepBatch, logits: torch.Tensor) -> list[_Result]:
    """Changes no sequence, so whatever it raises, the chunks can be run again."""
    rows = _rows_of(batch)
    complete = [(chunk, last) for chunk, _, last in rows if chunk.completes and _samples(chunk)]
    sampled: list[Sampled] = []
    if complete:
        picked = [last for _, last in complete]
        own = logits if picked == list(range(logits.shape[0])) else logits[picked]
        sampled = sample(own, [chunk.sequence for chunk, _ in complete])
    draws = {chunk.sequence.request_id: draw for (chunk, _), draw in zip(complete, sampled, strict=True)}
    return [
        _Result(chunk, draws.get(chunk.sequence.request_id), _score_prompt(chunk, logits, first))
        for chunk, first, _ in rows
    ]


def _rows_of(batch: StepBatch) -> list[tuple[Chunk, int, int]]:
    """Each chunk with its first and last row among the wanted logits; last < first when it has none."""
    rows: list[tuple[Chunk, int, int]] = []
    at = 0
    for chunk in batch.chunks:
        count = len(wanted_rows(chunk, 0))
        rows.append((chunk, at, at + count - 1))
        at += count
    return rows


def _samples(chunk: Chunk) -> bool:
    return chunk.sequence.request.sampling.max_tokens > 0


def _score_prompt(chunk: Chunk, logits: torch.Tensor, first: int) -> list[TokenLogprob | None]:
    """Log-probabilities of the prompt tokens after the chunk's tokens. Not again after a preemption."""
    sequence, sampling = chunk.sequence, chunk.sequence.request.sampling
    if sampling.prompt_logprobs is None or sequence.num_output or sequence.delivered:
        return []
    # The first token is predicted by nothing.
    scores: list[TokenLogprob | None] = [] if sequence.prompt_logprobs else [None]
    start = max(0, len(sequence.prompt_logprobs) - 1)  # the row that predicts the first token not scored yet
    targets = sequence.token_ids[start + 1 : min(chunk.end + 1, sequence.num_prompt)]
    if targets:
        offset = first + start - chunk.start
        scores += prompt_logprobs(logits[offset : offset + len(targets)], targets, sampling)
    return scores


def _has_nan(sequence: Sequence) -> bool:
    return not sequence.delivered and any(p is not None and math.isnan(p.logprob) for p in sequence.prompt_logprobs)


def _finish_reason(
    token_ids: tuple[int, ...], sequence: Sequence, stop_token_ids: frozenset[int], max_tokens: int
) -> FinishReason | None:
    if token_ids and token_ids[-1] in stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_output >= max_tokens else None
