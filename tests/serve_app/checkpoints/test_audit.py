"""The line of the log for each checkpoint that is read or downloaded."""

import asyncio
import re
import uuid
from pathlib import Path

import fsspec
import pytest

from serve_app.base.errors import CheckpointIncomplete
from serve_app.checkpoints import Checkpoint, CheckpointStore
from tests.support.files.checkpoint_files import (
    PATH,
    config,
    digest,
    files,
    later,
    opened_store,
    run,
    tar_bytes,
    write,
    write_tar,
)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = (record.getMessage() for record in caplog.records if record.name == "serve_app.checkpoints.audit")
    return [re.sub(r"seconds=[0-9.]+", "seconds=N", message) for message in messages]


async def _many(store: CheckpointStore) -> list[Checkpoint]:
    return await asyncio.gather(*(store.resolve_for(PATH, None, f"key-{i}") for i in range(20)))


@pytest.mark.parametrize("place", ["folder", "tar", "memory"])
def test_a_checkpoint_that_is_read_is_one_line_however_many_ask(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    caplog.set_level("INFO", logger="serve_app.checkpoints.audit")
    where = str(root) if place != "memory" else f"memory://{uuid.uuid4().hex}"
    if place == "folder":
        write(root, files())
    elif place == "tar":
        write_tar(root, tar_bytes(files()))
    else:
        for name, content in files().items():
            key = f"{where}/{PATH.run}/sampler_weights/{PATH.name}/{name}"
            fsspec.filesystem("memory").pipe_file(key, content)
    with opened_store(where, cache=tmp_path / "c", clock=later()) as store:
        for _ in range(3):
            run(lambda: _many(store))
    (line,) = _lines(caplog)
    said = f"path={PATH} digest={digest(files())} from={where} seconds=N result=read"
    assert re.fullmatch(r"checkpoint_read key=key-\d+ " + re.escape(said), line)


def test_what_cannot_be_used_is_a_line_with_the_reason(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="serve_app.checkpoints.audit")
    write(root, {"adapter_config.json": config()})
    with opened_store(root, cache=tmp_path, clock=later()) as store, pytest.raises(CheckpointIncomplete) as error:
        run(lambda: store.resolve_for(PATH, None, "alice"))
    end = f"digest=unknown from={root} seconds=N result=OwnedIncomplete: {error.value}"
    assert _lines(caplog) == [f"checkpoint_read key=alice path={PATH} {end}"]
