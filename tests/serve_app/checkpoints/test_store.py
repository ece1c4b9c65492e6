"""Checkpoints in a local folder: found when they are complete, refused by the name of what is wrong."""

import hashlib
import json
import os
import pickle
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointRefused,
    ModelNotFound,
    to_http,
)
from tests.support.files.checkpoint_files import (
    BASE,
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

_NOT_FOUND = f"The model {str(PATH)!r} does not exist, or this key may not use it."


def test_a_checkpoint_is_its_content_and_where_it_lies(root: Path) -> None:
    contents = files(metadata={"owner": "alice", "public": True, "expires_at": "2131-01-01T02:00:00+02:00"})
    target = write(root, {**contents, "chat_template.jinja": "{{ 'é' }}".encode()})
    found = resolve(root)
    assert found.adapter == Adapter(digest(contents), str(target))
    assert (found.path, found.base_model, found.owner, found.public) == (PATH, BASE, "alice", True)
    assert found.expires_at == datetime(2131, 1, 1, tzinfo=UTC)
    assert found.chat_template == "{{ 'é' }}"


@pytest.mark.parametrize(
    ("about", "base", "expected"),
    [
        ({"base_model": "b"}, "a", "b"),
        ({}, "a", "a"),
        (None, "a", "a"),
        ({"base_model": None}, None, None),
        (None, "", None),
        (None, 7, None),
    ],
)
def test_the_base_is_that_of_checkpoint_json_or_else_the_configuration_s(
    root: Path, about: dict[str, object] | None, base: object, expected: str | None
) -> None:
    write(root, {**files(metadata=about), CONFIG_FILE: config(base_model_name_or_path=base)})
    assert resolve(root).base_model == expected


def test_what_is_missing_or_expired_is_denied_in_the_words_for_what_is_not_the_caller_s(root: Path) -> None:
    with pytest.raises(CheckpointNotFound) as missing:
        resolve(root)
    write(root, files(metadata={"expires_at": (datetime.now(UTC) - timedelta(seconds=1)).timestamp()}))
    with pytest.raises(CheckpointNotFound) as expired:
        resolve(root)
    of_another = ModelNotFound(_NOT_FOUND, "model")
    assert to_http(missing.value) == to_http(expired.value) == to_http(of_another)


HIDDEN = {
    "whole": files(),
    "refused": {**files(), "adapter_model.bin": b"", WEIGHTS_FILE: None},
    "incomplete": {**files(), WEIGHTS_FILE: weights()[:-1]},
    "not begun": {CONFIG_FILE: None, WEIGHTS_FILE: None},
}


@pytest.mark.parametrize("tarred", [False, True])
@pytest.mark.parametrize("case", HIDDEN)
def test_what_is_private_is_not_found_by_others_whatever_is_wrong_with_it(root: Path, case: str, tarred: bool) -> None:
    contents = {**files(metadata={"owner": "alice"}), **HIDDEN[case]}
    there = {name: content for name, content in contents.items() if content is not None}
    write_tar(root, tar_bytes(there)) if tarred else write(root, there)
    with opened_store(root, cache=root.parent / "c", clock=later()) as store:
        for caller in (None, "robin"):
            with pytest.raises(CheckpointNotFound, match="does not exist, or this key may not use it"):
                run(lambda caller=caller: store.resolve_for(PATH, caller))
        if case == "whole":
            assert run(lambda: store.resolve_for(PATH, "alice")).owner == "alice"
        else:
            with pytest.raises((CheckpointRefused, CheckpointIncomplete)) as own:
                run(lambda: store.resolve_for(PATH, "alice"))
            assert to_http(pickle.loads(pickle.dumps(own.value))) == to_http(own.value)


UNREADABLE = {
    "cut": b'{"owner": "ali',
    "not JSON": b"alice",
    "not an object": b'["alice"]',
    "a field": b'{"owner": "alice", "expires_at": "secret-project"}',
    "the owner": b'{"owner": {"secret-project": "alice"}}',
    "too long": b" " * (1 << 20) + b"{}",
}


@pytest.mark.parametrize("place", ["folder", "tar", "memory"])
@pytest.mark.parametrize("is_young", [True, False])
@pytest.mark.parametrize("case", UNREADABLE)
def test_what_says_whose_it_is_in_words_that_cannot_be_read_is_not_found_and_the_log_says_why(
    root: Path, case: str, is_young: bool, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    contents = {"checkpoint.json": UNREADABLE[case], **files()}
    where = str(root) if place != "memory" else f"memory://{uuid.uuid4().hex}"
    if place == "folder":
        write(root, contents)
    elif place == "tar":
        write_tar(root, tar_bytes(contents))
    else:
        for name, content in contents.items():
            key = f"{where}/{PATH.run}/sampler_weights/{PATH.name}/{name}"
            fsspec.filesystem("memory").pipe_file(key, content)
    with opened_store(where, cache=root.parent / "c", clock=later(0 if is_young else 60)) as store:
        for caller in (None, "robin", "alice"):
            with pytest.raises(CheckpointNotFound) as hidden:
                run(lambda caller=caller: store.resolve_for(PATH, caller))
            assert to_http(hidden.value) == to_http(CheckpointNotFound(_NOT_FOUND))
        assert store.counters.unreadable == 3
        with pytest.raises((CheckpointIncomplete, CheckpointRefused), match=r"checkpoint\.json"):
            run(lambda: store.resolve(PATH))  # as `checkpoints check` does
    reasons = [record.getMessage() for record in caplog.records if "nobody may use it" in record.message]
    assert len(reasons) == 1
    assert "checkpoint.json" in reasons[0]


DAMAGED = {
    "a climbing member": (tar_bytes({"../x": b""}), CheckpointRefused),
    "noise": (b"\x01" * 2048, CheckpointRefused),
    "cut": (b"", CheckpointIncomplete),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_tar_is_shown_to_its_owner_only(root: Path, case: str) -> None:
    rest, error = DAMAGED[case]
    members = tar_bytes(files(metadata={"owner": "alice"})).rstrip(b"\0")
    write_tar(root, members + bytes(-len(members) % 512) + rest)
    with opened_store(root, cache=root.parent / "c", clock=later()) as store:
        with pytest.raises(CheckpointNotFound):
            run(lambda: store.resolve_for(PATH, "robin"))
        with pytest.raises(error):
            run(lambda: store.resolve_for(PATH, "alice"))


def test_a_damaged_tar_that_does_not_say_whose_it_is_is_shown_to_nobody(root: Path) -> None:
    write_tar(root, b"\x01" * 4096)
    with opened_store(root, cache=root.parent / "c", clock=later()) as store, pytest.raises(CheckpointNotFound):
        run(lambda: store.resolve_for(PATH, None))


@pytest.mark.parametrize("metadata", [None, {"owner": "alice", "public": True}, {"public": False}])
def test_what_is_public_or_nobody_s_is_for_everybody(root: Path, metadata: dict[str, object] | None) -> None:
    write(root, files(metadata=metadata))
    with opened_store(root, cache=root / "c") as store:
        assert run(lambda: store.resolve_for(PATH, None)).digest == digest(files())


def test_a_checkpoint_expires_while_it_is_remembered(root: Path) -> None:
    write(root, files(metadata={"expires_at": (datetime.now(UTC) + timedelta(seconds=100)).timestamp()}))
    seconds = [50.0]
    with opened_store(root, cache=root / "c", clock=lambda: later(seconds[0])()) as store:
        assert run(lambda: store.resolve(PATH)).digest
        seconds[0] = 101.0
        with pytest.raises(CheckpointNotFound):
            run(lambda: store.resolve(PATH))


@pytest.mark.parametrize("names", [(CONFIG_FILE,), (WEIGHTS_FILE,), ("checkpoint.json",), ()])
def test_a_missing_file_is_incomplete(root: Path, names: tuple[str, ...]) -> None:
    write(root, {name: content for name, content in files(metadata={}).items() if name in names})
    with pytest.raises(CheckpointIncomplete, match=r"adapter_(config\.json|model\.safetensors) is not there\."):
        resolve(root, clock=later())


def test_the_next_request_after_the_last_byte_finds_it(root: Path) -> None:
    contents = files()
    with opened_store(root, cache=root / "c") as store:
        for name, content in contents.items():
            with pytest.raises((CheckpointIncomplete, CheckpointNotFound)):
                run(lambda: store.resolve(PATH))
            write(root, {name: content[:-1]})
            with pytest.raises(CheckpointIncomplete):
                run(lambda: store.resolve(PATH))
            write(root, {name: content})
        assert run(lambda: store.resolve(PATH)).digest == digest(contents)


_METADATA = {"owner": "alice", "base_model": "b"}


@given(order=st.permutations([CONFIG_FILE, WEIGHTS_FILE]), cut=st.integers(0, 10_000), marked=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_half_written_prefix_is_a_checkpoint(root: Path, order: list[str], cut: int, marked: bool) -> None:
    """`checkpoint.json` first, as its documentation asks for; then the two files in any order, cut at any byte."""
    contents = files(metadata=_METADATA)
    if marked:
        hashes = {name: hashlib.sha256(contents[name]).hexdigest() for name in order}
        contents["checkpoint.json"] = json.dumps({**_METADATA, "sha256": hashes}).encode()
    stream = [(name, contents[name]) for name in ("checkpoint.json", *order)]
    cut %= sum(len(content) for _, content in stream)
    for file in folder(root).glob("*"):
        file.unlink()
    for name, content in stream:
        if cut <= 0:
            break
        write(root, {name: content[:cut]})
        cut -= len(content)
    try:
        found = resolve(root)
    except (CheckpointIncomplete, CheckpointNotFound):
        return
    # All but the line break that ends the configuration: the same configuration.
    assert not marked
    assert order[-1] == CONFIG_FILE
    assert found.digest == digest({**contents, CONFIG_FILE: contents[CONFIG_FILE].rstrip()})
    assert (found.owner, found.base_model) == ("alice", "b")


@pytest.mark.parametrize("extra", [-1, 1, 1000])
def test_weights_of_another_length_than_their_header_says_are_incomplete(root: Path, extra: int) -> None:
    target = write(root, files())
    os.truncate(target / WEIGHTS_FILE, len(weights()) + extra)
    with pytest.raises(CheckpointIncomplete, match=rf"has {len(weights()) + extra} bytes, and its header describes"):
        resolve(root, clock=later())


def test_with_a_marker_what_is_short_stays_short(root: Path) -> None:
    write(root, {**files(), WEIGHTS_FILE: weights()[:-1], "checkpoint_complete": b""})
    with pytest.raises(CheckpointRefused, match="its header describes"):
        resolve(root)
    write(root, {WEIGHTS_FILE: weights()})
    assert resolve(root).digest == digest(files())


def test_a_header_longer_than_the_first_read_is_read_whole(root: Path) -> None:
    entries = {f"t{i:05}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(2000)}
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(2000)
    write(root, {**files(), WEIGHTS_FILE: content})
    assert resolve(root).digest == digest({**files(), WEIGHTS_FILE: content})
    write(root, {WEIGHTS_FILE: content[: len(header)]})
    with pytest.raises(CheckpointIncomplete, match=f"and its header alone {len(header) + 8}"):
        resolve(root)


WRONG = {
    "no JSON": ({CONFIG_FILE: b"{]"}, r"adapter_config\.json is not JSON"),
    "no object": ({CONFIG_FILE: b"[]"}, r"adapter_config\.json is not a JSON object"),
    "no UTF-8": ({CONFIG_FILE: b'"\xff"'}, r"adapter_config\.json is not JSON"),
    "nested": ({CONFIG_FILE: b"[" * 100_000}, r"adapter_config\.json is not JSON"),
    "no header": ({WEIGHTS_FILE: bytes(5000)}, r"adapter_model\.safetensors: its header is not a JSON object"),
    "huge header": ({WEIGHTS_FILE: b"\xff" * 5000}, "its header must have at most"),
    "about": ({"checkpoint.json": b"{"}, r"checkpoint\.json is not JSON"),
    "hash": (
        {"checkpoint.json": json.dumps({"sha256": {CONFIG_FILE: "0" * 64}}).encode()},
        r"the SHA-256 of adapter_c",
    ),
    "template": ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja is not UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_looks_wrong_is_incomplete_while_it_is_young_and_refused_later(root: Path, case: str) -> None:
    changes, message = WRONG[case]
    write(root, {**files(), **changes})
    with pytest.raises(CheckpointIncomplete, match=message):
        resolve(root)
    with pytest.raises(CheckpointRefused, match=f"{PATH} cannot be served: .*{message}"):
        resolve(root, clock=later())


ABOUT = {
    "owner": ({"owner": 3}, "owner must be a string of 1 to 1024 characters, not 3"),
    "no owner": ({"owner": ""}, "owner must be a string of 1 to 1024 characters, not ''"),
    "base": ({"base_model": ["x"]}, r"base_model must be a string of 1 to 1024 characters, not \['x'\]"),
    "public": ({"public": "yes"}, "public must be true or false, not 'yes'"),
    "date": ({"expires_at": "tomorrow"}, "expires_at must be a date with a time zone .* not 'tomorrow'"),
    "naive date": ({"expires_at": "2031-01-01T00:00:00"}, "expires_at must be a date with a time zone"),
    "endless": ({"expires_at": float("inf")}, "expires_at must be a date with a time zone"),
    "true": ({"expires_at": True}, "expires_at must be a date with a time zone"),
    "far": ({"expires_at": 1e300}, "expires_at must be a date with a time zone"),
    "hashes": ({"sha256": "x"}, "sha256 must be an object, not 'x'"),
    "hash": ({"sha256": {WEIGHTS_FILE: "x"}}, r"sha256\['adapter_model\.safetensors'\] must be 64 hex digits, not 'x'"),
}


@pytest.mark.parametrize("case", ABOUT)
def test_a_field_of_checkpoint_json_that_cannot_be_understood_is_refused(root: Path, case: str) -> None:
    fields, message = ABOUT[case]
    write(root, files(metadata=fields))
    with pytest.raises(CheckpointRefused, match=rf"checkpoint\.json: {message}"):
        resolve(root)


@pytest.mark.parametrize("is_tar", [False, True])
def test_hashes_of_files_that_are_never_read_are_not_compared(root: Path, is_tar: bool) -> None:
    contents = {**files(), "adapter_model.bin": b"\x80" * (9 << 20), "checkpoint_complete": b"done"}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    hashes |= {"checkpoint_complete": "0" * 64}
    contents = {"checkpoint.json": json.dumps({"sha256": hashes}).encode(), **contents}
    if is_tar:
        write_tar(root, tar_bytes(contents))
    else:
        write(root, contents)
    assert resolve(root).digest == digest(contents)


def test_hashes_that_are_right_pass_in_either_case(root: Path) -> None:
    contents = {**files(), "chat_template.jinja": b"x"}
    hashes = {name: hashlib.sha256(content).hexdigest().upper() for name, content in contents.items()}
    write(root, {**contents, "checkpoint.json": json.dumps({"sha256": {**hashes, "other": "0" * 64}}).encode()})
    assert resolve(root, clock=later()).digest == digest(contents)


def test_a_file_that_is_listed_and_not_there_is_incomplete(root: Path) -> None:
    write(root, files(metadata={"sha256": {"chat_template.jinja": "0" * 64}}))
    with pytest.raises(CheckpointIncomplete, match=r"chat_template\.jinja is not there, and checkpoint\.json lists it"):
        resolve(root, clock=later())


def test_a_pickle_alone_is_refused_by_name(root: Path) -> None:
    write(root, {CONFIG_FILE: config(), "adapter_model.bin": b"\x80"})
    with pytest.raises(CheckpointRefused, match=r"adapter_model\.bin is a pickle and is never read"):
        resolve(root)
    write(root, {WEIGHTS_FILE: weights()})
    assert resolve(root).digest == digest(files())


def test_weights_over_the_limit_are_refused_unread(root: Path) -> None:
    target = write(root, files())
    os.truncate(target / WEIGHTS_FILE, 1 << 40)
    with pytest.raises(CheckpointRefused, match=f"{WEIGHTS_FILE} has {1 << 40} bytes; the limit is 5000"):
        resolve(root, max_bytes=5000)


@pytest.mark.parametrize(
    ("name", "limit"), [(CONFIG_FILE, 1 << 20), ("checkpoint.json", 1 << 20), ("chat_template.jinja", 1 << 17)]
)
def test_long_texts_are_refused(root: Path, name: str, limit: int) -> None:
    target = write(root, {**files(), name: b" "})
    os.truncate(target / name, limit + 1)
    with pytest.raises(CheckpointRefused, match=rf"{name} has {limit + 1} bytes; the limit is {limit}"):
        resolve(root)


def test_the_size_of_what_is_never_read_does_not_matter(root: Path) -> None:
    target = write(root, {**files(), "adapter_model.bin": b"", "checkpoint_complete": b""})
    for name in ("adapter_model.bin", "checkpoint_complete"):
        os.truncate(target / name, 1 << 40)
    assert resolve(root).digest == digest(files())


def test_the_directory_of_a_relative_root_is_absolute(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(root, files())
    monkeypatch.chdir(root.parent)
    assert resolve("root", cache=root.parent / "c").directory == str(target)
