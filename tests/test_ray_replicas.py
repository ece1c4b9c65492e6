"""What failures of Serve mean to those who wait for tokens."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from engines.errors import QueueFull, RequestRefused
from serve_app.errors import NoReplica, ReplicaLost, to_http
from serve_app.ray_replicas import translated


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
