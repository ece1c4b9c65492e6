"""What the service may answer: the shapes of its own description."""

from typing import Any

import jsonschema_rs

from tests.support.description import closed, validator_of
from tests.support.soak.kinds import CHAT, COMPLETIONS, Kind, Manner, Refusal

_LONGEST = 300  # characters of a fault
_REPLIES = {CHAT: "ChatCompletion", COMPLETIONS: "TextCompletion"}


class Contract:
    """Of one service, by its `/openapi.json`. Each check returns what is wrong, or None."""

    def __init__(self, document: Any) -> None:
        document = closed(document)
        names = [*_REPLIES.values(), *(f"{name}Chunk" for name in _REPLIES.values()), "ErrorReply"]
        self._validators = {name: validator_of(name, document) for name in names}

    def reply(self, kind: Kind, value: Any) -> str | None:
        return self._must_be_refused(kind) or self._shape(_REPLIES[kind.path], value)

    def chunk(self, kind: Kind, value: Any) -> str | None:
        return self._must_be_refused(kind) or self._shape(f"{_REPLIES[kind.path]}Chunk", value)

    def refusal(self, kind: Kind, refusal: Refusal, value: Any, *, can_retry: bool) -> str | None:
        """`can_retry`: the response says when."""
        allowed = kind.refusals if kind.must_get is None else {kind.must_get, *kind.refusals}
        if refusal not in allowed:
            return f"refused with {refusal}: {value!r}"[:_LONGEST]
        if refusal[0] in (429, 503) and not can_retry:
            return f"refused with {refusal} without retry-after"
        return self._shape("ErrorReply", value)

    def failure(self, kind: Kind, value: Any) -> str | None:
        """Of the error event that ends a stream."""
        may_be_slow = {"client_too_slow"} if kind.manner is Manner.PAUSE else set()
        codes = {code for status, code in kind.refusals if status >= 500} | may_be_slow
        if value.get("error", {}).get("code") not in codes:
            return f"a stream ended with {value!r}"[:_LONGEST]
        return self._shape("ErrorReply", value)

    def _must_be_refused(self, kind: Kind) -> str | None:
        return None if kind.must_get is None else f"served instead of {kind.must_get}"

    def _shape(self, name: str, value: Any) -> str | None:
        try:
            self._validators[name].validate(value)
        except jsonschema_rs.ValidationError as exc:
            return f"no {name}: {exc.message} at {exc.instance_path}: {value!r}"[:_LONGEST]
        return None
