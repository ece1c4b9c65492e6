"""Which checkpoints there are: the caller's and everybody's, newest first, within bounds."""

import asyncio
import os
import threading
from pathlib import Path
from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from engines.lora.format.digest import CONFIG_FILE
from serve_app.checkpoints import CheckpointStore, Listing
from serve_app.checkpoints.listing import Search, merge, search_folder
from serve_app.model_id import CheckpointPath
from tests.support.checkpoint_files import PATH, config, digest, files, opened_store, run, tar_bytes, write, write_tar


def _list(*roots: Path | str, owner: str | None = None, cache: Path) -> Listing:
    with opened_store(*roots, cache=cache) as store:
        return run(lambda: store.list(owner))


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
    assert _list(root, cache=tmp_path / "c") == Listing((_path("9"), _path("4"), _path("1")), True)
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
    assert _list(root, tmp_path / "not there", cache=tmp_path / "c") == Listing((_path("ok"),), True)


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
            assert run(lambda: list_for_many(store)) == [Listing((PATH,), False)] * 20
        with opened_store("hanging://root", tmp_path / "root", cache=tmp_path / "c", timeout_s=1) as store:
            assert run(lambda: store.list(None)) == Listing((PATH,), False)
    finally:
        Hanging.go.set()


def test_an_earlier_root_hides_what_a_later_one_has(tmp_path: Path) -> None:
    write(tmp_path / "1", files(metadata={"owner": "alice"}), _path("a"))
    write(tmp_path / "2", files(), _path("a"))
    write(tmp_path / "1", {CONFIG_FILE: config()}, _path("half"))
    write(tmp_path / "2", files(), _path("half"))
    assert _list(tmp_path / "1", tmp_path / "2", cache=tmp_path / "c").paths == ()


def test_of_many_roots_no_more_is_listed_than_of_one() -> None:
    searches = [Search(None, found={_path(str(i), run_name): float(i) for i in range(600)}) for run_name in "abc"]
    listing = merge(searches)
    assert len(listing.paths) == 1000
    assert not listing.is_complete
    assert listing.paths[:4] == (_path("599", "a"), _path("599", "b"), _path("599", "c"), _path("598", "a"))
    assert merge(searches[:1]) == Listing(tuple(_path(str(i), "a") for i in reversed(range(600))), True)


def test_a_remote_root_is_listed_too(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, metadata in (("1", {"owner": "alice"}), ("2", None)):
        for file, content in files(metadata=metadata).items():
            memory.pipe_file(f"/listing/r/sampler_weights/{name}/{file}", content)
    assert _list("memory://listing", cache=tmp_path / "c") == Listing((_path("2"),), True)
    assert set(_list("memory://listing", owner="alice", cache=tmp_path / "c").paths) == {_path("1"), _path("2")}


def test_a_search_ends_at_its_bounds(tmp_path: Path) -> None:
    for i in range(30):
        write(tmp_path, files(), _path(str(i)))
    few = Search(None, max_found=7)
    search_folder(str(tmp_path), few)
    assert len(few.found) == 7
    assert few.is_cut
    short = Search(None, max_entries=11)
    search_folder(str(tmp_path), short)
    assert len(short.found) <= 11
    assert short.is_cut
    late = Search(None, seconds=-1.0)
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
    assert _path("silent") in listing.paths
    assert {path.name: base for path, base in listing.bases.items()} == {
        "metadata": "told/Here",
        "config": "told/There",
        "tar-metadata": "told/Here",
        "tar-config": "told/There",
    }
