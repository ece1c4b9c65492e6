"""Turns the events of an upstream into those that the client gets, and counts tokens.

Chunks keep their bytes, except for `model`, which becomes what the client asked for, and `usage`. Usage is always asked
for upstream. A client that asked for it gets it once, in the last chunk, wherever the upstream sends it; for others it
is removed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydantic_core import from_json

from serve_app.base.errors import ReplyOverLimit, UpstreamLost
from serve_app.base.json_structure import Structure, edited, without_collections
from serve_app.marketplace.bounds import Bounds
from serve_app.marketplace.events import Event
from serve_app.marketplace.secret import Secret

JsonObject = dict[str, object]

DONE: Final = b"[DONE]"
_MODEL: Final = re.compile(rb'[,{]\s*"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_NULL_USAGE: Final = re.compile(rb',\s*"usage"\s*:\s*null\s*(?=[^{}\[\]]*\}\s*\Z)')
_CHARACTERS_PER_TOKEN: Final = 4
_MOST_CHOICES: Final = 1024
_MOST_TOKENS: Final = 2**31
MAX_WHOLE_VALUES: Final = 1_000_000  # of a whole reply, whose log-probabilities come together
_MAX_VALUES: Final = 100_000  # of an event
SMALL_BYTES: Final = 1 << 16  # has fewer values
_MOST_LEARNED: Final = 16  # of a reply: where something else differs each time, looking costs more than it saves
_PLAIN: Final = re.compile(rb"[ !#-\[\]-~]+")  # of a JSON string: a longer rule would have to check UTF-8
_PLAIN_TEXTS: Final = ("text", "content", "reasoning_content", "reasoning")
_BEFORE_TEXT: Final = tuple(f'"{name}":{blank}'.encode() for name in _PLAIN_TEXTS for blank in ("", " "))
_COMMON: Final = ("id", "object", "created")  # to all chunks of a reply
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class Used:
    """The tokens of a reply. `cached` is a part of `prompt`, `reasoning` of `completion`. `is_estimated`: the upstream
    did not say, or said more than there can be.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    is_estimated: bool = False

    @property
    def shown(self) -> JsonObject:
        """As `usage` shows it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class _Pattern(NamedTuple):
    """An event that was read, as its bytes come, with a hole for its text, and what the client gets around it."""

    before: bytes
    after: bytes
    shown_before: bytes
    shown_after: bytes


class Relay:
    """One reply of an upstream.

    Most events differ from the last one by their text only. `again` does not read such an event: it means what that one
    meant, with another text.
    """

    def __init__(self, requested: str, bounds: Bounds, *, wants_usage: bool, secret: Secret) -> None:
        """`requested`: what `model` becomes. `wants_usage`: the client asked for usage in the stream. `secret`: the
        upstream's key.
        """
        self.finish_reason = ""
        self._model = json.dumps(requested).encode()
        self._bounds = bounds
        self._wants_usage = wants_usage
        self._secret = secret
        self._key = secret.plain
        self._usage: JsonObject = {}
        self._usage_chunk = b""  # held to the end
        self._last: JsonObject = {}
        self._num_guessed = 0  # completion tokens
        self._begun: set[int] = set()  # indexes of choices
        self._finished: set[int] = set()
        self._is_done = False
        self._pattern: _Pattern | None = None
        self._num_learned = 0

    @property
    def used(self) -> Used:
        """What was used so far; an estimate until the upstream reports. No more than there can be."""
        told = self.told
        if told is None:
            return Used(self._bounds.guessed_prompt, completion=self._num_guessed, is_estimated=True)
        most_prompt, most = self._bounds.prompt, max(self._bounds.completion, self._num_guessed)
        if told.prompt <= most_prompt and told.completion <= most:
            return told
        prompt, completion = min(told.prompt, most_prompt), min(told.completion, most)
        return Used(prompt, min(told.cached, prompt), completion, min(told.reasoning, completion), is_estimated=True)

    @property
    def told(self) -> Used | None:
        """What the upstream reports, be it true or not; None if it does not."""
        return _reported(self._usage)

    @property
    def is_doubtful(self) -> bool:
        """Whether the upstream reports more than there can be."""
        return self.told is not None and self.used.is_estimated

    def pass_on(self, events: Sequence[Event]) -> bytes:
        """What the client gets for these events; empty if nothing. Raises `UpstreamLost` for an error among them."""
        return self._chunk(events[0]) if len(events) == 1 else b"".join([self._chunk(event) for event in events])

    def end(self) -> bytes:
        """The last events: the usage if it is wanted, and `[DONE]`. Call it once the upstream's stream has ended.
        Raises `UpstreamLost` if the reply was cut.
        """
        if not self._is_done and (not self._finished or self._begun - self._finished):
            raise UpstreamLost("The upstream ended its stream before the reply was complete.")
        usage = _event(self._last_chunk()) if self._wants_usage else b""
        return usage + _event(DONE)

    def whole(self, content: bytes) -> bytes:
        """What the client gets for a whole reply."""
        content = self._secret.hide_in_json(content)
        value = parsed(content, max_values=MAX_WHOLE_VALUES)
        assert value is not None, "the upstream's client checked it"
        choices = _choices(value)
        self._note(value, choices)
        self._num_guessed = -(-sum(map(_text_length, choices)) // _CHARACTERS_PER_TOKEN)
        shown = {"usage": self._shown()} if self.is_doubtful else {}
        return edited(content, {"model": self._model, **shown})

    def again(self, piece: bytes) -> bytes:
        """What the client gets for a piece that is one event like the last one; empty if it must be read."""
        pattern = self._pattern
        if pattern is None or not (piece.startswith(pattern.before) and piece.endswith(pattern.after)):
            return b""
        text = piece[len(pattern.before) : -len(pattern.after)]
        # A piece that is too short for both has no text left.
        if _PLAIN.fullmatch(text) is None or (self._key and self._key in text):
            return b""
        self._num_guessed += 1
        return b"".join((pattern.shown_before, text, pattern.shown_after))

    def _chunk(self, event: Event) -> bytes:
        if self._is_done or event.data == DONE:
            self._is_done, self._pattern = True, None
            return b""
        content = self._secret.hide_in_json(event.data)
        value = parsed(content)
        if value is None:
            kind = UpstreamLost if len(content) <= SMALL_BYTES else ReplyOverLimit
            raise kind("The upstream sent an event that is no JSON object, or has too many values.")
        if event.name == b"error" or value.get("error"):
            raise UpstreamLost("The upstream sent an error during the reply.")
        choices = _choices(value)
        self._note(value, choices)
        if not choices and isinstance(value.get("usage"), dict):
            self._usage_chunk = self._with_model(content, value)
            return b""
        self._last = value
        shown = _event(self._with_model(self._without_usage(content, value), value))
        if self._num_learned < _MOST_LEARNED and content is event.data and not event.name:
            self._num_learned += 1
            self._pattern = _pattern_of(content, shown, choices)
        return shown

    def _note(self, value: JsonObject, choices: list[JsonObject]) -> None:
        if (usage := _usage_in(value, choices)) is not None:
            self._usage = usage
        for choice in choices:
            index = choice.get("index")
            index = index if isinstance(index, int) and 0 <= index < _MOST_CHOICES else 0
            self._begun.add(index)
            self._num_guessed += _has_text(choice)
            reason = choice.get("finish_reason")
            if reason and isinstance(reason, str):
                self.finish_reason = reason
                self._finished.add(index)

    def _without_usage(self, content: bytes, value: JsonObject) -> bytes:
        if "usage" not in value or (self._wants_usage and value["usage"] is None):
            return content
        if self._wants_usage:
            return edited(content, {"usage": b"null"})
        if content.count(b'"usage"') == 1:  # else a search could take the square of their number
            # Nothing is nested in what follows, and one object ends there: so it is the outermost one's.
            shorter, count = _NULL_USAGE.subn(b"", content, 1)
            if count:
                return shorter
        return edited(content, {"usage": None})

    def _with_model(self, content: bytes, value: JsonObject) -> bytes:
        """Most chunks have their model before anything nested, or after it, and are changed without a look at all."""
        if content.count(b'"model"') == 1 and (found := _MODEL.search(content)) is not None:
            start, end = found.span(1)
            is_before = content.count(b"{", 0, start) == 1 and b"[" not in content[:start]
            if is_before or (content.count(b"}", end) == 1 and b"{" not in content[end:]):
                return content[:start] + self._model + content[end:]
        if "model" not in value and value:
            opening = content.index(b"{") + 1
            return b'%b"model":%b,%b' % (content[:opening], self._model, content[opening:])
        return edited(content, {"model": self._model})

    def _last_chunk(self) -> bytes:
        """The usage: as the upstream sent it, unless it reports elsewhere, not at all, or more than there can be."""
        if self._usage_chunk:
            return edited(self._usage_chunk, {"usage": self._shown()}) if self.is_doubtful else self._usage_chunk
        chunk: JsonObject = {name: self._last[name] for name in _COMMON if name in self._last}
        usage = self._usage if self._usage and not self.is_doubtful else self.used.shown
        return _compact(chunk | {"model": json.loads(self._model), "choices": [], "usage": usage})

    def _shown(self) -> bytes:
        return _compact(self.used.shown)


def parsed(content: bytes, *, max_values: int = _MAX_VALUES) -> JsonObject | None:
    """None if it is no JSON object, or has too many values: reading them would block all other requests."""
    try:
        if len(content) <= SMALL_BYTES:
            value = from_json(content)
        elif Structure.of(content).num_values_in_all > max_values:
            return None
        else:
            with without_collections():
                value = from_json(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _pattern_of(content: bytes, shown: bytes, choices: Sequence[JsonObject]) -> _Pattern | None:
    """None unless the event has one choice, which goes on with a text, and no usage."""
    if len(choices) != 1 or choices[0].get("finish_reason") or choices[0].get("usage") is not None:
        return None
    delta = choices[0].get("delta")
    holder = delta if isinstance(delta, dict) else choices[0]
    texts = [text for name in _PLAIN_TEXTS if isinstance(text := holder.get(name), str) and text]
    hole = b'"%b"' % texts[0].encode() if len(texts) == 1 else b""
    if not _PLAIN.fullmatch(hole[1:-1]) or content.count(hole) != 1 or shown.count(hole) != 1:
        return None
    (before, after), (shown_before, shown_after) = (b"data: %b\n\n" % content).split(hole), shown.split(hole)
    if not before.endswith(_BEFORE_TEXT):
        return None  # it is spelled with escapes there, and stands elsewhere as it is
    return _Pattern(before + b'"', b'"' + after, shown_before + b'"', b'"' + shown_after)


def _compact(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _event(data: bytes) -> bytes:
    if b"\n" in data:
        data = data.replace(b"\n", b" ")  # between values: no JSON string holds one
    return b"data: %b\n\n" % data


def _choices(value: JsonObject) -> list[JsonObject]:
    choices = value.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _usage_in(value: JsonObject, choices: Sequence[JsonObject]) -> JsonObject | None:
    """Some upstreams report it in the last choice."""
    found = [each for holder in (*choices, value) if isinstance(each := holder.get("usage"), dict)]
    return found[-1] if found else None


def _has_text(choice: JsonObject) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text")) or (isinstance(delta, dict) and any(map(delta.get, _TEXTS)))


def _text_length(choice: JsonObject) -> int:
    """Of a whole reply, in characters."""
    message = choice.get("message")
    texts = (choice.get("text"), *(map(message.get, _TEXTS) if isinstance(message, dict) else ()))
    return sum(len(text) for text in texts if isinstance(text, str))


def _reported(usage: JsonObject) -> Used | None:
    """None if it has no counts that can be true."""
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    cached = _detail(usage.get("prompt_tokens_details"), "cached_tokens")
    reasoning = _detail(usage.get("completion_tokens_details"), "reasoning_tokens")
    return Used(prompt, min(cached, prompt), completion, min(reasoning, completion))


def _detail(details: object, name: str) -> int:
    return (_count(details.get(name)) or 0) if isinstance(details, dict) else 0


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST_TOKENS else None
