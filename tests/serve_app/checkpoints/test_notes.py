"""What is kept on disk about files that were read: by path and state, for all processes, never trusted blindly."""

import os
import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.interface.errors import AdapterChanged
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import Checkpoint, CheckpointStore
from serve_app.checkpoints.content import Content
from serve_app.checkpoints.notes import FILE, Notes, read, written
from tests.support.files.checkpoint_files import (
    PATH,
    digest,
    files,
    later,
    opened_store,
    run,
    tar_bytes,
    write,
    write_tar,
)


def _reads_and_content(root: Path, cache: Path) -> tuple[int, Checkpoint]:
    with opened_store(root, cache=cache, clock=later()) as store:
        found = run(lambda: store.resolve(PATH))
        return store.counters.reads, found


@pytest.mark.parametrize("is_tar", [False, True])
def test_neither_a_restart_nor_another_ingress_reads_a_checkpoint_again(
    root: Path, tmp_path: Path, is_tar: bool
) -> None:
    about = {"owner": "alice", "expires_at": "2131-01-01T00:00:00Z"}
    contents = {**files(metadata=about), "chat_template.jinja": "é{{ x }}".encode()}
    write_tar(root, tar_bytes(contents)) if is_tar else write(root, contents)
    first, second = (_reads_and_content(root, tmp_path / "c") for _ in range(2))
    assert (first[0], second[0]) == (1, 0)
    assert first[1] == second[1]
    assert second[1].digest == digest(contents)


@pytest.mark.parametrize("how", ["written", "renamed", "stamped", "removed", "moved"])
def test_a_note_counts_only_while_the_files_are_as_they_were(root: Path, tmp_path: Path, how: str) -> None:
    target = write(root, {**files(1), "chat_template.jinja": b"x"})
    _reads_and_content(root, tmp_path / "c")
    now = files(1)
    if how == "written":
        (target / WEIGHTS_FILE).write_bytes((now := files(2))[WEIGHTS_FILE])
    elif how == "renamed":
        before = (target / WEIGHTS_FILE).stat()
        (target / "new").write_bytes((now := files(2))[WEIGHTS_FILE])
        os.utime(target / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(target / "new", target / WEIGHTS_FILE)
    elif how == "stamped":
        os.utime(target / CONFIG_FILE, ns=(1, 1))
    elif how == "removed":
        (target / "chat_template.jinja").unlink()
    else:
        target.rename(root / "elsewhere")
        write(root, now := files(3))
    assert _reads_and_content(root, tmp_path / "c")[0] == 1
    reads, found = _reads_and_content(root, tmp_path / "c")
    assert (reads, found.digest) == (0, digest(now))


def test_more_checkpoints_than_are_kept_in_memory_are_not_read_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.checkpoints.local._REMEMBERED", 10)
    paths = [CheckpointPath("r", str(i)) for i in range(40)]
    for i, path in enumerate(paths):
        write(root, files(i), path)
    with opened_store(root, cache=tmp_path / "c", clock=later()) as store:
        for _ in range(3):
            for i, path in enumerate(paths):
                assert run(lambda path=path: store.resolve(path)).digest == digest(files(i))
        assert store.counters.reads == 40


def test_what_is_too_young_to_trust_is_not_noted(root: Path, tmp_path: Path) -> None:
    write(root, files())
    with opened_store(root, cache=tmp_path / "c") as store:
        run(lambda: store.resolve(PATH))
    assert not (tmp_path / "c").exists()


def _change_rows(cache: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(cache / FILE) as notes:
        notes.execute(statement, values)
    notes.close()


DAMAGE = {
    "no database": lambda cache: (cache / FILE).write_bytes(b"noise" * 9000),
    "empty": lambda cache: (cache / FILE).write_bytes(b""),
    "cut": lambda cache: os.truncate(cache / FILE, 5000),
    "gone": lambda cache: (cache / FILE).unlink(),
    "no JSON": lambda cache: _change_rows(cache, "UPDATE notes SET text = '{'"),
    "another digest": lambda cache: _change_rows(
        cache, "UPDATE notes SET text = replace(text, ?, ?)", digest(files(1)), digest(files(2))
    ),
    "other columns": lambda cache: _change_rows(cache, "ALTER TABLE notes RENAME COLUMN text TO words"),
    "a folder": lambda cache: ((cache / FILE).unlink(), (cache / FILE).mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_notes_are_left_out(root: Path, tmp_path: Path, damage: str) -> None:
    write(root, files(1))
    _reads_and_content(root, tmp_path / "c")
    DAMAGE[damage](tmp_path / "c")
    reads, found = _reads_and_content(root, tmp_path / "c")
    assert (reads, found.digest) == (1, digest(files(1)))
    if damage not in ("other columns", "a folder"):
        assert _reads_and_content(root, tmp_path / "c")[0] == 0


def test_notes_that_another_process_holds_cost_a_reading_and_no_error(root: Path, tmp_path: Path) -> None:
    write(root, files(1))
    _reads_and_content(root, tmp_path / "c")
    other = sqlite3.connect(tmp_path / "c" / FILE, isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        assert _reads_and_content(root, tmp_path / "c")[1].digest == digest(files(1))
    finally:
        other.close()


def test_what_a_replica_finds_changed_is_read_anew(root: Path, tmp_path: Path) -> None:
    write(root, files(1))

    async def use(store: CheckpointStore) -> Checkpoint:
        found = await store.resolve(PATH)
        with pytest.raises(AdapterChanged):
            async with store.keep(found.adapter):
                raise AdapterChanged("it holds something else")
        return await store.resolve(PATH)

    with opened_store(root, cache=tmp_path / "c", clock=later()) as store:
        assert run(lambda: use(store)).digest == digest(files(1))
        assert store.counters.reads == 2


def test_a_damaged_copy_is_replaced_once_a_replica_finds_it(root: Path, tmp_path: Path) -> None:
    write_tar(root, tar_bytes(files(1)))

    async def use(store: CheckpointStore) -> Checkpoint:
        found = await store.resolve(PATH)
        (Path(found.directory) / WEIGHTS_FILE).write_bytes(files(2)[WEIGHTS_FILE])
        with pytest.raises(AdapterChanged):
            async with store.keep(found.adapter):
                raise AdapterChanged("it holds something else")
        return await store.resolve(PATH)

    with opened_store(root, cache=tmp_path / "c", clock=later()) as store:
        found = run(lambda: use(store))
    assert (Path(found.directory) / WEIGHTS_FILE).read_bytes() == files(1)[WEIGHTS_FILE]


def test_the_oldest_notes_go(tmp_path: Path) -> None:
    notes = Notes(str(tmp_path), max_notes=10)
    for i in range(30):
        notes.put(str(i), "s", "t", "d")
    notes.put("25", "s", "new", "d")
    assert [name for name in map(str, range(30)) if notes.last(name)] == [str(i) for i in range(21, 30)]
    assert notes.get("25", "s") == "new"
    notes.forget("d")
    assert notes.last("25") is None
    notes.close()


def test_many_threads_and_owners_share_one_file(tmp_path: Path) -> None:
    def use(owner: int) -> None:
        notes = Notes(str(tmp_path))
        for i in range(40):
            notes.put(f"{owner} {i}", str(i), str(i), str(i))
            assert notes.get(f"{owner} {i}", str(i)) == str(i)
        notes.close()

    threads = [threading.Thread(target=use, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notes = Notes(str(tmp_path))
    assert all(notes.get(f"{owner} {i}", str(i)) == str(i) for owner in range(4) for i in range(40))
    notes.close()


contents = st.builds(
    Content,
    digest=st.text("0123456789abcdef", min_size=64, max_size=64),
    base_model=st.none() | st.text(),
    owner=st.none() | st.text(),
    public=st.booleans(),
    expires_at=st.none() | st.datetimes(timezones=st.timezones()),
    chat_template=st.none() | st.text(),
)


@given(content=contents)
def test_a_content_is_read_as_it_was_written(content: Content) -> None:
    assert read(written(content)) == content


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"expires_at": null}', '{"expires_at": 7, "digest": "x"}']
)
def test_what_another_version_wrote_is_left_out(text: str) -> None:
    assert read(text) is None
