"""The disk cache: bounded, least recently used first, whole entries only."""

import multiprocessing
import os
import threading
import time
from multiprocessing.synchronize import Event as EventType
from pathlib import Path

import pytest

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.checkpoints.disk_cache import CacheFull, DiskCache
from tests.support.files.checkpoint_files import SIZE, digest, files


def _put(cache: DiskCache, fill: int) -> str:
    contents = files(fill)
    with cache.workspace(SIZE) as workspace:
        for name, content in contents.items():
            (Path(workspace) / name).write_bytes(content)
        return cache.publish(workspace, digest(contents))


def _age(entry: str, seconds: float) -> None:
    os.utime(entry, (time.time() - seconds,) * 2)


def _kept(cache: DiskCache, *fills: int) -> list[bool]:
    return [cache.use(digest(files(fill))) is not None for fill in fills]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 3 * SIZE)
    for fill in (1, 2, 3):
        _age(_put(cache, fill), 100 - fill)
    assert cache.use(digest(files(1)))
    _put(cache, 4)
    assert _kept(cache, 1, 2, 3, 4) == [True, False, True, True]
    assert cache.evictions == 1


def test_what_is_young_and_not_in_use_makes_room(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * SIZE)
    for fill in (1, 2):
        _age(_put(cache, fill), 10 - fill)
    _put(cache, 3)
    assert _kept(cache, 1, 2, 3) == [False, True, True]


def test_what_is_in_use_stays_however_old_it_is(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * SIZE)
    first, second = _put(cache, 1), _put(cache, 2)
    for _ in range(2):
        assert cache.pin(digest(files(1)))
    _age(first, 9000)
    _age(second, 100)
    _put(cache, 3)
    assert _kept(cache, 1, 2, 3) == [True, False, True]
    assert cache.pin(digest(files(3)))
    cache.unpin(digest(files(1)))
    with pytest.raises(CacheFull):
        _put(cache, 4)
    cache.unpin(digest(files(1)))
    _put(cache, 4)
    assert _kept(cache, 1, 3, 4) == [False, True, True]


def test_what_is_not_there_cannot_be_pinned(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "cache"), SIZE)
    assert not cache.pin(digest(files(1)))
    assert not (tmp_path / "cache").exists()
    (Path(_put(cache, 1)) / WEIGHTS_FILE).write_bytes(b"")
    assert not DiskCache(str(tmp_path / "cache"), SIZE).pin(digest(files(1)))


def _pin_until_killed(directory: str, pinned: EventType) -> None:
    assert DiskCache(directory, 2 * SIZE).pin(digest(files(1)))
    pinned.set()
    threading.Event().wait()


def test_what_another_process_uses_stays_until_that_process_ends(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * SIZE)
    _age(_put(cache, 1), 9000)
    context = multiprocessing.get_context("spawn")
    pinned = context.Event()
    process = context.Process(target=_pin_until_killed, args=(str(tmp_path), pinned))
    process.start()
    try:
        assert pinned.wait(30)
        for fill in (2, 3):
            _put(cache, fill)
        assert _kept(cache, 1, 2, 3) == [True, False, True]
    finally:
        process.kill()
        process.join()
    _age(str(tmp_path / "content" / digest(files(1))), 9000)
    _put(cache, 4)
    assert _kept(cache, 1, 3, 4) == [False, True, True]


def test_an_entry_that_others_publish_again_is_never_gone_for_its_readers(tmp_path: Path) -> None:
    entry = Path(_put(DiskCache(str(tmp_path), 9 * SIZE), 1))
    stop, missed, opened = threading.Event(), list[str](), [0]

    def read() -> None:
        while not stop.is_set():
            opened[0] += 1
            try:
                assert (entry / WEIGHTS_FILE).read_bytes() == files(1)[WEIGHTS_FILE]
            except FileNotFoundError as exc:
                missed.append(str(exc))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):  # each as a process that has not seen the entry yet
            assert _put(DiskCache(str(tmp_path), 9 * SIZE), 1) == str(entry)
    finally:
        stop.set()
        reader.join()
    assert opened[0] > 20
    assert missed == []


def test_a_damaged_entry_is_replaced_when_its_content_comes_again(tmp_path: Path) -> None:
    entry = Path(_put(DiskCache(str(tmp_path), 9 * SIZE), 1))
    (entry / WEIGHTS_FILE).write_bytes(files(2)[WEIGHTS_FILE])
    cache = DiskCache(str(tmp_path), 9 * SIZE)
    assert _put(cache, 1) == str(entry)
    assert (entry / WEIGHTS_FILE).read_bytes() == files(1)[WEIGHTS_FILE]
    assert _kept(cache, 1) == [True]


def test_using_an_entry_counts_from_now(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * SIZE)
    entry = _put(cache, 1)
    _age(entry, 5000)
    assert cache.use(digest(files(1))) == entry
    assert time.time() - os.stat(entry).st_mtime < 60


def test_what_is_being_fetched_counts_against_the_budget(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * SIZE)
    with cache.workspace(SIZE), cache.workspace(SIZE), pytest.raises(CacheFull), cache.workspace(1):
        pass
    assert os.listdir(tmp_path / "work") == []
    _put(cache, 1)


def test_what_a_process_left_half_done_that_is_gone_is_removed(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * SIZE)
    left = tmp_path / "work" / "left"
    left.mkdir(parents=True)
    (left / WEIGHTS_FILE).write_bytes(bytes(2 * SIZE))
    _put(cache, 1)
    assert not left.exists()


def test_what_another_process_is_fetching_stays_and_counts_against_the_budget(tmp_path: Path) -> None:
    cache, other = (DiskCache(str(tmp_path), 2 * SIZE) for _ in range(2))
    with other.workspace(SIZE) as workspace:
        (Path(workspace) / WEIGHTS_FILE).write_bytes(bytes(2 * SIZE))
        with pytest.raises(CacheFull):
            _put(cache, 1)
        assert Path(workspace).exists()
    _put(cache, 1)
    assert os.listdir(tmp_path / "pins") == []


@pytest.mark.parametrize("damage", ["changed", "short", "missing", "empty"])
def test_a_damaged_entry_is_never_used(tmp_path: Path, damage: str) -> None:
    entry = Path(_put(DiskCache(str(tmp_path), 9 * SIZE), 1))
    if damage == "changed":
        (entry / WEIGHTS_FILE).write_bytes(files(2)[WEIGHTS_FILE])
    elif damage == "short":
        os.truncate(entry / CONFIG_FILE, 3)
    else:
        for name in (CONFIG_FILE, WEIGHTS_FILE) if damage == "empty" else (WEIGHTS_FILE,):
            (entry / name).unlink()
    restarted = DiskCache(str(tmp_path), 9 * SIZE)
    assert restarted.use(digest(files(1))) is None
    assert not entry.exists()
    _put(restarted, 1)
    assert _kept(restarted, 1) == [True]


def test_an_entry_whose_weights_were_deleted_is_noticed(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 9 * SIZE)
    (Path(_put(cache, 1)) / WEIGHTS_FILE).unlink()
    assert _kept(cache, 1) == [False]


def test_a_restart_finds_what_was_kept(tmp_path: Path) -> None:
    entry = _put(DiskCache(str(tmp_path), SIZE), 1)
    assert DiskCache(str(tmp_path), SIZE).use(digest(files(1))) == entry


def _fill(directory: str, first: int) -> None:
    cache = DiskCache(directory, 6 * SIZE)
    for turn in range(40):
        fill = first + turn % 5
        _put(cache, fill)
        entry = cache.use(digest(files(fill)))
        assert entry is None or (Path(entry) / CONFIG_FILE).exists() or not Path(entry).exists()


def test_processes_and_threads_share_one_folder_within_one_budget(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fill, args=(str(tmp_path), first)) for first in (1, 3)]
    threads = [threading.Thread(target=_fill, args=(str(tmp_path), first)) for first in (2, 5)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert os.listdir(tmp_path / "work") == []
    kept = os.listdir(tmp_path / "content")
    assert 0 < len(kept) <= 6
    assert all(DiskCache(str(tmp_path), 6 * SIZE).use(one) for one in kept)


def test_nothing_is_touched_before_it_is_needed(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "cache"), SIZE)
    assert cache.use("0" * 64) is None
    assert not (tmp_path / "cache").exists()


def test_others_cannot_read_the_folder(tmp_path: Path) -> None:
    _put(DiskCache(str(tmp_path / "cache"), SIZE), 1)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
