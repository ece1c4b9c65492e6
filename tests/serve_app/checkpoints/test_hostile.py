"""Folders and files made to lead the store astray."""

import contextlib
import gc
import json
import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointRefused,
    CheckpointUnavailable,
    InvalidRequest,
)
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints.root_folder import LeavesRoot, open_below
from tests.support.files.checkpoint_files import (
    PATH,
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

pytestmark = pytest.mark.timeout(60)


def _outside(root: Path) -> Path:
    return write(root.parent / "outside", files(9))


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("part", ["run", "kind", "name", "file"])
def test_a_link_that_leaves_the_root_is_refused_wherever_it_is(root: Path, part: str, relative: bool) -> None:
    outside, target = _outside(root), folder(root)
    link, there = {
        "run": (target.parents[1], outside.parents[1]),
        "kind": (target.parent, outside.parent),
        "name": (target, outside),
        "file": (target / WEIGHTS_FILE, outside / WEIGHTS_FILE),
    }[part]
    if part == "file":
        write(root, {CONFIG_FILE: config()})
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(there, link.parent) if relative else there)
    with pytest.raises(InvalidRequest, match="but a link in this path leads out of the store") as refusal:
        resolve(root)
    assert refusal.value.param == "model"


def test_links_that_stay_inside_the_root_are_followed(root: Path) -> None:
    write(root, files(1), CheckpointPath("other", "1"))
    target = folder(root)
    target.parent.mkdir(parents=True)
    target.symlink_to("../../other/sampler_weights/1")
    (root / "aliased").symlink_to(root / "other")
    assert resolve(root).directory == str(folder(root, CheckpointPath("other", "1")))
    assert resolve(root, CheckpointPath("aliased", "1")).digest == digest(files(1))
    (root / "link").symlink_to(root)
    assert resolve(root / "link", CheckpointPath("aliased", "1")).digest == digest(files(1))


def test_files_may_be_links_to_blobs_inside_the_root(root: Path) -> None:
    (root / "blobs").mkdir()
    (root / "blobs" / "w").write_bytes(weights())
    target = write(root, {CONFIG_FILE: config()})
    (target / WEIGHTS_FILE).symlink_to("../../../blobs/w")
    with opened_store(root, cache=root.parent / "c", clock=later()) as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files())
        (root / "blobs" / "w").write_bytes(weights(2))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(2))


def test_links_in_circles_are_refused(root: Path) -> None:
    target = folder(root)
    target.parent.mkdir(parents=True)
    target.symlink_to("b")
    target.with_name("b").symlink_to(target.name)
    with pytest.raises(InvalidRequest):
        resolve(root)


def test_a_dangling_link_is_nothing(root: Path) -> None:
    folder(root).parent.mkdir(parents=True)
    folder(root).symlink_to("nowhere")
    with pytest.raises(CheckpointNotFound):
        resolve(root)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, "checkpoint.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file_is_refused_at_once(root: Path, name: str, kind: str) -> None:
    target = write(root, files())
    (target / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(target / name)
    elif kind == "folder":
        (target / name).mkdir()
    else:
        try:
            os.mknod(target / name, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: endless
        except PermissionError:
            pytest.skip("making a device needs privileges")
    with pytest.raises(CheckpointRefused, match=f"{name} is not a regular file"):
        resolve(root)


def test_a_socket_is_nothing(root: Path, tmp_path: Path) -> None:
    target = write(root, {CONFIG_FILE: config()})
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(target):  # the name of a socket may not be long
            listener.bind(WEIGHTS_FILE)
        with pytest.raises(CheckpointIncomplete):
            resolve(root)


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_is_no_folder_in_a_folder_s_place_is_nothing(root: Path, kind: str) -> None:
    folder(root).parent.mkdir(parents=True)
    (os.mkfifo if kind == "fifo" else Path.touch)(folder(root))
    with pytest.raises(CheckpointNotFound):
        resolve(root)
    with pytest.raises(CheckpointNotFound):
        resolve(root, CheckpointPath(PATH.run, f"{PATH.name}/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="a privileged user may read everything")
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, "checkpoint.json", ""])
def test_what_cannot_be_read_is_unavailable_and_never_left_out(root: Path, name: str) -> None:
    target = write(root, files(metadata={"owner": "alice"}))
    (target / name).chmod(0)
    try:
        with pytest.raises(CheckpointUnavailable):
            resolve(root)
    finally:
        (target / name).chmod(0o700)


def test_a_root_that_is_not_there_holds_nothing(root: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        resolve(root / "not there")


def test_a_root_that_is_a_file_holds_nothing(root: Path) -> None:
    (root / "file").touch()
    with pytest.raises(CheckpointNotFound):
        resolve(root / "file")


def test_a_name_longer_than_a_file_system_takes_is_not_found(root: Path) -> None:
    write(root, files())
    with pytest.raises(CheckpointNotFound):
        resolve(root, CheckpointPath(PATH.run, "a" * 255))


def test_a_folder_with_a_million_entries_is_not_listed(root: Path) -> None:
    """Known names are opened, nothing is enumerated: 20,000 entries show it."""
    target = write(root, files())
    for i in range(20_000):
        (target / f"x{i}").touch()
    with opened_store(root, cache=root.parent / "c", clock=later(), timeout_s=2.0) as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files())


def test_no_moment_of_a_link_being_swapped_opens_what_lies_outside(root: Path) -> None:
    """The classical race: inside when it is checked, outside when it is opened."""
    inside, outside = write(root, files(1), CheckpointPath("in", "1")), _outside(root)
    (root / "run").mkdir()
    link, stop = root / "run" / "sampler_weights", threading.Event()

    def swap() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            temporary = root / f"t{turn % 2}"
            temporary.symlink_to(outside.parent if turn % 2 else inside.parent)
            os.replace(temporary, link)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set[str]()
    try:
        for _ in range(4000):
            try:
                with open_below(str(root), ("run", "sampler_weights", "1")) as found:
                    if found is not None:
                        seen.add("/".join(found[1]))
                        there = os.fstat(found[0])
                        assert (there.st_dev, there.st_ino) == (inside.stat().st_dev, inside.stat().st_ino)
            except LeavesRoot:
                seen.add("refused")
    finally:
        stop.set()
        swapper.join()
    assert seen == {"in/sampler_weights/1", "refused"}


def test_no_descriptor_is_left_open(root: Path) -> None:
    write(root, files())
    _outside(root)
    (root / "leads").symlink_to(root.parent / "outside")
    with opened_store(root, cache=root.parent / "c") as store:
        run(lambda: store.resolve(PATH))
        before = len(os.listdir("/proc/self/fd"))
        for path in (PATH, CheckpointPath("no", "no"), CheckpointPath("leads", "1")):
            for _ in range(20):
                try:
                    run(lambda path=path: store.resolve(path))
                except (CheckpointNotFound, InvalidRequest):
                    continue
        assert len(os.listdir("/proc/self/fd")) <= before


def _header(tensors: dict[str, object]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def test_a_shape_that_overflows_is_refused_before_any_engine_sees_it(root: Path) -> None:
    entry = {"dtype": "F32", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}
    write(root, {CONFIG_FILE: config(), WEIGHTS_FILE: _header({"a": entry})})
    with pytest.raises(CheckpointRefused) as refusal:
        resolve(root, clock=later())
    assert str(refusal.value) == (
        f"The checkpoint {PATH} cannot be served: adapter_model.safetensors: 'a' has the shape [1099511627776, "
        "1099511627776, 0], whose product is over 2^63."
    )


def test_a_long_header_is_checked_without_an_object_for_each_tensor(root: Path) -> None:
    """Objects would have Python's collector look at everything else in the process."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    contents = {CONFIG_FILE: config(), WEIGHTS_FILE: _header({f"t{i}": entry for i in range(100_000)})}
    write(root, contents)
    collections = gc.get_stats()[2]["collections"]
    assert resolve(root, clock=later()).digest == digest(contents)
    assert gc.get_stats()[2]["collections"] - collections <= 1
