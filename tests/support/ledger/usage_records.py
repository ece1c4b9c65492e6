"""Usage records, and ledgers that write them at once."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.config.ledger import LedgerConfig
from serve_app.ledger.ledger import Ledger
from serve_app.ledger.record import UsageRecord, microseconds
from tests.support.waiting import eventually

NOON = datetime(2031, 1, 31, 12, tzinfo=UTC)
INTERVAL_S = 0.02


def usage_record(**fields: Any) -> UsageRecord:
    given = {
        "id": uuid.uuid4().hex,
        "ended_us": microseconds(NOON),
        "request_id": "mine",
        "key": "test",
        "api": "chat",
        "model": "a/b",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cost": 7,
        "total_s": 0.5,
        "status": 200,
        "outcome": "done",
    }
    return UsageRecord(**{**given, **fields})


@contextmanager
def open_ledger(directory: Path, *, answer_s: float = 30.0, **options: Any) -> Iterator[Ledger]:
    config = LedgerConfig(directory=str(directory), **{"write_interval_s": INTERVAL_S, **options})
    ledger = Ledger.of(config, answer_s=answer_s)
    try:
        yield ledger
    finally:
        ledger.close()


def written(ledger: Ledger) -> None:
    """Wait until all that came is in the database, or lost."""
    number = ledger.num_appended
    eventually(lambda: ledger.num_finished >= number)


def spooled(directory: Path) -> int:
    """How many lines wait on disk."""
    return sum(path.read_bytes().count(b"\n") for path in directory.glob("spool/*/*.jsonl"))
