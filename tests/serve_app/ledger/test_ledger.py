"""What the ledger takes is in the database once, whatever happens to the database, the disk or the process."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from serve_app.base.errors import ConfigRefused, LedgerUnavailable
from serve_app.config.ledger import LedgerConfig
from serve_app.ledger import entries, schema
from serve_app.ledger.database import Database
from serve_app.ledger.ledger import Ledger, LedgerReport
from serve_app.ledger.record import UsageRecord, microseconds
from serve_app.ledger.sums import Amounts, Range, sum_up, total
from tests.support.ledger.postgres import PASSWORD, Postgres
from tests.support.ledger.usage_records import INTERVAL_S, NOON, open_ledger, spooled, usage_record, written
from tests.support.processes.running_up import ROOT
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.ledger.ledger_fixtures",)

EVERYTHING = Range()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database.of(database_url)
    yield opened
    opened.close()


def rows(database: Database) -> list[dict[str, object]]:
    with database.read() as connection:
        return [dict(row) for row in connection.execute(select(schema.USAGE)).mappings()]


def amounts(database: Database) -> Amounts:
    return total(sum_up(database, ("key",), EVERYTHING))


# --- what is in the database ---


def test_a_record_is_a_row_with_all_that_it_has(tmp_path: Path, database_url: str, database: Database) -> None:
    record = usage_record(
        slug="acme/tri",
        endpoint="far",
        checkpoint="tinker://r/sampler_weights/n",
        digest="d",
        cached_tokens=4,
        reasoning_tokens=3,
        image_tokens=2,
        prompt_price=100_000,
        cached_price=20_000,
        completion_price=400_000,
        cost=2**62,
        is_estimated=True,
        first_token_s=0.125,
        error_code="timeout",
    )
    with open_ledger(tmp_path, url=database_url) as ledger:
        ledger.append(record)
        written(ledger)
        assert ledger.report.waiting_bytes == 0
    assert rows(database) == [record.row()]
    assert rows(database)[0]["ended_at"] == NOON


def test_a_record_is_counted_once_however_often_it_is_written(database: Database) -> None:
    first, second = usage_record(), usage_record()
    for batch in ([first], [first, second], [first], [second]):
        assert entries.write(database, batch) == 0
    assert len(rows(database)) == 2
    assert amounts(database) == Amounts(2, 20, 0, 10, 0, 0, 14)


def test_a_value_that_the_database_refuses_costs_its_own_record_only(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    good = [usage_record(), usage_record()]
    bad = usage_record(cost=2**63)
    assert entries.write(database, [good[0], bad, good[1]]) == 1
    assert {row["id"] for row in rows(database)} == {record.id for record in good}
    assert f"the database refuses the record {bad.id}" in caplog.text


def test_days_are_those_of_utc(database: Database) -> None:
    last = datetime(2031, 1, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    times = [last, last + timedelta(microseconds=1)]
    entries.write(database, [usage_record(ended_us=microseconds(time)) for time in times])
    found = [(row.group, row.amounts.requests) for row in sum_up(database, ("day",), EVERYTHING)]
    assert found == [(("2031-01-31",), 1), (("2031-02-01",), 1)]


def test_tables_of_a_newer_version_are_left_alone(database: Database) -> None:
    with database.write() as connection:
        connection.execute(schema.SCHEMA.insert().values(version=schema.VERSION + 1))
    other = Database.of(database._engine.url.render_as_string(hide_password=False))
    with pytest.raises(LedgerUnavailable, match="have version 2; this program knows 1"):
        other.ping()
    other.close()


def test_several_processes_may_make_the_tables_at_once(database_url: str) -> None:
    code = "import sys; from serve_app.ledger.database import Database; Database.of(sys.argv[1]).ping()"
    processes = [subprocess.Popen([sys.executable, "-c", code, database_url], cwd=ROOT) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4


WRITES = """
import sys
from datetime import timedelta
from pathlib import Path
from tests.support.ledger.usage_records import NOON, open_ledger, usage_record, written
from serve_app.ledger.record import microseconds
directory, url, key = sys.argv[1:]
with open_ledger(Path(directory), url=url) as ledger:
    for number in range(300):
        ended_us = microseconds(NOON + timedelta(days=number % 3))
        ledger.append(usage_record(key=f"key-{number % 2}", model=f"m-{number % 5}", cost=number, ended_us=ended_us))
        if number % 100 == 50:
            ledger.write_now()
    written(ledger)
"""


def test_the_sums_of_several_processes_are_right(tmp_path: Path, database_url: str, database: Database) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path), database_url]
    processes = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(3)]
    assert [process.wait(120) for process in processes] == [0] * 3
    assert amounts(database) == Amounts(900, 9000, 0, 4500, 0, 0, 3 * sum(range(300)))
    by_all = sum_up(database, ("key", "model", "day"), EVERYTHING)
    expected = {}
    for number in range(300):
        group = (f"key-{number % 2}", f"m-{number % 5}", str((NOON + timedelta(days=number % 3)).date()))
        expected[group] = expected.get(group, 0) + 3 * number
    assert {row.group: row.amounts.cost for row in by_all} == expected
    assert list((tmp_path / "spool").iterdir()) == []


# --- crashes and ends ---

KILLED = """
import os, sys
from pathlib import Path
from tests.support.ledger.usage_records import open_ledger, usage_record
with open_ledger(Path(sys.argv[1]), write_interval_s=3600) as ledger:
    for number in range(50):
        ledger.append(usage_record(id=f"killed-{number}"))
    os.kill(os.getpid(), 9)
"""


def test_the_records_of_a_killed_process_are_written_by_the_next(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    last = max(tmp_path.glob("spool/*/*.jsonl"))
    with last.open("ab") as stream:
        stream.write(usage_record().line()[:-20])  # a crash of the machine can tear a line
    with open_ledger(tmp_path) as ledger:
        eventually(lambda: ledger.report.counters.adopted == 1)
        counters = ledger.report.counters
        assert (counters.torn, counters.dropped) == (1, 0)
        assert amounts(ledger._database).requests == 50
    assert list((tmp_path / "spool").iterdir()) == []


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    with open_ledger(tmp_path, write_interval_s=3600) as ledger:
        eventually(lambda: ledger._writer._adopted_at > 0)  # the first round is over
        for _ in range(450):
            ledger.append(usage_record())
    database = Database.of(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    assert amounts(database).requests == 450
    database.close()
    assert list((tmp_path / "spool").iterdir()) == []


def test_what_comes_after_the_end_is_for_the_next_one(tmp_path: Path) -> None:
    """Requests that end while the service stops."""
    with open_ledger(tmp_path) as ledger:
        ledger.append(usage_record(cost=1))
    for cost in (10, 100):
        ledger.append(usage_record(cost=cost))
    assert (ledger.report.counters.dropped, spooled(tmp_path)) == (0, 2)
    with open_ledger(tmp_path) as following:
        eventually(lambda: following.report.counters.adopted == 2)
        assert amounts(following._database).cost == 111
    assert list(tmp_path.glob("spool/*")) == []


def test_what_comes_after_the_end_and_finds_no_disk_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(tmp_path) as ledger:
        pass
    shutil.rmtree(tmp_path)
    tmp_path.write_text("no folder")
    ledger.append(usage_record())
    assert ledger.report.counters.dropped == 1
    assert "records are dropped, the spool fails after the end: ledger.directory must be a folder" in caplog.text


def test_two_ledgers_of_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as one, open_ledger(tmp_path) as other:
        for ledger in (one, other):
            ledger.append(usage_record())
            written(ledger)
        assert one.report.counters.adopted == other.report.counters.adopted == 0
        assert amounts(one._database).requests == 2


# --- a database that is away ---


@pytest.fixture
def own_postgres(postgres: Postgres) -> Iterator[Postgres]:
    """Whatever a test stops runs again after it."""
    yield postgres
    if postgres.process is None:
        postgres.start()


def test_records_wait_for_postgres_and_are_written_when_it_is_back(
    tmp_path: Path, own_postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    url = own_postgres.new_database(uuid.uuid4().hex)
    with caplog.at_level(logging.WARNING), open_ledger(tmp_path, url=url) as ledger:
        ledger.append(usage_record())
        written(ledger)
        own_postgres.stop()
        for _ in range(20):
            ledger.append(usage_record())
        eventually(lambda: not ledger.is_up)
        assert spooled(tmp_path) == 20
        own_postgres.start()
        written(ledger)
        assert amounts(ledger._database).requests == 21
        assert ledger.is_up
        assert ledger.report.waiting_bytes == 0
    messages = [record.getMessage() for record in caplog.records if record.name == "serve_app.ledger.writer"]
    assert len(messages) == 2  # away once and back once, however often it was tried
    assert PASSWORD not in caplog.text


def away(folder: Path) -> tuple[Path, str]:
    """A folder in the place of a SQLite file. Remove it, and the database is back. Its URL."""
    place = folder / "away.sqlite"
    place.mkdir()
    return place, f"sqlite:///{place}"


def test_a_database_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    place, url = away(tmp_path)
    with open_ledger(tmp_path, url=url) as ledger:
        ledger.append(usage_record())
        eventually(lambda: ledger.report.counters.write_errors > 1)
        place.rmdir()
        written(ledger)
        assert amounts(ledger._database).requests == 1


def test_what_waits_at_the_end_is_for_the_next_one(tmp_path: Path) -> None:
    place, url = away(tmp_path)
    with open_ledger(tmp_path, url=url) as ledger:
        for _ in range(3):
            ledger.append(usage_record())
        eventually(lambda: not ledger.is_up)
    assert spooled(tmp_path) == 3
    place.rmdir()
    with open_ledger(tmp_path, url=url) as ledger:
        eventually(lambda: ledger.report.counters.records == 3)


def test_over_its_bound_the_newest_records_are_dropped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place, url), bound = away(tmp_path), 1 << 16
    with open_ledger(tmp_path, url=url, spool_bytes=bound) as ledger:
        while ledger.report.counters.dropped < 5:
            ledger.append(usage_record())
        kept = ledger.num_appended - ledger.report.counters.dropped
        assert bound - len(usage_record().line()) < ledger.report.waiting_bytes <= bound
        assert spooled(tmp_path) == kept
        place.rmdir()
        written(ledger)
        assert amounts(ledger._database).requests == kept
        ledger.append(usage_record())
        written(ledger)
        assert amounts(ledger._database).requests == kept + 1
    assert caplog.text.count("Ledger: records are dropped") == 1  # once a minute


def test_the_bound_counts_what_others_have_left(tmp_path: Path) -> None:
    (place, url), bound = away(tmp_path), 1 << 16
    with open_ledger(tmp_path, url=url) as ledger:
        while ledger.report.waiting_bytes < bound:
            ledger.append(usage_record())
    with open_ledger(tmp_path, url=url, spool_bytes=bound) as ledger:
        eventually(lambda: ledger.report.waiting_bytes >= bound)
        ledger.append(usage_record())
        assert ledger.report.counters.dropped == 1
        place.rmdir()
        eventually(lambda: ledger.report.counters.adopted == 1)
        eventually(lambda: ledger.report.waiting_bytes == 0)
        ledger.append(usage_record())
        assert ledger.report.counters.dropped == 1


def test_a_sqlite_file_that_is_replaced_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with open_ledger(tmp_path) as ledger:
        ledger.append(usage_record())
        written(ledger)
        file.rename(tmp_path / "moved.sqlite")
        for _ in range(2):
            ledger.append(usage_record())
        written(ledger)
        assert amounts(ledger._database).requests == 2


def test_records_that_the_disk_does_not_take_are_written_from_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(tmp_path, write_interval_s=3600) as ledger:
        eventually(lambda: ledger._writer._adopted_at > 0)
        (ledger._spool.folder.path / "00000001.jsonl").symlink_to("/dev/full")
        for _ in range(500):
            ledger.append(usage_record())
        ledger.write_now()
        written(ledger)
        assert amounts(ledger._database).requests == 500
        assert ledger.report.counters.dropped == 0
    assert "the spool fails: No space left on device" in caplog.text


def test_records_whose_file_is_deleted_are_lost_and_those_after_them_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(tmp_path, write_interval_s=3600) as ledger:
        eventually(lambda: ledger._writer._adopted_at > 0)
        ledger.append(usage_record())
        shutil.rmtree(ledger._spool.folder.path)
        for _ in range(2):
            ledger.write_now()
            written(ledger)
            ledger.append(usage_record())
        ledger.write_now()
        written(ledger)
        assert amounts(ledger._database).requests == 2
        assert (ledger.is_up, ledger.report.waiting_bytes) == (True, 0)
    assert "00000001.jsonl is gone, and its records with it" in caplog.text


def test_a_report_that_fails_does_not_end_the_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def report(told: LedgerReport) -> None:
        raise ValueError(f"no metrics for {told.is_up}")

    ledger = Ledger.of(LedgerConfig(directory=str(tmp_path), write_interval_s=INTERVAL_S), report)
    eventually(lambda: "no metrics" in caplog.text)
    ledger.append(usage_record())
    written(ledger)
    assert amounts(ledger._database).requests == 1
    ledger.close()
    assert spooled(tmp_path) == 0


# --- secrets ---


def test_no_error_repeats_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = f"postgresql://someone:{PASSWORD}@127.0.0.1:1/nowhere"
    with open_ledger(tmp_path, url=wrong) as ledger:
        ledger.append(usage_record())
        eventually(lambda: not ledger.is_up)
    assert "postgresql+psycopg://someone:***@127.0.0.1:1/nowhere" in caplog.text
    assert PASSWORD not in caplog.text
    for url in (f"mysql://u:{PASSWORD}@h/d", f"no url {PASSWORD}", f"postgresql://u:{PASSWORD}@h:port/d"):
        with pytest.raises(ConfigRefused, match=r"^ledger.url must be sqlite:///path or postgresql://") as refused:
            Database.of(url)
        assert PASSWORD not in str(refused.value)


def test_a_driver_that_repeats_the_password_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    database = Database.of(f"postgresql://u:{PASSWORD}@127.0.0.1:1/d?sslmode={PASSWORD}")
    with pytest.raises(LedgerUnavailable) as failed:
        database.ping()
    assert PASSWORD not in str(failed.value)
    database.close()


# --- sums ---


def test_sums_are_those_of_the_records_however_they_are_grouped(database: Database) -> None:
    records: list[UsageRecord] = [
        usage_record(
            key=key,
            slug=slug,
            endpoint="far" if slug else "",
            model=model,
            cost=10**number,
            ended_us=microseconds(NOON + timedelta(days=number)),
        )
        for number, (key, slug, model) in enumerate(
            [("a", "", "m"), ("a", "s", "m"), ("b", "", "m"), ("b", "", "n"), ("a", "s", "m"), ("a", "", "m")]
        )
    ]
    entries.write(database, records)
    by_key = {row.group: row.amounts.cost for row in sum_up(database, ("key",), EVERYTHING)}
    assert by_key == {("a",): 110_011 + 0, ("b",): 1_100}
    by_two = {row.group: row.amounts.cost for row in sum_up(database, ("model", "slug"), EVERYTHING)}
    assert by_two == {("m", ""): 100_101, ("m", "s"): 10_010, ("n", ""): 1_000}
    of_one = sum_up(database, ("endpoint",), EVERYTHING, "a")
    assert {row.group: row.amounts.requests for row in of_one} == {("",): 2, ("far",): 2}
    assert sum_up(database, ("key",), EVERYTHING, "nobody") == []


MOMENTS = st.datetimes(datetime(2031, 1, 1), datetime(2031, 1, 4)).map(lambda moment: moment.replace(tzinfo=UTC))
BOUNDS = MOMENTS | MOMENTS.map(lambda moment: moment.replace(hour=0, minute=0, second=0, microsecond=0))


@given(st.lists(st.none() | BOUNDS, min_size=2, max_size=2), BOUNDS)
def test_a_moment_of_a_range_is_in_exactly_one_of_its_parts(bounds: list[datetime | None], moment: datetime) -> None:
    start, end = bounds
    within = Range(start, end) if start is None or end is None or start < end else Range(end, start)
    days, cut = within.parts()
    assert all(bound is None or bound.time() == time() for part in [days] if part for bound in (part.start, part.end))
    assert sum(contains(part, moment) for part in [*([days] if days else []), *cut]) == contains(within, moment)


def contains(within: Range, moment: datetime) -> bool:
    return (within.start is None or within.start <= moment) and (within.end is None or moment < within.end)


def test_ranges_of_days_and_of_times_have_their_first_moment_and_not_their_last(database: Database) -> None:
    entries.write(
        database, [usage_record(ended_us=microseconds(NOON + timedelta(hours=hours))) for hours in range(0, 72, 6)]
    )

    def count(start: datetime | None, end: datetime | None) -> int:
        return total(sum_up(database, ("key",), Range(start, end))).requests

    midnight = NOON.replace(hour=0)
    assert count(None, None) == 12
    assert count(midnight, midnight + timedelta(days=1)) == 2
    assert count(midnight + timedelta(days=1), None) == 10
    assert count(NOON, NOON + timedelta(hours=6)) == 1
    assert count(NOON + timedelta(microseconds=1), NOON + timedelta(hours=12, microseconds=1)) == 2
    assert count(None, NOON) == 0


def test_a_ledger_that_is_closed_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with open_ledger(tmp_path) as ledger:
        ledger.append(usage_record())
    eventually(lambda: set(threading.enumerate()) <= before)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(("-wal", "-shm"))]
