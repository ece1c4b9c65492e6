"""Requests for a checkpoint that changes, that many want at once, or that stays as it is."""

import asyncio
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointRefused,
    InvalidRequest,
)
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import Checkpoint, CheckpointStore
from serve_app.checkpoints.notes import FILE
from tests.support.files.checkpoint_files import (
    PATH,
    assert_never_raised_twice,
    config,
    digest,
    files,
    folder,
    later,
    opened_store,
    resolve,
    run,
    weights,
    write,
)


def test_roots_are_searched_in_order_and_the_first_that_has_anything_decides(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    write(second, files(2))
    with opened_store(first, f"file://{second}", cache=tmp_path / "c") as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files(2))
        write(first, {CONFIG_FILE: config()})
        with pytest.raises(CheckpointIncomplete):
            run(lambda: store.resolve(PATH))
        write(first, files(1))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(1))


def test_a_replaced_checkpoint_serves_its_new_content_in_the_next_request(root: Path) -> None:
    target = write(root, files(1))
    with opened_store(root, cache=root / "c", clock=later()) as store:
        for fill in range(2, 30):
            assert run(lambda: store.resolve(PATH)).digest == digest(files(fill - 1))
            if fill % 3 == 0:  # in place, the same size
                (target / WEIGHTS_FILE).write_bytes(weights(fill))
            elif fill % 3 == 1:  # by renaming, with the old time stamp
                before = (target / WEIGHTS_FILE).stat()
                (target / "new").write_bytes(weights(fill))
                os.utime(target / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
                os.replace(target / "new", target / WEIGHTS_FILE)
            else:  # the whole folder
                target.rename(root / f"old{fill}")
                write(root, files(fill))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(29))


def test_permissions_that_change_count_from_the_next_request(root: Path) -> None:
    write(root, files(metadata={"owner": "alice"}))
    with opened_store(root, cache=root / "c", clock=later()) as store:
        assert run(lambda: store.resolve(PATH)).owner == "alice"
        write(root, files(metadata={"owner": "robin"}))
        assert run(lambda: store.resolve(PATH)).owner == "robin"
        (folder(root) / "checkpoint.json").unlink()
        assert run(lambda: store.resolve(PATH)).owner is None


def test_fifty_requests_at_once_read_a_checkpoint_once(root: Path) -> None:
    write(root, files())

    async def fifty(store: CheckpointStore) -> list[Checkpoint]:
        return await asyncio.gather(*(store.resolve(PATH) for _ in range(50)))

    with opened_store(root, cache=root / "c", clock=later()) as store:
        assert {found.digest for found in run(lambda: fifty(store))} == {digest(files())}
        assert run(lambda: store.resolve(PATH)).digest == digest(files())
        assert store.counters.reads == 1


def test_what_was_refused_is_not_read_again_until_it_changes(root: Path) -> None:
    write(root, {**files(), CONFIG_FILE: b"{]"})
    with opened_store(root, cache=root / "c", clock=later()) as store:
        for _ in range(3):
            with pytest.raises(CheckpointRefused):
                run(lambda: store.resolve(PATH))
        assert store.counters.reads == 1
        write(root, files())
        assert run(lambda: store.resolve(PATH)).digest == digest(files())


def test_a_refusal_that_is_remembered_holds_on_to_no_request(root: Path) -> None:
    write(root, {**files(), CONFIG_FILE: b"{]"})
    with opened_store(root, cache=root / "c", clock=later()) as store:
        assert_never_raised_twice(store, CheckpointRefused)
        assert store.counters.reads == 1


def test_what_is_remembered_is_bounded_by_its_templates(root: Path) -> None:
    paths = [CheckpointPath("r", str(i)) for i in range(300)]
    for path in paths:
        write(root, {**files(), "chat_template.jinja": b"x" * (1 << 17)}, path)
    with opened_store(root, cache=root / "c", clock=later()) as store:
        for path in paths:
            assert run(lambda path=path: store.resolve(path)).digest == digest(files())
        with closing(sqlite3.connect(root / "c" / FILE)) as notes, notes:
            notes.execute("DELETE FROM notes")
        for path in (paths[-1], paths[0]):
            assert run(lambda path=path: store.resolve(path)).digest == digest(files())
        assert store.counters.reads == 301  # 256 templates of 128 KiB are kept: the last is there, the first is not


def test_time_stamps_too_young_to_trust_are_not_trusted(root: Path) -> None:
    write(root, files())
    with opened_store(root, cache=root / "c") as store:
        for _ in range(3):
            assert run(lambda: store.resolve(PATH)).digest == digest(files())
        assert store.counters.reads == 3


def test_a_caller_that_leaves_does_not_stop_the_others(root: Path) -> None:
    write(root, files())

    async def leave_one(store: CheckpointStore) -> Checkpoint:
        first, second = (asyncio.create_task(store.resolve(PATH)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    with opened_store(root, cache=root / "c", clock=later()) as store:
        assert run(lambda: leave_one(store)).digest == digest(files())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rewrite_during_a_request_gives_the_old_or_the_new_content_or_incomplete(root: Path, in_place: bool) -> None:
    size = 1 << 20
    contents = [{CONFIG_FILE: config(), WEIGHTS_FILE: weights(fill, size)} for fill in (1, 2)]
    target = write(root, contents[0])
    stop = threading.Event()

    def rewrite() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            if in_place:
                with open(target / WEIGHTS_FILE, "r+b") as file:
                    file.write(contents[turn % 2][WEIGHTS_FILE])
            else:
                (target / "new").write_bytes(contents[turn % 2][WEIGHTS_FILE])
                os.replace(target / "new", target / WEIGHTS_FILE)
            stop.wait(0.002 * (turn % 20))

    writer = threading.Thread(target=rewrite)
    writer.start()
    found = set[str]()
    try:
        with opened_store(root, cache=root / "c") as store:
            for _ in range(60):
                try:
                    found.add(run(lambda: store.resolve(PATH)).digest)
                except CheckpointIncomplete:
                    found.add("incomplete")
    finally:
        stop.set()
        writer.join()
    assert found <= {digest(contents[0]), digest(contents[1]), "incomplete"}
    assert resolve(root).digest in {digest(contents[0]), digest(contents[1])}


@given(name=st.text("abcXYZ09._:-", min_size=1, max_size=255), run_name=st.text("a.:-_", min_size=1, max_size=20))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_leads_anywhere_else(root: Path, name: str, run_name: str) -> None:
    (root.parent / CONFIG_FILE).write_bytes(config())
    with pytest.raises((CheckpointError, InvalidRequest)):
        resolve(root, CheckpointPath(run_name, name))
