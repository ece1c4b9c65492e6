"""The body of POST /models/{id}/load: a checkpoint is loaded by every replica of its base model."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextvars import Context
from typing import TypeVar

from engines.interface.errors import EngineError
from engines.interface.protocol import GenerateRequest, SamplingParams
from serve_app.access.auth import Caller
from serve_app.api.answer import Edge
from serve_app.api.record import RequestRecord
from serve_app.api.schema.replies import LoadList, LoadReply
from serve_app.base.errors import InvalidRequest, NoReplica, ServingError
from serve_app.catalog.catalog import ResolvedModel
from serve_app.replicas.generation import on_replica, open_generation

T = TypeVar("T")


async def load_everywhere(edge: Edge, caller: Caller, record: RequestRecord, requested: str) -> LoadList:
    """Raises what `Catalog.resolve` raises, `InvalidRequest` for a model that is no checkpoint, `NoReplica`, and the
    error of the first replica if none can load it.
    """
    target = await edge.catalog.resolve(requested, caller)
    if target.adapter is None:
        raise InvalidRequest(f"Only a checkpoint can be loaded, and {requested!r} is a base model.", "model")
    record.about(target, streamed=False)
    reason = (await edge.replicas.readiness({target.deployment}))[target.deployment]
    replicas = edge.replicas.running(target.deployment)
    if reason is not None or not replicas:
        raise NoReplica(reason or "no replica is running")
    async with edge.catalog.keep(target):
        outcomes = await _at_once(
            [_load(edge, target, f"{record.request_id}/{name}", caller.name, name) for name in replicas]
        )
    if not any(isinstance(outcome, float) for outcome in outcomes):
        raise next(outcome for outcome in outcomes if isinstance(outcome, Exception))
    data = [_reply(name, outcome) for name, outcome in zip(replicas, outcomes, strict=True)]
    return {"object": "list", "digest": target.adapter.digest, "data": data}


async def _at_once(loads: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all to their end, or none on."""
    # Each in a context of its own: Serve takes calls in the context of one request for one call, and loses the others.
    tasks = [asyncio.get_running_loop().create_task(load, context=Context()) for load in loads]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _load(
    edge: Edge, target: ResolvedModel, request_id: str, tenant: str, replica: str
) -> float | EngineError | ServingError:
    """Generate one token on this replica: seconds until it came, or why none did."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    prompt = (min(target.end_token_ids, default=0),)
    request = GenerateRequest(request_id, prompt, sampling, target.adapter, tenant)
    began = time.monotonic()
    try:
        deltas = edge.replicas.generate(target.deployment, request, affinity=on_replica(replica))
        async with open_generation(deltas, edge.limits.first_token_timeout_s, edge.gaps_of(target.model.id)):
            return time.monotonic() - began
    except (EngineError, ServingError) as exc:
        return exc


def _reply(name: str, outcome: float | EngineError | ServingError) -> LoadReply:
    if isinstance(outcome, float):
        return {"replica": name, "object": "load", "seconds": round(outcome, 3), "error": None}
    return {"replica": name, "object": "load", "seconds": None, "error": str(outcome)}
