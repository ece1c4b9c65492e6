"""The record of a request as the ledger keeps it."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Final

from serve_app.api.record import RequestRecord
from serve_app.config.price import Price
from serve_app.ledger.money import to_pico
from serve_app.ledger.record import UsageRecord, microseconds

_MAX_CHARACTERS: Final = 1024
_MILLION: Final = Decimal(1_000_000)


def usage_of(record: RequestRecord, ended_at: datetime) -> UsageRecord:
    """With the numbers that it has now."""
    return UsageRecord(
        id=record.id,
        ended_us=microseconds(ended_at),
        request_id=record.request_id,
        key=_plain(record.key_name),
        api="chat" if record.path.endswith("/chat/completions") else "completions",
        slug=_plain(record.slug),
        endpoint=_plain(record.endpoint),
        model=_plain(record.model),
        checkpoint=_plain(record.checkpoint),
        digest=record.adapter_digest,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        reasoning_tokens=record.reasoning_tokens,
        image_tokens=record.image_tokens,
        **_prices(record.price),
        cost=to_pico(record.cost),
        is_estimated=record.is_estimated,
        is_streamed=record.streamed,
        first_token_s=record.first_token_s,
        total_s=record.duration_s,
        status=record.status,
        outcome=record.outcome.value,
        error_code=_plain(record.error_code),
        finish_reason=_plain(record.finish_reason),
        is_held=record.is_held,
    )


def _prices(price: Price | None) -> Mapping[str, int]:
    """In 10^-12 USD per token."""
    if price is None:
        return {}
    named = {"prompt_price": price.prompt, "cached_price": price.of_cached, "completion_price": price.completion}
    return {name: to_pico(usd / _MILLION) for name, usd in named.items()}


def _plain(text: str) -> str:
    """Text that every database takes: upstreams may send NUL characters and halves of characters as an error code."""
    if len(text) <= _MAX_CHARACTERS and text.isprintable():
        return text
    shown = text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode()
    return "".join(character if character.isprintable() else "�" for character in shown)
