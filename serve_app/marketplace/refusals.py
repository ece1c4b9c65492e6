"""What an upstream means by a status and a body that are no reply."""

import re
from email.utils import parsedate_to_datetime
from time import time
from typing import Final

from serve_app.base.errors import UpstreamFailed, UpstreamRefused
from serve_app.marketplace.relay import JsonObject, parsed
from serve_app.marketplace.secret import Secret

_ABOUT_THE_ENDPOINT: Final = frozenset({401, 402, 403, 404, 405, 407, 408, 409, 421, 425, 426, 429})
"""Statuses below 500 for which another endpoint is asked: its key, its URL, its load."""
_MODERATED: Final = frozenset({"content_filter", "content_policy_violation", "moderation_error"})
_MAX_CHARACTERS: Final = 2000
_MAX_NAME_CHARACTERS: Final = 64
_WORD: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MARKUP: Final = re.compile(rb"\s*<[!?A-Za-z]")


def judged(status: int, body: bytes, secret: Secret, retry_after: str = "") -> UpstreamFailed | UpstreamRefused:
    """`body`: may be anything, and may be cut. `retry_after`: the header."""
    error = _error_in(body)
    is_refusal = 400 <= status < 500 and (status not in _ABOUT_THE_ENDPOINT or _is_moderated(status, error))
    if is_refusal and (status == 413 or not _MARKUP.match(body)):  # a page comes from something before the API
        return _refused(status, error, secret)
    code = _text(error, "code", secret) or _text(error, "type", secret)
    detail = f" ({code})" if _WORD.fullmatch(code) else ""  # no other text: it may hold parts of the prompt
    return UpstreamFailed(f"The upstream answered {status}{detail}.", _seconds(retry_after))


def error_status(error: JsonObject) -> int:
    """The status of an error that came without one: inside of a stream or of a reply with status 200."""
    for name in ("code", "status", "status_code"):
        status = error.get(name)
        if isinstance(status, int | str) and re.fullmatch(r"[45]\d\d", str(status)):
            return int(status)
    return 500


def error_of(value: JsonObject) -> JsonObject | None:
    """The error that a JSON object is; None if it is none."""
    error = value.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str) and error:
        return {**value, "message": error}
    return value if value.get("object") == "error" else None


def _error_in(body: bytes) -> JsonObject:
    value = parsed(body)
    if value is None:
        text = body.decode(errors="replace").strip()
        return {"message": text} if text.isprintable() and not text.startswith(("{", "[", "<")) else {}
    return error_of(value) or {"message": value.get("message") or _detail(value.get("detail"))}


def _detail(detail: object) -> object:
    """FastAPI gives a list for invalid fields."""
    first = detail[0] if isinstance(detail, list) and detail else None
    if not isinstance(first, dict):
        return detail
    place = first.get("loc")
    return f"{'.'.join(map(str, place[1:])) if isinstance(place, list) else ''}: {first.get('msg')}".removeprefix(": ")


def _is_moderated(status: int, error: JsonObject) -> bool:
    """Whether it forbids the prompt, and not the key. One caller must not be able to take the endpoint from all."""
    metadata = error.get("metadata")
    is_flagged = isinstance(metadata, dict) and bool(metadata.get("reasons"))
    return status == 403 and (is_flagged or not _MODERATED.isdisjoint((str(error.get("code")), str(error.get("type")))))


def _refused(status: int, error: JsonObject, secret: Secret) -> UpstreamRefused:
    message = _text(error, "message", secret)[:_MAX_CHARACTERS] or "The endpoint refused the request."
    param, code, kind = (_text(error, name, secret)[:_MAX_NAME_CHARACTERS] for name in ("param", "code", "type"))
    return UpstreamRefused(message, param or None, code or None, status, kind or "invalid_request_error")


def _text(error: JsonObject, name: str, secret: Secret) -> str:
    value = error.get(name)
    return secret.hide_in(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _seconds(retry_after: str) -> float:
    """0 if it says nothing."""
    if re.fullmatch(r"\d{1,9}", retry_after):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
