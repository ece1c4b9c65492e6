"""Roots that hang, fail or do not have what is asked for, before and behind roots that do."""

import asyncio
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from serve_app.base.errors import CheckpointNotFound, CheckpointUnavailable
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import Checkpoint, CheckpointStore
from tests.support.files.checkpoint_files import PATH, digest, files, opened_store, run, write

pytestmark = pytest.mark.timeout(60)


class Slow(MemoryFileSystem):
    """A store in memory that counts its listings, and that can be made to hang or fail."""

    protocol = "silent"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    goes_on = threading.Event()
    fails = False
    num_calls = 0
    begun = threading.Semaphore(0)

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[dict[str, object]]:
        Slow.num_calls += 1
        Slow.begun.release()
        Slow.goes_on.wait(30)
        if Slow.fails:
            raise RuntimeError("SlowDown")
        return super().ls(path, detail=detail, **kwargs)


@pytest.fixture
def slow() -> Iterator[str]:
    """The URL of an empty root that answers."""
    fsspec.register_implementation("silent", Slow, clobber=True)
    Slow.goes_on.set()
    Slow.fails, Slow.num_calls, Slow.begun = False, 0, threading.Semaphore(0)
    yield f"silent://{uuid.uuid4().hex}"
    Slow.goes_on.set()


def _put(url: str, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        fsspec.filesystem("silent").pipe_file(f"{url}/{PATH.run}/sampler_weights/{PATH.name}/{name}", content)


async def _many(store: CheckpointStore, number: int = 30) -> list[Checkpoint]:
    return await asyncio.gather(*(store.resolve(PATH) for _ in range(number)))


def test_what_an_earlier_root_lacks_is_asked_for_once_in_a_while(slow: str, root: Path, tmp_path: Path) -> None:
    write(root, files())
    with opened_store(slow, root, cache=tmp_path / "c", recheck_s=1000.0) as store:
        for _ in range(5):
            assert {found.digest for found in run(lambda: _many(store))} == {digest(files())}
    assert Slow.num_calls == 2  # the folder, and the one in which a tar file would lie


def test_what_is_missing_does_not_push_out_what_is_there(slow: str, tmp_path: Path) -> None:
    _put(slow, files())

    async def ask_for_many(store: CheckpointStore) -> None:
        for i in range(3000):
            with pytest.raises(CheckpointNotFound):
                await store.resolve(CheckpointPath("r", str(i)))

    with opened_store(slow, cache=tmp_path, recheck_s=1000.0) as store:
        run(lambda: store.resolve(PATH))
        run(lambda: ask_for_many(store))
        before = Slow.num_calls
        run(lambda: store.resolve(PATH))
    assert Slow.num_calls == before


def test_a_root_that_hangs_is_passed_by_after_a_bound_and_then_at_once(slow: str, root: Path, tmp_path: Path) -> None:
    write(root, files())
    Slow.goes_on.clear()
    with opened_store(slow, root, cache=tmp_path / "c", look_s=2.0, recheck_s=0.0, elapsed=lambda: 0.0) as store:
        for _ in range(20):
            assert {found.digest for found in run(lambda: _many(store))} == {digest(files())}
    assert Slow.num_calls == 1


def test_a_root_that_hung_is_asked_again_by_one_request_at_a_time(slow: str, root: Path, tmp_path: Path) -> None:
    write(root, files(2))
    Slow.goes_on.clear()
    now = [0.0]

    async def ask(store: CheckpointStore) -> Checkpoint:
        assert (await store.resolve(PATH)).digest == digest(files(2))
        now[0] = 11.0
        assert {found.digest for found in await _many(store)} == {digest(files(2))}
        assert Slow.num_calls <= 2
        _put(slow, files(1))
        Slow.goes_on.set()
        now[0] = 22.0
        return await store.resolve(PATH)

    with opened_store(slow, root, cache=tmp_path / "c", look_s=2.0, recheck_s=0.0, elapsed=lambda: now[0]) as store:
        assert run(lambda: ask(store)).digest == digest(files(1))


def test_a_root_that_answers_late_is_asked_again_at_once(slow: str, root: Path, tmp_path: Path) -> None:
    write(root, files(2))
    _put(slow, files(1))
    Slow.goes_on.clear()

    async def ask(store: CheckpointStore) -> Checkpoint:
        assert (await store.resolve(PATH)).digest == digest(files(2))
        Slow.goes_on.set()
        while (found := await store.resolve(PATH)).digest == digest(files(2)):  # noqa: ASYNC110 - has no event
            await asyncio.sleep(0)  # until the late answer has come
        return found

    with opened_store(slow, root, cache=tmp_path / "c", look_s=2.0, recheck_s=0.0, elapsed=lambda: 0.0) as store:
        assert run(lambda: ask(store)).digest == digest(files(1))


def test_a_root_that_hangs_keeps_nobody_from_what_another_root_has(slow: str, root: Path, tmp_path: Path) -> None:
    write(root, files())
    Slow.goes_on.clear()

    async def ask(store: CheckpointStore) -> Checkpoint:
        waiting = [asyncio.create_task(store.resolve(CheckpointPath("r", str(i)))) for i in range(40)]
        for _ in range(8):  # as many as there are threads
            await asyncio.to_thread(Slow.begun.acquire)
        found = await store.resolve(PATH)
        Slow.goes_on.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {CheckpointNotFound}
        return found

    with opened_store(root, slow, cache=tmp_path / "c", look_s=30.0) as store:
        assert run(lambda: ask(store)).digest == digest(files())


@pytest.mark.parametrize("fails", [True, False])
def test_what_only_a_silent_root_can_have_is_unavailable_and_not_missing(
    slow: str, root: Path, tmp_path: Path, fails: bool
) -> None:
    Slow.fails = fails
    if not fails:
        Slow.goes_on.clear()
    with opened_store(slow, root, cache=tmp_path / "c", look_s=0.2) as store, pytest.raises(CheckpointUnavailable):
        run(lambda: store.resolve(PATH))


@pytest.mark.parametrize("fails", [True, False])
def test_a_silent_root_that_has_the_path_is_not_replaced_by_a_later_one(
    slow: str, root: Path, tmp_path: Path, fails: bool
) -> None:
    write(root, files(2))
    _put(slow, files(1))
    with opened_store(slow, root, cache=tmp_path / "c", look_s=2.0, recheck_s=0.0) as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files(1))
        Slow.fails = fails
        if not fails:
            Slow.goes_on.clear()
        for _ in range(2):
            with pytest.raises(CheckpointUnavailable):
                run(lambda: store.resolve(PATH))
