"""Checkpoints as tar files."""

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import CheckpointIncomplete, CheckpointNotFound, CheckpointRefused, CheckpointUnavailable
from serve_app.checkpoints.tar import Archive, TarRefused, TarTruncated, TarWrong, known_files
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
    tar_bytes,
    weights,
    write,
    write_tar,
)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "000080/", "./" + "x" * 120 + "/"])
def test_a_tar_of_any_usual_form_is_a_checkpoint(root: Path, form: int, prefix: str) -> None:
    contents = {**files(metadata={"owner": "alice"}), "chat_template.jinja": b"x", "README.md": b"y" * 2000}
    write_tar(root, tar_bytes(contents, prefix, form))
    found = resolve(root)
    assert (found.digest, found.owner, found.chat_template) == (digest(contents), "alice", "x")
    assert {name: (Path(found.directory) / name).read_bytes() for name in os.listdir(found.directory)} == files()


def test_a_tar_made_by_tar_is_a_checkpoint(root: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", files())
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(source, arcname="000080")
    write_tar(root, (tmp_path / "t.tar").read_bytes())
    assert resolve(root).digest == digest(files())


def test_a_folder_counts_before_a_tar(root: Path) -> None:
    write_tar(root, tar_bytes(files(1)))
    assert resolve(root).digest == digest(files(1))
    write(root, files(2))
    assert resolve(root).digest == digest(files(2))


def test_the_same_content_is_kept_once(root: Path, tmp_path: Path) -> None:
    other = type(PATH)("other", "1")
    write_tar(root, tar_bytes(files()))
    write_tar(root, tar_bytes(files(), "a/"), other)
    with opened_store(root, cache=tmp_path / "c", clock=later()) as store:
        assert run(lambda: store.resolve(PATH)).directory == run(lambda: store.resolve(other)).directory
    assert len(os.listdir(tmp_path / "c" / "content")) == 1
    assert os.listdir(tmp_path / "c" / "work") == []


def test_a_tar_is_unpacked_once_and_again_when_it_changes(root: Path, tmp_path: Path) -> None:
    write_tar(root, tar_bytes(files(1)))
    with opened_store(root, cache=tmp_path / "c", clock=later()) as store:
        for _ in range(3):
            assert run(lambda: store.resolve(PATH)).digest == digest(files(1))
        assert store.counters.reads == 1
        write_tar(root, tar_bytes(files(2)))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(2))


@given(cut=st.integers(0, 100_000))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_prefix_of_a_tar_is_a_checkpoint(root: Path, cut: int) -> None:
    """Not even one that holds both files: what says who may use them might follow."""
    contents = {**files(), "checkpoint.json": json.dumps({"owner": "alice"}).encode()}
    content = tar_bytes(contents)
    end = content.rstrip(b"\0")
    write_tar(root, content[: cut % (len(end) - len(end) % 512 + 512)])
    with pytest.raises(CheckpointIncomplete):
        resolve(root)


def _with(name: str = "x", **fields: object) -> Callable[[], bytes]:
    def build() -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for file, content in files().items():
                good = tarfile.TarInfo(file)
                good.size = len(content)
                tar.addfile(good, io.BytesIO(content))
            bad = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(bad, field, value)
            tar.addfile(bad, io.BytesIO(bytes(bad.size)))
        return buffer.getvalue()

    return build


def _pax(records: bytes, kind: bytes = b"x") -> Callable[[], bytes]:
    def build() -> bytes:
        return (
            _header("pax", kind, len(records))
            + records.ljust(-(-len(records) // 512) * 512, b"\0")
            + tar_bytes(files())
        )

    return build


def _header(name: str, kind: bytes, size: int, size_field: bytes | None = None) -> bytes:
    field = size_field or f"{size:011o}\0".encode()
    head = name.encode().ljust(100, b"\0") + b"0000644\0" * 3 + field + b"00000000000\0" + b" " * 8 + kind
    head = (head + bytes(100) + b"ustar\0" + b"00").ljust(512, b"\0")
    return head[:148] + f"{sum(head):06o}\0 ".encode() + head[156:]


REFUSED = {
    "symbolic link": (_with(type=tarfile.SYMTYPE, linkname="/etc/passwd"), "'x' is a link"),
    "hard link": (_with(type=tarfile.LNKTYPE, linkname=CONFIG_FILE), "'x' is a link"),
    "link as a known file": (_with("chat_template.jinja", type=tarfile.SYMTYPE, linkname="y"), "is a link"),
    "character device": (_with(type=tarfile.CHRTYPE), "'x' is a device"),
    "block device": (_with(type=tarfile.BLKTYPE), "'x' is a device"),
    "FIFO": (_with(type=tarfile.FIFOTYPE), "'x' is a FIFO"),
    "sparse": (_with(type=b"S"), "'x' is a sparse file"),
    "unknown type": (_with(type=b"V"), "'x' has the unknown type b'V'"),
    "absolute": (_with("/etc/x"), "'/etc/x' leads out of the archive"),
    "climbing": (_with("a/../../x"), "'a/../../x' leads out of the archive"),
    "climbing folder": (_with("..", type=tarfile.DIRTYPE), "'../' leads out of the archive"),
    "long climbing": (_with("a/" * 200 + "../x"), "leads out of the archive"),
    "no name": (_with(""), "'' leads out of the archive"),
    "twice": (_with(CONFIG_FILE), f"it holds {CONFIG_FILE} twice"),
    "two folders": (_with(f"a/{CONFIG_FILE}"), "checkpoint files in more than one folder"),
    "sparse by extension": (_pax(b"22 GNU.sparse.major=1\n"), "it holds a sparse file"),
    "global path": (_pax(b"10 path=x\n", b"g"), "a global header names files"),
    "endless header": (_pax(b" " * (1 << 17)), "an extended header has 131072 bytes; the limit is 65536"),
    "absolute by extension": (_pax(b"11 path=/x\n"), "'/x' leads out of the archive"),
    "many members": (lambda: _header("d", b"5", 0) * 10_001 + bytes(1024), "more than 10000 members"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_in_a_checkpoint_is_refused(root: Path, case: str) -> None:
    build, message = REFUSED[case]
    write_tar(root, build())
    for clock in (later(0), later()):
        with pytest.raises(CheckpointRefused, match=f"cannot be served: in its tar file, .*{message}"):
            resolve(root, clock=clock)
    assert not list(Path(f"{root}-cache").rglob("adapter*"))


WRONG = {
    "checksum": lambda: tar_bytes(files())[:148] + b"0000000\0" + tar_bytes(files())[156:],
    "size": lambda: _header("x", b"0", 0, b"12345678xyz\0"),
    "noise": lambda: b"\x01" * 2048,
    "negative": lambda: _pax(b"11 size=-5\n")(),
    "size no number": lambda: _pax(b"10 size=x\n")(),
    "record": lambda: _pax(b"99 path=x\n")(),
    "record without length": lambda: _pax(b"path=x\n")(),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_tar_is_incomplete_while_it_is_young_and_refused_later(root: Path, case: str) -> None:
    write_tar(root, WRONG[case]())
    with pytest.raises(CheckpointIncomplete, match="its tar file is damaged"):
        resolve(root)
    with pytest.raises(CheckpointRefused, match="its tar file is damaged"):
        resolve(root, clock=later())


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_complete_tar_without_a_file_is_refused_when_it_is_not_young(root: Path, missing: str) -> None:
    write_tar(root, tar_bytes({name: content for name, content in files().items() if name != missing}))
    with pytest.raises(CheckpointIncomplete, match=f"{missing} is not in its tar file"):
        resolve(root)
    with pytest.raises(CheckpointRefused, match=f"{missing} is not in its tar file"):
        resolve(root, clock=later())


def test_short_weights_in_a_complete_tar_are_refused_when_it_is_not_young(root: Path) -> None:
    write_tar(root, tar_bytes({**files(), WEIGHTS_FILE: weights()[:-1]}))
    with pytest.raises(CheckpointIncomplete, match="its header describes"):
        resolve(root)
    with pytest.raises(CheckpointRefused, match="its header describes"):
        resolve(root, clock=later())


def test_a_pickle_in_a_tar_is_refused_by_name(root: Path) -> None:
    write_tar(root, tar_bytes({CONFIG_FILE: config(), "adapter_model.bin": b"\x80"}))
    with pytest.raises(CheckpointRefused, match=r"adapter_model\.bin is a pickle and is never read"):
        resolve(root)
    write_tar(root, tar_bytes({**files(), "adapter_model.bin": b"\x80"}))
    assert os.listdir(resolve(root).directory).count("adapter_model.bin") == 0


def test_sizes_are_checked_before_anything_is_copied(root: Path) -> None:
    target = write_tar(root, _header(CONFIG_FILE, b"0", 1 << 21))
    os.truncate(target, (1 << 21) + 2048)
    with pytest.raises(CheckpointRefused, match=f"{CONFIG_FILE} has {1 << 21} bytes; the limit is {1 << 20}"):
        resolve(root)
    target = write_tar(root, _header(WEIGHTS_FILE, b"0", 1 << 35, b"\x80" + (1 << 35).to_bytes(11, "big")))
    os.truncate(target, (1 << 35) + 2048)  # sparse
    with pytest.raises(CheckpointRefused, match=f"{WEIGHTS_FILE} has {1 << 35} bytes; the limit is {8 << 30}"):
        resolve(root)


def test_a_tar_larger_than_the_cache_is_unavailable(root: Path) -> None:
    write_tar(root, tar_bytes(files()))
    with pytest.raises(CheckpointUnavailable, match="the checkpoint cache is full"):
        resolve(root, cache_bytes=len(weights()))


def test_a_fifo_named_like_a_tar_is_nothing(root: Path) -> None:
    folder(root).parent.mkdir(parents=True)
    os.mkfifo(f"{folder(root)}.tar")
    with pytest.raises(CheckpointNotFound):
        resolve(root)


@given(position=st.integers(0, 4096), replacement=st.binary(min_size=1, max_size=20), fix=st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_give_members_inside_the_archive_or_a_refusal(
    tmp_path: Path, position: int, replacement: bytes, fix: bool
) -> None:
    content = bytearray(tar_bytes(files(metadata={"owner": "a"}), form=tarfile.PAX_FORMAT))
    content[position : position + len(replacement)] = replacement
    if fix:  # as an attacker would: with the right checksum
        block = position // 512 * 512
        content[block + 148 : block + 156] = b" " * 8
        content[block + 148 : block + 156] = f"{sum(content[block : block + 512]):06o}\0 ".encode()
    (tmp_path / "t").write_bytes(content)
    descriptor = os.open(tmp_path / "t", os.O_RDONLY)
    try:
        for member in known_files(Archive.of(descriptor)).values():
            assert 0 < member.offset <= member.offset + member.size <= len(content)
    except (TarRefused, TarWrong, TarTruncated):
        pass
    finally:
        os.close(descriptor)


def test_a_crash_while_unpacking_leaves_nothing_that_is_used(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    half = cache / "work" / "crashed"
    half.mkdir(parents=True)
    (half / CONFIG_FILE).write_bytes(config())
    damaged = cache / "content" / digest(files())
    damaged.mkdir(parents=True)
    (damaged / CONFIG_FILE).write_bytes(config())
    (damaged / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 0) + weights()[8:])
    write_tar(root, tar_bytes(files()))
    found = resolve(root, cache=cache)
    assert (Path(found.directory) / WEIGHTS_FILE).read_bytes() == weights()
