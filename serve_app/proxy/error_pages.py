"""The errors that the proxies answer themselves, in the service's error format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from serve_app.base.errors import HttpError

HEADER_TIMEOUT_S = 5  # a client needs one round trip to send headers
HEADER_BYTES = 16384
_INVALID = "invalid_request_error"
_SERVER = "server_error"


def _again(status: int, message: str, kind: str, code: str, retry_after_s: int) -> HttpError:
    return HttpError(status, f"{message}; try again.", kind, code=code, headers={"retry-after": str(retry_after_s)})


PAGES: Mapping[int, HttpError] = {
    error.status: error
    for error in (
        HttpError(400, "The request is not valid HTTP.", _INVALID, code="invalid_http"),
        HttpError(404, "There is no such path.", _INVALID, code="not_found"),
        HttpError(
            431,
            f"The request's headers must have at most {HEADER_BYTES} bytes together.",
            _INVALID,
            code="headers_too_large",
        ),
        _again(429, "The service is overloaded", "rate_limit_error", "overloaded", 2),
        HttpError(
            500,
            "The service failed on this request.",
            _SERVER,
            code="internal_error",
            headers={"x-should-retry": "false"},
        ),
        _again(502, "The ingress that served this request was lost", _SERVER, "unavailable", 1),
        _again(503, "No ingress can take the request now", _SERVER, "unavailable", 2),
        _again(504, "The ingress did not answer in time", _SERVER, "timeout", 5),
    )
}


def page_of(status: int) -> HttpError:
    """The page for an error that Serve sends as plain text."""
    if status in PAGES:
        return PAGES[status]
    kind = _SERVER if status >= 500 else _INVALID
    return HttpError(status, f"{HTTPStatus(status).phrase}.", kind)


@dataclass(frozen=True, slots=True)
class Pages:
    """Files for HAProxy: whole responses by status, and the body for a status that HAProxy does not support."""

    files: Mapping[int, Path]
    headers_too_large: Path


def write_pages(folder: Path) -> Pages:
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for status, error in PAGES.items():
        if status != HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            files[status] = folder / f"{status}.http"
            files[status].write_bytes(_as_http(error))
    too_large = folder / "431.json"
    too_large.write_bytes(content_of(PAGES[HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE]))
    return Pages(files, too_large)


def content_of(error: HttpError) -> bytes:
    return json.dumps(error.body()).encode()


def _as_http(error: HttpError) -> bytes:
    content = content_of(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "cache-control": "no-store",
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content
