"""Processes that are killed at random points of downloads: no bad entry is ever used, and nothing is left for good."""

import multiprocessing
import os
import random
from multiprocessing.synchronize import Event as EventType
from pathlib import Path

import pytest

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from serve_app.base.model_id import CheckpointPath
from tests.support.files.checkpoint_files import config, digest, opened_store, run, tar_bytes, weights, write, write_tar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_BYTES = 3 << 20
_CHECKPOINTS = 6
_ROUNDS = 40
_BUDGET = 4 * (_BYTES + (1 << 16))  # so that entries are removed, too; a tar file needs two places


def _path(number: int) -> CheckpointPath:
    return CheckpointPath("r", str(number))


def _contents(number: int) -> dict[str, bytes]:
    return {CONFIG_FILE: config(), WEIGHTS_FILE: weights(number, _BYTES)}


def _download(url: str, cache: str, started: EventType) -> None:
    """Resolve in a loop until the process is killed; what was removed is downloaded again."""
    with opened_store(url, cache=Path(cache), cache_bytes=_BUDGET) as store:
        while True:
            for number in range(_CHECKPOINTS):
                started.set()
                run(lambda number=number: store.resolve(_path(number)))


def _check_entries(cache: Path) -> None:
    for entry in (cache / "content").iterdir():
        found = adapter_digest((entry / CONFIG_FILE).read_bytes(), (entry / WEIGHTS_FILE).read_bytes())
        assert found == entry.name


def test_no_crash_leaves_an_entry_that_is_not_whole_and_nothing_grows(tmp_path: Path) -> None:
    for number in range(_CHECKPOINTS):
        if number % 2:
            write(tmp_path / "root", _contents(number), _path(number))
        else:
            write_tar(tmp_path / "root", tar_bytes(_contents(number)), _path(number))
    url, cache, chance = f"local://{tmp_path / 'root'}", tmp_path / "c", random.Random(7)
    context = multiprocessing.get_context("fork")
    interrupted = 0
    for _ in range(_ROUNDS):
        started = context.Event()
        process = context.Process(target=_download, args=(url, str(cache), started))
        process.start()
        assert started.wait(60)
        process.join(chance.uniform(0.0, 0.25))
        process.kill()
        process.join()
        _check_entries(cache)
        interrupted += bool(os.listdir(cache / "work"))
        with opened_store(url, cache=cache, cache_bytes=_BUDGET) as store:
            for number in chance.sample(range(_CHECKPOINTS), 3):
                found = run(lambda number=number: store.resolve(_path(number)))
                assert found.digest == digest(_contents(number))
        assert os.listdir(cache / "work") == []
        assert len(os.listdir(cache / "pins")) <= _CHECKPOINTS
        assert sum(file.stat().st_size for file in cache.rglob("*")) <= _BUDGET + (1 << 20)
    assert interrupted > _ROUNDS / 10
