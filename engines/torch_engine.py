"""The engine on torch and transformers: the asyncio interface in front of the loop's thread."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from threading import Thread
from typing import Any

import torch

from engines.compute.assembly import AssembledModel, assemble_model
from engines.host.delivery import deliver
from engines.host.switching import switch_soon
from engines.interface.config import EngineConfig
from engines.interface.errors import EngineError, EngineStopped, QueueFull, RequestRefused
from engines.interface.protocol import (
    Adapter,
    EngineCounters,
    EngineStats,
    GenerateRequest,
    ModelFacts,
    Output,
    OutputSink,
)
from engines.loop import Command, Emit, EngineLoop, Event, Runner
from engines.lora.cache import AdapterCache, HostAdapter
from engines.lora.format.targets import LoraTargets
from engines.lora.format.weights import read_adapter
from engines.parallel.group import TensorGroup
from engines.parallel.leader import LeadingModules, LeadingRunner
from engines.planning.block_pool import BlockPool
from engines.planning.places import whom_to_displace
from engines.planning.prefill_pace import PrefillPace
from engines.planning.scheduler import Scheduler
from engines.planning.sequence import TokenSequence
from engines.vision.features import ImageCounters

logger = logging.getLogger(__name__)

Assemble = Callable[[EngineConfig], AssembledModel]


class TorchEngine:
    """Implements `protocol.Engine`. Everything but the loop itself happens on the event loop of `start`.

    `assemble`: makes the model of this process. The other processes of a tensor-parallel group call `assemble_model`.
    """

    def __init__(self, config: EngineConfig, assemble: Assemble = assemble_model) -> None:
        self._config = config
        self._assemble = assemble
        self._live: dict[str, TokenSequence] = {}
        self._parts: _Parts | None = None
        self._thread: Thread | None = None
        self._closed = False

    @property
    def facts(self) -> ModelFacts:
        return self._running_parts().facts

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def emit(events: Sequence[tuple[TokenSequence, Event]]) -> None:
            # A closed event loop has no receivers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._deliver, events)

        def on_end(error: EngineStopped) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end_all, error)

        assembling = asyncio.ensure_future(asyncio.to_thread(_load, self._config, self._assemble, emit, on_end))
        try:
            parts = await asyncio.shield(assembling)
        except asyncio.CancelledError:
            assembling.add_done_callback(_let_go)
            raise
        if self._closed:
            await asyncio.to_thread(parts.close)
            raise EngineStopped("The engine was closed while it was started.")
        self._parts = parts
        self._thread = Thread(target=self._parts.run, name="engine-loop", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._closed = True
        parts, thread = self._parts, self._thread
        if parts is None or thread is None:
            return
        parts.loop.stop()
        # The loop's last events come through the event loop before the end of this wait does.
        await asyncio.to_thread(thread.join)
        await asyncio.to_thread(parts.close)
        self._parts = None

    def submit(self, request: GenerateRequest, sink: OutputSink) -> None:
        parts = self._running_parts()
        if self._closed:
            raise EngineStopped("The engine is being closed.")
        _check(request, parts.facts)
        if request.request_id in self._live:
            raise RequestRefused("request_id", f"request_id {request.request_id!r} is in use.")
        if len(self._live) >= self._config.max_running + self._config.max_waiting:
            self._make_room(request.tenant)
        sequence = TokenSequence.of(request, sink)
        if not parts.loop.post(lambda loop: loop.add(sequence)):
            raise EngineStopped("The engine has failed.")
        self._live[request.request_id] = sequence

    def abort(self, request_id: str) -> None:
        self._end(request_id, lambda loop: loop.abort(request_id))

    def stats(self) -> EngineStats:
        if self._parts is None:
            return EngineStats(failed=True)
        pending = (sequence.num_pending for sequence in self._live.values())
        return replace(self._parts.stats(), queued_tokens=sum(tokens for tokens in pending if tokens > 1))

    def _make_room(self, tenant: str) -> None:
        """End the last request of a tenant that has more places than this one. Raises `QueueFull` if there is none."""
        waiting = [(s.request.tenant, s) for s in self._live.values() if not s.delivered]
        displaced = whom_to_displace(waiting, tenant)
        full = QueueFull(self._config.max_waiting)
        if displaced is None:
            raise full
        self._end(displaced.request_id, lambda loop: loop.displace(displaced.request_id))
        deliver([(displaced.sink, Output(displaced.request_id, full))])

    def _end(self, request_id: str, command: Command) -> None:
        """Deliver nothing more to a request, and have the loop end it. Unknown ids are ignored."""
        if self._live.pop(request_id, None) is not None and self._parts is not None:
            self._parts.loop.post(command)

    def _running_parts(self) -> "_Parts":
        if self._parts is None:
            raise EngineStopped("The engine is not running.")
        return self._parts

    def _end_all(self, error: EngineStopped) -> None:
        self._deliver([(sequence, error) for sequence in self._live.values()])

    def _deliver(self, events: Sequence[tuple[TokenSequence, Event]]) -> None:
        """Requests that were aborted meanwhile get nothing."""
        outputs: list[tuple[OutputSink, Output]] = []
        for sequence, event in events:
            if self._live.get(sequence.request_id) is not sequence:
                continue
            if isinstance(event, EngineError) or event.finish_reason is not None:
                del self._live[sequence.request_id]
            outputs.append((sequence.sink, Output(sequence.request_id, event)))
        for request_id in deliver(outputs):
            self.abort(request_id)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a started engine is made of."""

    loop: EngineLoop
    adapters: AdapterCache[Any]
    pool: BlockPool
    facts: ModelFacts
    images: ImageCounters
    threads: int
    group: TensorGroup | None

    def run(self) -> None:
        # A setting of this thread, but until this thread has used it, another thread's call replaces it.
        torch.set_num_threads(self.threads)
        torch.get_num_threads()
        switch_soon()
        with torch.inference_mode():
            self.loop.run()

    def close(self) -> None:
        """Only when the loop has ended, or has not started."""
        self.adapters.close()
        if self.group is not None:
            self.group.close()

    def stats(self) -> EngineStats:
        loop = self.loop
        return EngineStats(
            running=len(loop.scheduler.running),
            waiting=len(loop.scheduler.queue),
            blocks_total=self.pool.num_blocks - 1,
            blocks_free=self.pool.num_free,
            blocks_cached=self.pool.num_idle,
            adapter_slots_total=self.adapters.max_slots,
            adapter_slots_pinned=self.adapters.num_pinned,
            adapters=self.adapters.resident,
            adapters_in_memory=self.adapters.num_in_memory,
            adapter_bytes=self.adapters.host_bytes,
            adapters_loading=self.adapters.num_to_load,
            stalled_s=0.0 if loop.scheduler.is_idle else time.monotonic() - loop.last_progress,
            failed=loop.failed or (self.group is not None and self.group.lost),
            counters=self.counters(),
        )

    def counters(self) -> EngineCounters:
        adapters = self.adapters.counters
        return EngineCounters(
            **asdict(self.loop.counters),
            preemptions=self.loop.scheduler.preemptions,
            adapter_loads=adapters.loads,
            adapter_load_seconds=adapters.load_seconds,
            adapter_evictions=adapters.evictions,
            adapter_refusals=adapters.refusals,
            **asdict(self.images),
        )


def _let_go(assembling: "asyncio.Future[_Parts]") -> None:
    """Close the parts of a start that was given up."""
    if not assembling.cancelled() and assembling.exception() is None:
        Thread(target=assembling.result().close, name="engine-close").start()


def _load(config: EngineConfig, assemble: Assemble, emit: Emit, on_end: Callable[[EngineStopped], None]) -> _Parts:
    """Load, verify and size everything. Takes as long as loading the model. Runs on its own thread."""
    group = TensorGroup(config) if config.tensor_parallel > 1 else None
    try:
        with torch.inference_mode():
            model = assemble(config)
        return _put_together(config, model, group, emit, on_end)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _put_together(
    config: EngineConfig,
    model: AssembledModel,
    group: TensorGroup | None,
    emit: Emit,
    on_end: Callable[[EngineStopped], None],
) -> _Parts:
    runner: Runner = model.runner
    modules: Any = model.runner.adapters
    if group is not None:
        runner = LeadingRunner(model.runner, group, config.block_size)
        modules = LeadingModules(modules, group)
    pool = BlockPool(model.num_blocks, config.block_size)
    loops: list[EngineLoop] = []
    adapters: AdapterCache[Any] = AdapterCache(
        load=lambda adapter: _read(adapter, model.targets, modules, config),
        modules=modules,
        max_slots=config.max_adapters,
        byte_budget=config.adapter_bytes,
        loaders=config.adapter_loaders,
        timeout_s=config.adapter_load_timeout_s,
        on_loaded=lambda: loops[0].post(_do_nothing),
    )
    scheduler = Scheduler(
        pool,
        adapters,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_step_tokens_decoding=config.max_step_tokens_decoding,
        prefix_cache=config.prefix_cache and not model.has_states,
        whole_images=model.whole_images,
    )
    pace = PrefillPace(config.max_step_tokens_decoding, config.prefill_ratio)
    loops.append(EngineLoop(runner, scheduler, adapters, emit, on_end, pace))
    capacity = (model.num_blocks - 1) * config.block_size
    facts = ModelFacts(model.vocab_size, model.context_length, capacity, model.images is not None)
    return _Parts(loops[0], adapters, pool, facts, model.images or ImageCounters(), model.threads, group)


def _do_nothing(loop: EngineLoop) -> None:
    """A command that only wakes the loop."""


def _read(adapter: Adapter, targets: LoraTargets, modules: Any, config: EngineConfig) -> HostAdapter:
    """Runs on a loader's thread, whose torch must not take cores from the loop."""
    torch.set_num_threads(1)
    limits = {"max_rank": config.max_adapter_rank, "max_bytes": config.max_adapter_file_bytes}
    prepared: HostAdapter = modules.prepare(read_adapter(adapter, targets, **limits))
    return prepared


def _check(request: GenerateRequest, facts: ModelFacts) -> None:
    """Raises `RequestRefused` for what this model cannot run."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestRefused("prompt", "The prompt is empty.")
    if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
        bad = next(token_id for token_id in prompt if not 0 <= token_id < facts.vocab_size)
        raise RequestRefused("prompt", f"Token id {bad} is not in the vocabulary (0 to {facts.vocab_size - 1}).")
    if request.images and not facts.takes_images:
        raise RequestRefused("images", "This model takes no images.")
    biased = next((i for i, _ in request.sampling.logit_bias if not 0 <= i < facts.vocab_size), None)
    if biased is not None:
        raise RequestRefused(
            "logit_bias", f"Token id {biased} in logit_bias is not in the vocabulary (0 to {facts.vocab_size - 1})."
        )
    total = len(prompt) + request.sampling.max_tokens
    if total > facts.context_length:
        raise RequestRefused(
            "max_tokens",
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{len(prompt)} + {request.sampling.max_tokens} > {facts.context_length}",
        )
