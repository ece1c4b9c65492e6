"""Which checkpoints there are: the caller's and everybody's, newest first, within bounds."""

import asyncio
import json
import os
import struct
import threading
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import InvalidRequest
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import CheckpointStore, Listing
from serve_app.checkpoints.listing import ListedCheckpoint, Search, search_folder
from serve_app.checkpoints.pages import Merged, position_of
from tests.support.files.checkpoint_files import (
    BASE,
    PATH,
    config,
    digest,
    files,
    later,
    opened_store,
    run,
    tar_bytes,
    weights,
    write,
    write_tar,
)


def _list(*roots: Path | str, owner: str | None = None, cache: Path) -> Listing:
    with opened_store(*roots, cache=cache) as store:
        return run(lambda: store.list(owner))


def _seen(listing: Listing) -> tuple[tuple[CheckpointPath, ...], bool]:
    return listing.paths, listing.is_complete


def _path(name: str, run_name: str = "r") -> CheckpointPath:
    return CheckpointPath(run_name, name)


def test_those_that_a_caller_may_use_are_listed_newest_first(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name, metadata in {
        "1": None,
        "2": {"owner": "alice"},
        "3": {"owner": "robin"},
        "4": {"owner": "robin", "public": True},
        "5": {"expires_at": 5},
        "6": {"owner": 7},
    }.items():
        write(root, files(metadata=metadata), _path(name))
    write_tar(root, tar_bytes(files(metadata={"owner": "robin"})), _path("7"))
    write_tar(root, tar_bytes({"checkpoint.json": b"", **files()}), _path("8"))
    write_tar(root, tar_bytes(files()), _path("9"))
    assert _seen(_list(root, cache=tmp_path / "c")) == ((_path("9"), _path("4"), _path("1")), True)
    of_alice = _list(root, owner="alice", cache=tmp_path / "c").paths
    assert set(of_alice) == {_path(name) for name in "9421"}
    of_robin = _list(root, owner="robin", cache=tmp_path / "c").paths
    assert set(of_robin) == {_path(name) for name in "97431"}


def test_what_is_no_checkpoint_is_left_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside", files())
    write(root, {CONFIG_FILE: config()}, _path("half"))
    write(root, files(), _path("a b"))
    write(root, files(), _path("ok"))
    kind = root / "r" / "sampler_weights"
    (kind / "leads").symlink_to(outside)
    (kind / "file").touch()
    (kind / "x.tar").write_bytes(b"noise")
    os.mkfifo(kind / "fifo.tar")
    (root / "file").touch()
    (root / "empty").mkdir()
    assert _list(root, tmp_path / "not there", cache=tmp_path / "c").paths == (_path("ok"),)


def test_a_root_that_hangs_keeps_nobody_from_what_is_in_the_others(tmp_path: Path) -> None:
    class Hanging(MemoryFileSystem):
        protocol = "hanging"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        go = threading.Event()

        def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[dict[str, object]]:
            Hanging.go.wait(20)
            return super().ls(path, detail=detail, **kwargs)

    fsspec.register_implementation("hanging", Hanging, clobber=True)
    write(tmp_path / "root", files())

    async def list_for_many(store: CheckpointStore) -> list[Listing]:
        listings = await asyncio.gather(*(store.list(f"owner {i}") for i in range(20)))
        assert (await store.resolve(PATH)).digest == digest(files())
        return listings

    try:
        with opened_store(tmp_path / "root", "hanging://root", cache=tmp_path / "c", timeout_s=1) as store:
            assert [_seen(listing) for listing in run(lambda: list_for_many(store))] == [((PATH,), False)] * 20
        with opened_store("hanging://root", tmp_path / "root", cache=tmp_path / "c", timeout_s=1) as store:
            assert _seen(run(lambda: store.list(None))) == ((PATH,), False)
    finally:
        Hanging.go.set()


def test_an_earlier_root_hides_what_a_later_one_has(tmp_path: Path) -> None:
    write(tmp_path / "1", files(metadata={"owner": "alice"}), _path("a"))
    write(tmp_path / "2", files(), _path("a"))
    write(tmp_path / "1", {CONFIG_FILE: config()}, _path("half"))
    write(tmp_path / "2", files(), _path("half"))
    assert _list(tmp_path / "1", tmp_path / "2", cache=tmp_path / "c").paths == ()


def test_a_page_of_many_roots_is_no_longer_than_of_one() -> None:
    searches = tuple(Search() for _ in "abc")
    for search, run_name in zip(searches, "abc", strict=True):
        paths = [(i, _path(str(i), run_name)) for i in range(600)]
        search.found = {path: ListedCheckpoint(path, changed_at=float(i)) for i, path in paths}
    merged = Merged.of(searches)
    listing = merged.page(None)
    assert len(listing.paths) == 1000
    assert listing.next is not None
    assert listing.paths[:4] == (_path("599", "a"), _path("599", "b"), _path("599", "c"), _path("598", "a"))
    rest = merged.page(None, position_of(listing.next))
    assert len(set(listing.paths + rest.paths)) == 1800
    assert (len(rest.paths), rest.next, rest.is_complete) == (800, None, True)
    assert _seen(Merged.of(searches[:1]).page(None)) == (tuple(_path(str(i), "a") for i in reversed(range(600))), True)


@given(
    stamps=st.lists(st.floats(0, 1e10), min_size=1, max_size=4),
    owners=st.lists(st.sampled_from([None, "alice", "robin"]), min_size=1, max_size=3),
    number=st.integers(0, 3500),
)
@settings(max_examples=30, deadline=None)
def test_pages_hold_all_that_a_caller_may_use_once_and_newest_first(
    stamps: list[float], owners: list[str | None], number: int
) -> None:
    search = Search()
    for i in range(number):
        owner = owners[i % len(owners)]
        path = _path(str(i))
        search.found[path] = ListedCheckpoint(path, changed_at=stamps[i % len(stamps)], owner=owner)
    merged, seen, after = Merged.of((search,)), list[ListedCheckpoint](), None
    for _ in range(5):
        page = merged.page("alice", after)
        seen += page.checkpoints
        if page.next is None:
            break
        assert len(page.checkpoints) == 1000
        after = position_of(page.next)
    assert {one.path for one in seen} == {one.path for one in search.found.values() if one.owner != "robin"}
    assert len(seen) == len({one.path for one in seen})
    assert [one.changed_at for one in seen] == sorted((one.changed_at for one in seen), reverse=True)


@pytest.mark.parametrize("after", ["", "x", "é", "bnVsbA==", "W10=", "WzEsMiwzXQ==", "WyJ4IiwieSJd", "W" * 10_000])
def test_what_is_no_page_s_next_is_refused(tmp_path: Path, after: str) -> None:
    with opened_store(tmp_path, cache=tmp_path / "c") as store:
        with pytest.raises(InvalidRequest, match="after must be the 'next' of an earlier page, got '") as refusal:
            run(lambda: store.list(None, after))
        assert refusal.value.param == "after"


def test_a_listing_tells_the_content_that_was_read_last_and_whether_it_is_here(tmp_path: Path) -> None:
    memory, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    write(tmp_path / "root", files(1), _path("local"))
    write(tmp_path / "root", files(2), _path("unread"))
    for name in ("remote", "far"):
        for file, content in files(3).items():
            memory.pipe_file(f"{url}/r/sampler_weights/{name}/{file}", content)
    with opened_store(tmp_path / "root", url, cache=tmp_path / "c", clock=later()) as store:
        for name in ("local", "remote"):
            run(lambda name=name: store.resolve(_path(name)))
        listing = run(lambda: store.list(None))
    assert {one.path.name: (one.digest, one.is_here) for one in listing.checkpoints} == {
        "local": (digest(files(1)), True),
        "unread": (None, True),
        "remote": (digest(files(3)), True),
        "far": (None, False),
    }


def test_a_listing_is_made_once_for_all_who_ask_within_seconds(tmp_path: Path) -> None:
    write(tmp_path / "root", files(metadata={"owner": "alice"}), _path("1"))
    now = [0.0]

    async def by_many(store: CheckpointStore) -> list[Listing]:
        return await asyncio.gather(*(store.list(owner) for owner in ("alice", "robin", None) * 9))

    with opened_store(tmp_path / "root", cache=tmp_path / "c", elapsed=lambda: now[0]) as store:
        listings = run(lambda: by_many(store))
        assert [listing.paths for listing in listings] == [(_path("1"),), (), ()] * 9
        write(tmp_path / "root", files(), _path("2"))
        assert run(lambda: store.list(None)).paths == ()
        now[0] = 3.1
        assert run(lambda: store.list(None)).paths == (_path("2"),)


def test_tar_files_of_a_remote_root_are_listed_by_what_they_say_and_not_downloaded(tmp_path: Path) -> None:
    read = list[int]()

    class Counting(MemoryFileSystem):
        protocol = "counting"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: object) -> bytes:
            content = super().cat_file(path, start, end, **more)
            read.append(len(content))
            return content

    fsspec.register_implementation("counting", Counting, clobber=True)
    large = files() | {WEIGHTS_FILE: weights(1, 20 << 20)}
    about = {"checkpoint.json": json.dumps({"owner": "alice", "base_model": "told/Here"}).encode()}
    tars = {
        "last": tar_bytes(large | about),
        "first": tar_bytes(about | large),
        "open": tar_bytes(files()),
        "cut": tar_bytes(large | about)[: 10 << 20],
        "noise": b"\x01" * 4096,
        "folder": tar_bytes(files(metadata={"owner": "robin"})),
    }
    for name, content in tars.items():
        fsspec.filesystem("counting").pipe_file(f"counting://bucket/r/sampler_weights/{name}.tar", content)
    for file, content in files(metadata={"owner": "alice"}).items():
        fsspec.filesystem("counting").pipe_file(f"counting://bucket/r/sampler_weights/folder/{file}", content)
    with opened_store("counting://bucket", cache=tmp_path / "c") as store:
        of_alice = run(lambda: store.list("alice"))
        assert {one.path.name: one.base_model for one in of_alice.checkpoints} == {
            "last": "told/Here",
            "first": "told/Here",
            "open": BASE,
            "folder": BASE,
        }
        assert all(one.changed_at > 0 for one in of_alice.checkpoints)
        assert {path.name for path in run(lambda: store.list("robin")).paths} == {"open"}
    assert sum(read) < 1 << 20


def test_a_remote_root_is_listed_too(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name, metadata in (("1", {"owner": "alice"}), ("2", None)):
        for file, content in files(metadata=metadata).items():
            memory.pipe_file(f"/listing/r/sampler_weights/{name}/{file}", content)
    before = time.time()
    (found,) = _list("memory://listing", cache=tmp_path / "c").checkpoints
    assert (found.path, found.problem) == (_path("2"), None)
    assert before - 60 < found.changed_at <= before
    assert set(_list("memory://listing", owner="alice", cache=tmp_path / "c").paths) == {_path("1"), _path("2")}


def test_a_search_ends_at_its_bounds(tmp_path: Path) -> None:
    for i in range(30):
        write(tmp_path, files(), _path(str(i)))
    few = Search(max_found=7)
    search_folder(str(tmp_path), few)
    assert len(few.found) == 7
    assert few.is_cut
    short = Search(max_entries=11)
    search_folder(str(tmp_path), short)
    assert len(short.found) <= 11
    assert short.is_cut
    late = Search(seconds=-1.0)
    search_folder(str(tmp_path), late)
    assert late.is_cut
    assert not late.found


def test_a_listing_tells_what_each_checkpoint_was_trained_on(tmp_path: Path) -> None:
    root = tmp_path / "1"
    there, silent = ({CONFIG_FILE: config(base_model_name_or_path=base)} for base in ("told/There", None))
    write(root, files(metadata={"base_model": "told/Here"}), _path("metadata"))
    write(root, files() | there, _path("config"))
    write(root, files() | silent, _path("silent"))
    write_tar(root, tar_bytes(files(metadata={"base_model": "told/Here"})), _path("tar-metadata"))
    write_tar(root, tar_bytes(files() | there), _path("tar-config"))
    listing = _list(root, cache=tmp_path / "c")
    assert {found.path.name: found.base_model for found in listing.checkpoints} == {
        "silent": None,
        "metadata": "told/Here",
        "config": "told/There",
        "tar-metadata": "told/Here",
        "tar-config": "told/There",
    }


def _write_broken(root: Path) -> None:
    write(root, files() | {WEIGHTS_FILE: weights()[:-7]}, _path("cut"))
    write(root, files() | {WEIGHTS_FILE: b"\x10" + bytes(40)}, _path("noise"))
    write(root, files() | {CONFIG_FILE: b'{"r": '}, _path("half"))
    write(root, files(metadata={"owner": "alice"}) | {CONFIG_FILE: b"[]"}, _path("hers"))
    write_tar(root, tar_bytes(files() | {CONFIG_FILE: b"[]"}), _path("tar"))
    write(root, files(), _path("well"))


def test_what_is_broken_is_listed_with_what_is_wrong_and_when_it_changed(tmp_path: Path) -> None:
    _write_broken(tmp_path)
    before = time.time()
    listing = _list(tmp_path, cache=tmp_path / "c")
    label = "The checkpoint tinker://r/sampler_weights"
    assert {found.path.name: found.problem for found in listing.checkpoints} == {
        "cut": f"{label}/cut is not complete: adapter_model.safetensors has 365 bytes, and its header describes 372.",
        "noise": f"{label}/noise is not complete: adapter_model.safetensors: its header is not a JSON object: "
        "'{' is missing at character 0.",
        "half": f"{label}/half is not complete: adapter_config.json is not JSON.",
        "tar": f"{label}/tar cannot be served: adapter_config.json is not a JSON object.",
        "well": None,
    }
    assert all(before - 60 < found.changed_at <= before for found in listing.checkpoints)
    of_alice = _list(tmp_path, owner="alice", cache=tmp_path / "c").checkpoints
    hers = next(found for found in of_alice if found.path == _path("hers"))
    assert hers.problem == f"{label}/hers is not complete: adapter_config.json is not a JSON object."


def test_a_listing_that_has_no_time_to_look_into_files_lists_them_all_the_same(tmp_path: Path) -> None:
    _write_broken(tmp_path)
    search = Search(seconds=60.0, _started=time.monotonic() - 20.0)
    search_folder(str(tmp_path), search)
    assert {path.name for path in search.found} == {"cut", "noise", "half", "tar", "well", "hers"}
    assert search.found[_path("cut")].problem is None


def test_a_header_that_is_longer_than_a_glance_is_checked_by_its_length_only(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode().ljust(1 << 19)
    whole = struct.pack("<Q", len(header)) + header
    write(tmp_path, files() | {WEIGHTS_FILE: whole + b"12"}, _path("long"))
    write(tmp_path, files() | {WEIGHTS_FILE: whole[:-9]}, _path("cut"))
    found = {found.path.name: found.problem for found in _list(tmp_path, cache=tmp_path / "c").checkpoints}
    assert found["long"] is None
    assert found["cut"] is not None
    assert "and its header alone 524296" in found["cut"]
