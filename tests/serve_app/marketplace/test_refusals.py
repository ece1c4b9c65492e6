"""Which statuses another endpoint may mend, and which tell the caller what is wrong."""

import time
from email.utils import formatdate

import pytest

from serve_app.base.errors import UpstreamFailed, UpstreamRefused, to_http
from serve_app.marketplace.refusals import error_of, error_status, judged
from serve_app.marketplace.secret import Secret

NO = Secret(None)
PAGE = b"\n<!DOCTYPE html><html></html>"


@pytest.mark.parametrize(
    "status", [301, 304, 401, 402, 403, 404, 405, 407, 408, 409, 421, 425, 426, 429, 500, 503, 599]
)
def test_statuses_that_are_the_endpoints_fault(status: int) -> None:
    assert isinstance(judged(status, b'{"error":{"message":"no"}}', NO), UpstreamFailed)


@pytest.mark.parametrize("status", [400, 406, 410, 413, 415, 422, 451])
def test_statuses_that_are_the_callers_fault_pass_through(status: int) -> None:
    body = b'{"error":{"message":"too long","type":"t","param":"prompt","code":"c"}}'
    error = to_http(judged(status, body, NO))
    assert (error.status, dict(error.headers)) == (status, {})
    assert error.body() == {"error": {"message": "too long", "type": "t", "param": "prompt", "code": "c"}}


@pytest.mark.parametrize(
    "about",
    [
        '"code":403,"metadata":{"reasons":["violence"],"flagged_input":"..."}',  # as OpenRouter says it
        '"code":"content_filter"',
        '"code":"content_policy_violation"',
        '"type":"moderation_error"',
    ],
)
def test_a_prompt_that_is_forbidden_is_its_callers_fault(about: str) -> None:
    """Else one caller could take an endpoint from all."""
    error = judged(403, b'{"error":{"message":"flagged",%b}}' % about.encode(), NO)
    assert isinstance(error, UpstreamRefused)
    assert (str(error), error.status) == ("flagged", 403)


@pytest.mark.parametrize("about", ['"code":"content"', '"metadata":{"reasons":[]}', '"metadata":["reasons"]'])
def test_what_else_is_forbidden_is_the_endpoints_fault(about: str) -> None:
    assert isinstance(judged(403, b'{"error":{"message":"no",%b}}' % about.encode(), NO), UpstreamFailed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":"no"}', "no"),
        (b'{"object":"error","message":"no","code":400}', "no"),
        (b'{"message":"no"}', "no"),
        (b'{"detail":"no"}', "no"),
        (b'{"detail":[{"loc":["body","stop",0],"msg":"must be text"}]}', "stop.0: must be text"),
        (b'{"detail":[{"msg":"must be text"}]}', "must be text"),
        (b"no", "no"),
        (b'{"error":{"message":"' + b"a" * 9999, "The endpoint refused the request."),
        (b'{"error":{"message":"' + b"a" * 9999 + b'"}}', "a" * 2000),
        (b"", "The endpoint refused the request."),
        (b'{"error":{"message":["no"]}}', "The endpoint refused the request."),
        (b"\xff\x00", "The endpoint refused the request."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_message_is_found_in_many_shapes(body: bytes, message: str) -> None:
    error = judged(400, body, NO)
    assert isinstance(error, UpstreamRefused)
    assert str(error) == message
    assert error.kind == "invalid_request_error"


def test_a_page_is_no_word_of_the_api_except_that_the_body_is_too_large() -> None:
    assert isinstance(judged(400, PAGE, NO), UpstreamFailed)
    assert str(judged(413, PAGE, NO)) == "The endpoint refused the request."


def test_the_key_is_in_no_word_of_it() -> None:
    body = b'{"error":{"message":"Bearer sk-the-key","type":"sk-the-key","param":"sk-the-key","code":"sk-the-key"}}'
    for status in (400, 500):
        error = judged(status, body, Secret("sk-the-key"))
        assert "the-key" not in repr((error, error.args, to_http(error)))


def test_the_upstreams_words_are_not_in_the_log_except_for_its_code() -> None:
    body = b'{"error":{"message":"Say hello","code":"model_overloaded"}}'
    assert str(judged(503, body, NO)) == "The upstream answered 503 (model_overloaded)."
    assert str(judged(503, b'{"error":{"code":"Say hello"}}', NO)) == "The upstream answered 503."


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7), ("0", 0), ("", 0), ("-1", 0), ("soon", 0), ("1e9", 0), ("9" * 30, 0)]
)
def test_retry_after_in_seconds(header: str, seconds: float) -> None:
    error = judged(429, b"", NO, header)
    assert isinstance(error, UpstreamFailed)
    assert error.retry_after_s == seconds


def test_retry_after_as_a_date() -> None:
    error = judged(503, b"", NO, formatdate(time.time() + 60, usegmt=True))
    assert isinstance(error, UpstreamFailed)
    assert 50 < error.retry_after_s <= 60


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 400}, 400),
        ({"code": "429"}, 429),
        ({"status": 503}, 503),
        ({"code": "bad"}, 500),
        ({"code": 200}, 500),
    ],
)
def test_an_error_inside_of_a_reply_may_name_its_status(error: dict[str, object], status: int) -> None:
    assert error_status(error) == status


@pytest.mark.parametrize("value", [{}, {"error": None}, {"error": ""}, {"object": "text_completion"}])
def test_what_is_no_error(value: dict[str, object]) -> None:
    assert error_of(value) is None
