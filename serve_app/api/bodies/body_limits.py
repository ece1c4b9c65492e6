"""Size limits of one request, checked on the raw JSON before any step that visits every part of it."""

from collections.abc import Mapping

from serve_app.api.prompts.prompt_limits import LONGEST_WINDOW, too_long
from serve_app.base.errors import InvalidRequest
from serve_app.config.service import LimitsConfig


def check_sizes(raw: Mapping[str, object], limits: LimitsConfig, longest_context: int) -> None:
    """`longest_context`: of all models, in tokens. Raises `InvalidRequest`; types are not judged here."""
    _at_most("messages", raw.get("messages"), limits.messages)
    _at_most("tools", raw.get("tools"), limits.tools)
    _at_most("stop", raw.get("stop"), limits.stop_sequences)
    _at_most("logit_bias", raw.get("logit_bias"), limits.logit_bias_entries)
    _at_most("prompt_chunks", raw.get("prompt_chunks"), limits.messages)
    for name in ("content", "tool_calls"):
        messages = [message for message in _list(raw.get("messages")) if isinstance(message, dict)]
        count = sum(len(_list(message.get(name))) for message in messages)
        if count > limits.messages:
            raise InvalidRequest(
                f"messages must have at most {limits.messages} items of {name} in all, got {count}.", "messages"
            )
    prompt = _list(raw.get("prompt"))
    _check_tokens("prompt", _list(prompt[0]) or prompt if prompt else prompt, longest_context)
    for chunk in _list(raw.get("prompt_chunks")):
        if isinstance(chunk, dict):
            _check_tokens("prompt_chunks", _list(chunk.get("tokens")), longest_context)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _at_most(path: str, value: object, limit: int) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise InvalidRequest(f"{path} must have at most {limit} items, got {len(value)}.", path)


def _check_tokens(path: str, tokens: list[object], longest_context: int) -> None:
    if len(tokens) > longest_context:
        raise too_long(path, longest_context, str(len(tokens)), window=LONGEST_WINDOW)
