"""Checkpoints behind fsspec: in memory, on a web server, in an object store."""

import asyncio
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from engines.interface.errors import AdapterChanged
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointRefused,
    CheckpointUnavailable,
    ConfigRefused,
)
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import Checkpoint, CheckpointStore
from tests.support.files.checkpoint_files import (
    PATH,
    SIZE,
    assert_never_raised_twice,
    config,
    digest,
    files,
    opened_store,
    run,
    tar_bytes,
    weights,
    write,
    write_tar,
)

pytestmark = pytest.mark.timeout(60)


class Bucket:
    """A root in fsspec's memory."""

    def __init__(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self._memory = fsspec.filesystem("memory")

    def put(self, contents: Mapping[str, bytes], path: CheckpointPath = PATH) -> None:
        for name, content in contents.items():
            self._memory.pipe_file(f"{self.url}/{path.run}/sampler_weights/{path.name}/{name}", content)

    def put_tar(self, content: bytes) -> None:
        self._memory.pipe_file(f"{self.url}/{PATH.run}/sampler_weights/{PATH.name}.tar", content)

    def drop(self, name: str) -> None:
        self._memory.rm_file(f"{self.url}/{PATH.run}/sampler_weights/{PATH.name}/{name}")


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def store(bucket: Bucket, tmp_path: Path) -> Iterator[CheckpointStore]:
    """One that asks at every request."""
    with opened_store(bucket.url, cache=tmp_path, recheck_s=0.0) as opened:
        yield opened


def test_a_remote_checkpoint_is_fetched_into_the_cache(bucket: Bucket, store: CheckpointStore, tmp_path: Path) -> None:
    contents = {**files(metadata={"owner": "alice"}), "chat_template.jinja": b"x", "adapter_model.bin": b"\x80"}
    bucket.put(contents)
    found = run(lambda: store.resolve(PATH))
    assert (found.digest, found.owner, found.chat_template) == (digest(contents), "alice", "x")
    assert found.directory == str(tmp_path / "content" / found.digest)
    assert {name: (Path(found.directory) / name).read_bytes() for name in os.listdir(found.directory)} == files()
    assert os.listdir(tmp_path / "work") == []


def test_it_is_fetched_again_only_when_it_changes(bucket: Bucket, store: CheckpointStore) -> None:
    bucket.put(files(1))
    for _ in range(5):
        assert run(lambda: store.resolve(PATH)).digest == digest(files(1))
    assert store.counters.fetches == 1
    bucket.put(files(2))
    assert run(lambda: store.resolve(PATH)).digest == digest(files(2))
    bucket.put(files(1))
    assert run(lambda: store.resolve(PATH)).digest == digest(files(1))


def test_the_store_is_asked_at_most_every_so_often(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(files(1))
    with opened_store(bucket.url, cache=tmp_path, recheck_s=1000.0) as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files(1))
        bucket.put(files(2))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(1))


def test_what_is_missing_is_found_when_the_store_is_asked_again(bucket: Bucket, store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFound):
        run(lambda: store.resolve(PATH))
    bucket.put(files())
    assert run(lambda: store.resolve(PATH)).digest == digest(files())


def test_a_restart_fetches_nothing_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(files(metadata={"owner": "alice", "expires_at": "2131-01-01T00:00:00Z"}))
    found = list[Checkpoint]()
    for _ in range(2):
        with opened_store(bucket.url, cache=tmp_path) as store:
            found.append(run(lambda: store.resolve(PATH)))
    assert found[0] == found[1]
    assert store.counters.fetches == 0


def test_what_was_dropped_from_the_cache_is_fetched_again(
    bucket: Bucket, store: CheckpointStore, tmp_path: Path
) -> None:
    bucket.put(files())
    found = run(lambda: store.resolve(PATH))
    Path(found.directory).rename(tmp_path / "gone")
    assert run(lambda: store.resolve(PATH)) == found
    assert store.counters.fetches == 2


@pytest.mark.parametrize("order", [(CONFIG_FILE, WEIGHTS_FILE), (WEIGHTS_FILE, CONFIG_FILE)])
def test_the_next_request_after_the_last_file_finds_it(
    bucket: Bucket, store: CheckpointStore, order: list[str]
) -> None:
    contents = files()
    for name in order:
        with pytest.raises((CheckpointNotFound, CheckpointIncomplete)):
            run(lambda: store.resolve(PATH))
        bucket.put({name: contents[name][:-2]})
        with pytest.raises(CheckpointIncomplete):
            run(lambda: store.resolve(PATH))
        bucket.put({name: contents[name]})
    assert run(lambda: store.resolve(PATH)).digest == digest(contents)


def test_what_is_incomplete_is_not_fetched_again_until_it_changes(bucket: Bucket, store: CheckpointStore) -> None:
    bucket.put({**files(), WEIGHTS_FILE: weights()[:-1]})
    for _ in range(3):
        with pytest.raises(CheckpointIncomplete, match="its header describes"):
            run(lambda: store.resolve(PATH))
    assert store.counters.fetches == 1


def test_a_pickle_and_sizes_are_refused_unfetched(bucket: Bucket, tmp_path: Path) -> None:
    with opened_store(bucket.url, cache=tmp_path, recheck_s=0.0, max_bytes=300) as store:
        bucket.put({CONFIG_FILE: config(), "adapter_model.bin": bytes(10)})
        with pytest.raises(CheckpointRefused, match=r"adapter_model\.bin is never read"):
            run(lambda: store.resolve(PATH))
        bucket.put(files())
        with pytest.raises(CheckpointRefused, match=f"{WEIGHTS_FILE} has {len(weights())} bytes; the limit is 300"):
            run(lambda: store.resolve(PATH))
        assert store.counters.fetches == 0


def test_what_is_private_is_not_found_by_others_before_it_is_complete(bucket: Bucket, store: CheckpointStore) -> None:
    bucket.put({"checkpoint.json": b'{"owner": "alice"}', CONFIG_FILE: config()})
    with pytest.raises(CheckpointNotFound):
        run(lambda: store.resolve_for(PATH, "robin"))
    with pytest.raises(CheckpointIncomplete):
        run(lambda: store.resolve_for(PATH, "alice"))
    bucket.put({WEIGHTS_FILE: weights()})
    with pytest.raises(CheckpointNotFound):
        run(lambda: store.resolve_for(PATH, "robin"))
    assert run(lambda: store.resolve_for(PATH, "alice")).digest == digest(files())


def test_a_remote_tar_is_a_checkpoint(bucket: Bucket, store: CheckpointStore, tmp_path: Path) -> None:
    bucket.put_tar(tar_bytes(files(1, metadata={"owner": "alice"}), "x/"))
    for _ in range(3):
        found = run(lambda: store.resolve(PATH))
        assert (found.digest, found.owner) == (digest(files(1)), "alice")
    assert store.counters.fetches == 1
    bucket.put_tar(tar_bytes(files(2))[:-9000])
    with pytest.raises(CheckpointIncomplete):
        run(lambda: store.resolve(PATH))
    bucket.put_tar(tar_bytes(files(2)))
    assert run(lambda: store.resolve(PATH)).digest == digest(files(2))
    assert os.listdir(tmp_path / "work") == []


def test_fifty_requests_at_once_fetch_once(bucket: Bucket, store: CheckpointStore) -> None:
    bucket.put(files())

    async def fifty() -> list[Checkpoint]:
        return await asyncio.gather(*(store.resolve(PATH) for _ in range(50)))

    assert {found.digest for found in run(fifty)} == {digest(files())}
    assert store.counters.fetches == 1


def test_a_cache_without_room_is_unavailable(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(files())
    with opened_store(bucket.url, cache=tmp_path, cache_bytes=100) as store, pytest.raises(CheckpointUnavailable):
        run(lambda: store.resolve(PATH))


def _paths() -> list[CheckpointPath]:
    return [CheckpointPath("r", str(fill)) for fill in range(1, 4)]


def _put_three(bucket: Bucket) -> None:
    for fill, path in enumerate(_paths(), start=1):
        bucket.put(files(fill), path)


def test_a_cache_that_is_full_of_what_nobody_uses_takes_more_at_once(bucket: Bucket, tmp_path: Path) -> None:
    _put_three(bucket)
    with opened_store(bucket.url, cache=tmp_path, cache_bytes=2 * SIZE) as store:
        for _ in range(2):
            for fill, path in enumerate(_paths(), start=1):
                assert run(lambda path=path: store.resolve(path)).digest == digest(files(fill))
        assert store.counters.evictions >= 3


def test_what_a_request_uses_stays_until_it_ends(bucket: Bucket, tmp_path: Path) -> None:
    _put_three(bucket)
    first, second, third = _paths()

    async def use(store: CheckpointStore) -> None:
        used = await store.resolve(first)
        async with store.keep(used.adapter):
            for path in (second, third, second, third):
                await store.resolve(path)
                assert (Path(used.directory) / WEIGHTS_FILE).exists()
            async with store.keep((await store.resolve(third)).adapter):
                with pytest.raises(CheckpointUnavailable, match="the checkpoint cache is full"):
                    await store.resolve(second)
        await store.resolve(second)
        with pytest.raises(AdapterChanged):
            async with store.keep(used.adapter):
                raise AssertionError("it is gone")

    with opened_store(bucket.url, cache=tmp_path, cache_bytes=2 * SIZE) as store:
        run(lambda: use(store))
    assert len(os.listdir(tmp_path / "pins")) <= 2


def test_what_lies_in_a_folder_of_its_owner_needs_no_place_in_the_cache(root: Path, tmp_path: Path) -> None:
    write(root, files())

    async def use(store: CheckpointStore) -> None:
        async with store.keep((await store.resolve(PATH)).adapter):
            pass

    with opened_store(root, cache=tmp_path / "c") as store:
        run(lambda: use(store))
    assert not (tmp_path / "c").exists()


class Failing(MemoryFileSystem):
    """A store in memory that can be made to fail."""

    protocol = "failing"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fails = False
    num_calls = 0

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[dict[str, object]]:
        Failing.num_calls += 1
        if Failing.fails:
            raise RuntimeError("SlowDown")
        return super().ls(path, detail=detail, **kwargs)


def test_a_store_that_fails_is_unavailable_for_seconds_and_not_asked_meanwhile(tmp_path: Path) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.fails, Failing.num_calls = True, 0
    with opened_store("failing://root", cache=tmp_path, recheck_s=1000.0) as store:
        for _ in range(5):
            with pytest.raises(CheckpointUnavailable, match=f"The store of the checkpoint {PATH} does not answer"):
                run(lambda: store.resolve(PATH))
        assert Failing.num_calls == 1
    Failing.fails = False
    with opened_store("failing://root", cache=tmp_path) as store, pytest.raises(CheckpointNotFound):
        run(lambda: store.resolve(PATH))


def test_an_error_of_a_remote_root_that_is_remembered_holds_on_to_no_request(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put({**files(), "checkpoint.json": b'{"owner": 7}'})
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.fails = True
    for recheck_s in (0.0, 1000.0):
        cache = tmp_path / str(recheck_s)
        with opened_store(bucket.url, cache=cache, recheck_s=recheck_s) as store:
            assert_never_raised_twice(store, CheckpointRefused)
            assert store.counters.fetches == 1
    with opened_store("failing://root", cache=tmp_path / "c", recheck_s=1000.0) as store:
        assert_never_raised_twice(store, CheckpointUnavailable)


def test_a_time_limit_ends_the_wait_and_not_the_work(tmp_path: Path) -> None:
    class Slow(MemoryFileSystem):
        protocol = "slow"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        go = threading.Event()

        def get_file(self, *args: object, **kwargs: object) -> None:
            Slow.go.wait(20)
            super().get_file(*args, **kwargs)

    fsspec.register_implementation("slow", Slow, clobber=True)
    for name, content in files().items():
        fsspec.filesystem("slow").pipe_file(f"slow://root/{PATH.run}/sampler_weights/{PATH.name}/{name}", content)

    async def wait_twice(store: CheckpointStore) -> Checkpoint:
        with pytest.raises(CheckpointUnavailable, match="was not read within"):
            await store.resolve(PATH)
        Slow.go.set()
        while True:  # the first wait's work ends; no second one begins
            try:
                return await store.resolve(PATH)
            except CheckpointUnavailable:
                continue

    with opened_store("slow://root", cache=tmp_path, timeout_s=0.3) as store:
        assert run(lambda: wait_twice(store)).digest == digest(files())
        assert store.counters.fetches == 1


@pytest.mark.parametrize("url", ["nosuch://x", "s3+nosuch://x"])
def test_a_root_of_an_unknown_kind_is_refused_at_the_start(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigRefused, match="cannot be used"), opened_store(url, cache=tmp_path):
        pass


class _Handler(SimpleHTTPRequestHandler):
    """Without ranges and ETags: the plainest server there is, with Last-Modified."""

    status: int | None = None
    lies = False

    def send_head(self) -> object:
        if type(self).status is not None:
            self.send_error(type(self).status)
            return None
        return super().send_head()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length" and type(self).lies and self.command == "HEAD":
            value = str(int(value) - 1)
        super().send_header(keyword, value)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, type[_Handler]]]:
    handler = type("Handler", (_Handler,), {})
    (tmp_path / "www").mkdir()
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "www")))  # type: ignore[arg-type]
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}", tmp_path / "www", handler
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


Server = tuple[str, Path, type[_Handler]]


def test_a_web_server_is_a_root(server: Server, tmp_path: Path) -> None:
    url, www, _ = server
    with opened_store(url, cache=tmp_path / "c", recheck_s=0.0) as store:
        with pytest.raises(CheckpointNotFound):
            run(lambda: store.resolve(PATH))
        write(www, {CONFIG_FILE: config()})
        with pytest.raises(CheckpointIncomplete):
            run(lambda: store.resolve(PATH))
        target = write(www, files(1, metadata={"owner": "alice"}))
        for _ in range(2):
            found = run(lambda: store.resolve(PATH))
            assert (found.digest, found.owner) == (digest(files(1)), "alice")
        assert store.counters.fetches == 1
        (target / WEIGHTS_FILE).write_bytes(weights(2))
        os.utime(target / WEIGHTS_FILE, (1, 1))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(2))
        assert run(lambda: store.list("alice")).paths == ()  # a web server does not list


def test_a_tar_on_a_web_server(server: Server, tmp_path: Path) -> None:
    url, www, _ = server
    write_tar(www, tar_bytes(files()))
    with opened_store(url, cache=tmp_path / "c") as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files())


@pytest.mark.parametrize(
    ("status", "error"), [(404, CheckpointNotFound), (403, CheckpointNotFound), (500, CheckpointUnavailable)]
)
def test_a_server_s_failure_is_not_taken_for_a_missing_checkpoint(
    server: Server, tmp_path: Path, status: int, error: type[Exception]
) -> None:
    url, www, handler = server
    write(www, files())
    handler.status = status
    with opened_store(url, cache=tmp_path / "c") as store, pytest.raises(error):
        run(lambda: store.resolve(PATH))


def test_a_server_that_is_down_is_unavailable(tmp_path: Path) -> None:
    with opened_store("http://127.0.0.1:9", cache=tmp_path) as store, pytest.raises(CheckpointUnavailable):
        run(lambda: store.resolve(PATH))


def test_a_server_that_sends_more_than_it_said_is_cut_off(server: Server, tmp_path: Path) -> None:
    url, www, handler = server
    write(www, files())
    handler.lies = True
    with opened_store(url, cache=tmp_path / "c") as store, pytest.raises(CheckpointUnavailable):
        run(lambda: store.resolve(PATH))
    assert not list((tmp_path / "c").rglob("adapter*"))
