"""Errors and what HTTP makes of them."""

import inspect
import pickle

import pytest

from engines.interface import errors as engine_errors
from renderers.base import RenderError
from serve_app.base import errors
from serve_app.base.errors import BudgetExceeded, LimitReached, to_http

RETRIED_BY_THE_SDK = {408, 409, 429, *range(500, 600)}


def every_error() -> list[Exception]:
    found: list[Exception] = [RenderError("no", "messages"), ValueError("a secret"), KeyError("x")]
    for module in (errors, engine_errors):
        for kind in vars(module).values():
            is_error = inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module.__name__
            if is_error and (kind is LimitReached or not kind.__subclasses__()):
                count = len(inspect.signature(kind.__init__).parameters) - 1
                special = {
                    LimitReached: ("m", 2.0),
                    BudgetExceeded: ("m", 2.0),
                    errors.UpstreamRefused: ("m", "n", "o", 422, "p"),
                    errors.UpstreamOverLimit: ("m", 2.0),
                    engine_errors.QueueFull: (5,),
                }
                arguments = special.get(kind, ("m", "n", "o")[:count])
                found.append(kind(*arguments))
    return found


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, str(copy)) == (type(error), error.args, str(error))


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_every_error_has_the_one_shape(error: Exception) -> None:
    found = to_http(error)
    assert list(found.body()) == ["error"]
    assert list(found.body()["error"]) == ["message", "type", "param", "code"]
    assert found.message
    assert found.type


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_what_may_be_tried_again_says_when_and_our_faults_say_never(error: Exception) -> None:
    found = to_http(error)
    if found.status == 500:
        assert found.headers == {"x-should-retry": "false"}
    elif found.status in RETRIED_BY_THE_SDK and not isinstance(error, errors.TotalTimeout):
        assert 1 <= int(found.headers["retry-after"]) <= 30


def test_the_callers_faults_are_never_answered_with_what_the_sdk_retries() -> None:
    mistakes = [error for error in every_error() if isinstance(error, errors.RequestError | RenderError)]
    assert len(mistakes) == 11
    assert not {to_http(error).status for error in mistakes} & RETRIED_BY_THE_SDK


def test_a_fault_of_ours_tells_nothing_about_its_inside() -> None:
    assert to_http(ValueError("/root/secret")).message == "The service failed on this request."


@pytest.mark.parametrize(
    ("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (29.5, "30"), (900.0, "30")]
)
def test_retry_after_is_rounded_up_within_its_bounds(wait_s: float, header: str) -> None:
    assert to_http(LimitReached("m", wait_s)).headers == {"retry-after": header}


def test_a_model_without_a_replica_says_why() -> None:
    found = to_http(errors.NoReplica("it is still being loaded"))
    assert (found.status, found.code) == (503, "unavailable")
    assert found.message == "No replica of this model is available now: it is still being loaded; try again."
