"""What the ledger costs: `python tests/bench/ledger.py [POSTGRES_URL]` (best of five for processor time).

A record on the request's way, its writing in the thread, and a hold of a budget, in SQLite and in PostgreSQL if an
empty database is named.
"""

import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from serve_app.api.record import RequestRecord
from serve_app.api.usage import usage_of
from serve_app.config.price import Price
from serve_app.ledger import entries
from serve_app.ledger.database import Database
from serve_app.ledger.holds import Ask, HoldDesk
from serve_app.ledger.spend import Budget, Spend
from serve_app.ledger.spool import Spool

RECORDS = 2000
AT_ONCE = 200  # as the writer inserts them
PRICE = Price.model_validate({"prompt": 0.1, "cached": 0.02, "completion": 0.4})
BUDGET = Budget(cost_per_day=10**18, tokens_per_month=10**12)


def best_us(action: Callable[[], object], count: int, clock: Callable[[], float] = time.thread_time) -> float:
    times = []
    for _ in range(5):
        start = clock()
        action()
        times.append(clock() - start)
    return min(times) / count * 1e6


def request() -> RequestRecord:
    record = RequestRecord(uuid.uuid4().hex, "POST", "/v1/chat/completions", key_name="a-key", model="owner/model-8b")
    record.checkpoint, record.adapter_digest = "tinker://some-run/sampler_weights/000080", "0" * 64
    record.price, record.prompt_tokens, record.cached_tokens, record.completion_tokens = PRICE, 1200, 1024, 300
    record.first_token_s, record.duration_s, record.status, record.finish_reason = 0.123456, 4.567891, 200, "stop"
    return record


def on_the_way(folder: Path) -> None:
    requests = [request() for _ in range(RECORDS)]
    now = datetime.now(UTC)
    usages = [usage_of(one, now) for one in requests]
    lines = [usage.line() for usage in usages]
    spool = Spool.open(folder)
    parts = {
        "the record": lambda: [usage_of(one, now) for one in requests],
        "its line": lambda: [usage.line() for usage in usages],
        "to the spool": lambda: [spool.append(line) for line in lines],
    }
    found = {name: best_us(action, RECORDS) for name, action in parts.items()}
    print(", ".join(f"{name} {us:.1f} us" for name, us in found.items()), f"= {sum(found.values()):.1f} us a request")
    print(f"a line has {len(lines[0])} bytes")


def in_the_thread(database: Database) -> None:
    usage = usage_of(request(), datetime.now(UTC))

    def write() -> None:
        batch = [replace(usage, id=uuid.uuid4().hex) for _ in range(AT_ONCE)]
        entries.write(database, batch)

    print(f"{database.name.partition(':')[0]}: written for {best_us(write, AT_ONCE):.0f} us of processor time a record")


async def held(desk: HoldDesk, at_once: int) -> float:
    """Milliseconds until the last of so many requests may begin."""
    asks = [Ask(uuid.uuid4().hex, "a-key", BUDGET, Spend(10**9, 100), Spend(), 0.0) for _ in range(at_once)]
    start = time.perf_counter()
    await asyncio.gather(*(desk.ask(ask) for ask in asks))
    return 1000 * (time.perf_counter() - start)


async def waiting(desk: HoldDesk) -> None:
    for at_once in (1, 32, 256):
        times = [await held(desk, at_once) for _ in range(50)]
        print(
            f"  {at_once} holds at once: {statistics.median(times):.1f} ms (median), {sorted(times)[44]:.1f} ms (90 %)"
        )


def main(urls: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_the_way(Path(folder))
        for url in [f"sqlite:///{folder}/ledger.sqlite", *urls]:
            database = Database.of(url)
            in_the_thread(database)
            desk = HoldDesk(database, "bench", answer_s=60)
            asyncio.run(waiting(desk))
            desk.close()
            database.close()


if __name__ == "__main__":
    main(sys.argv[1:])
