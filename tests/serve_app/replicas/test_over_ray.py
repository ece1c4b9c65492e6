"""What failures of Serve mean to those who wait for tokens."""

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)

from engines.interface.errors import QueueFull, RequestRefused
from engines.interface.protocol import GenerateRequest, SamplingParams
from serve_app.base.errors import NoReplica, ReplicaLost, to_http
from serve_app.replicas.channel.listener import Listener
from serve_app.replicas.over_ray import RayReplicas, translated
from serve_app.replicas.readiness import ReadinessWatch
from serve_app.replicas.reports import ReplicaReports
from tests.support.replicas.report_clock import Clock, said


def as_task_error(cause: Exception) -> Exception:
    """How the actor transport brings a replica's exception: an instance of both classes."""
    error = RayTaskError("run", "the traceback", cause)
    raised: Exception = error.as_instanceof_cause()
    return raised


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (BackPressureError(num_queued_requests=5, max_queued_requests=4), QueueFull, 429),
        (DeploymentUnavailableError("engine"), NoReplica, 503),
        (ActorDiedError(), ReplicaLost, 503),
        (ActorUnavailableError("gone", b"x" * 16), ReplicaLost, 503),
        (RequestCancelledError("id"), ReplicaLost, 503),
        (TaskCancelledError(), ReplicaLost, 503),
        (ReplicaLost("cannot reach"), ReplicaLost, 503),
        (RequestRefused("prompt", "too long"), RequestRefused, 400),
        (as_task_error(RequestRefused("prompt", "too long")), RequestRefused, 400),
        (as_task_error(ReplicaLost("cannot reach")), ReplicaLost, 503),
        (KeyError("a fault of ours"), KeyError, 500),
    ],
)
def test_every_failure_becomes_an_error_of_the_service(error, expected, status):
    meaning = translated(error)
    assert type(meaning) is expected
    assert to_http(meaning).status == status


def test_the_callers_fault_keeps_its_words_over_both_transports():
    refused = RequestRefused("prompt", "prompt has 9 tokens, the limit is 8.")
    assert str(translated(refused)) == str(translated(as_task_error(refused))) == "prompt has 9 tokens, the limit is 8."


class ClosedHandle:
    """A handle to an application when Serve is shutting down."""

    def options(self, **_):
        return self

    def remote(self, *_):
        raise RayServeException("Serve is shutting down")


class Unanswered:
    """A handle whose calls no replica takes."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.called = asyncio.Event()

    def options(self, **_):
        return self

    def remote(self, *_):
        self.calls += 1
        self.called.set()
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def __await__(self):
        return asyncio.Event().wait().__await__()


async def ask(reports: ReplicaReports, happens: Callable[[], None]) -> tuple[Unanswered, Exception | None]:
    """A request that no replica takes while something happens; how its wait ended, None if it goes on."""
    listener, handle = await Listener.start("127.0.0.1"), Unanswered()
    replicas = RayReplicas(
        ReadinessWatch(reports, dict), listener, no_replica_timeout_s=1, open_handle=lambda app: handle
    )
    deltas = replicas.generate("m", GenerateRequest("r", (1, 2), SamplingParams(max_tokens=1, seed=0)), affinity="")
    first = asyncio.ensure_future(anext(deltas))
    await handle.called.wait()
    happens()
    await asyncio.wait([first], timeout=1.5)
    error = first.exception() if first.done() else None
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await deltas.aclose()
    await replicas.close()
    await listener.close()
    return handle, error


def of_two_replicas() -> tuple[Clock, ReplicaReports]:
    clock = Clock()
    reports = ReplicaReports(clock.now)
    reports.put("m", {"a": said(0), "b": said(0)})
    return clock, reports


def test_a_request_that_a_replica_may_have_got_before_it_went_silent_is_given_up_for_another_one():
    clock, reports = of_two_replicas()

    def goes_silent() -> None:
        clock.run(reports, 10.0)
        reports.put("m", {"a": said(0), "b": said(1)})

    handle, error = asyncio.run(ask(reports, goes_silent))
    assert isinstance(error, ReplicaLost)
    assert str(error) == "The replica for this request does not answer."
    assert (handle.calls, handle.cancelled) == (1, 1)


def test_a_request_waits_on_when_the_replica_was_silent_before_or_no_other_one_is_ready():
    clock, reports = of_two_replicas()
    clock.run(reports, 10.0)
    reports.put("m", {"a": said(0), "b": said(1)})
    assert reports.silent("m") == {"a"}
    assert asyncio.run(ask(reports, lambda: None))[1] is None
    assert asyncio.run(ask(reports, lambda: clock.run(reports, 10.0)))[1] is None
    assert reports.silent("m") == {"a", "b"}


def test_a_call_that_cannot_be_made_leaves_no_stream_behind():
    async def main() -> None:
        listener = await Listener.start("127.0.0.1")
        watch = ReadinessWatch(ReplicaReports(), dict)
        replicas = RayReplicas(watch, listener, no_replica_timeout_s=1, open_handle=lambda app: ClosedHandle())
        request = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=1, seed=0))
        with pytest.raises(RayServeException):
            await anext(replicas.generate("m", request, affinity=""))
        assert listener.open_streams == 0
        await listener.close()

    asyncio.run(main())
