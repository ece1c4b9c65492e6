"""Checkpoints whose time stamps come from a clock that disagrees with ours."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import CheckpointIncomplete, CheckpointRefused
from serve_app.checkpoints import CheckpointStore
from tests.support.files.checkpoint_files import (
    PATH,
    digest,
    files,
    opened_store,
    run,
    tar_bytes,
    weights,
    write,
    write_tar,
)

HOUR_S = 3600.0


class Watch:
    """Our own clock, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.03  # looking at it takes a tick of the file system
        return self.seconds


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture(params=["our clock is behind", "a file's time is set ahead"])
def store(request: pytest.FixtureRequest, root: Path, watch: Watch) -> Iterator[CheckpointStore]:
    behind_s = HOUR_S if request.param == "our clock is behind" else 0.0
    with opened_store(root, cache=root.parent / "c", clock=lambda: time.time() - behind_s, elapsed=watch) as opened:
        yield opened


def _set_ahead(path: Path) -> None:
    os.utime(path, (time.time() + HOUR_S,) * 2)


@pytest.mark.parametrize("tarred", [False, True])
def test_what_comes_from_the_future_is_hashed_twice_at_most(
    root: Path, store: CheckpointStore, watch: Watch, tarred: bool
) -> None:
    _set_ahead(write_tar(root, tar_bytes(files())) if tarred else write(root, files()) / WEIGHTS_FILE)
    for seconds in (0, 3, 6, 9, 12):
        watch.seconds = float(seconds)
        assert run(lambda: store.resolve(PATH)).digest == digest(files())
    assert store.counters.reads == 2


def test_what_is_wrong_and_comes_from_the_future_is_refused_in_the_end(
    root: Path, store: CheckpointStore, watch: Watch
) -> None:
    _set_ahead(write(root, {**files(), CONFIG_FILE: b"{]"}) / CONFIG_FILE)
    with pytest.raises(CheckpointIncomplete):
        run(lambda: store.resolve(PATH))
    watch.seconds = 11.0
    for _ in range(2):
        with pytest.raises(CheckpointRefused):
            run(lambda: store.resolve(PATH))
    assert store.counters.reads == 2


def test_a_replacement_from_the_future_is_served_in_the_next_request(
    root: Path, store: CheckpointStore, watch: Watch
) -> None:
    for fill in range(1, 6):
        _set_ahead(write(root, files(fill)) / WEIGHTS_FILE)
        for seconds in (0.0, 3.0, 3.0):
            watch.seconds += seconds
            assert run(lambda: store.resolve(PATH)).digest == digest(files(fill))


@given(
    skew_s=st.floats(-1e9, 1e9),
    fills=st.lists(st.tuples(st.integers(1, 3), st.floats(0.0, 5.0)), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_clocks_say_the_content_of_now_is_served(
    root: Path, skew_s: float, fills: list[tuple[int, float]]
) -> None:
    watch = Watch()
    target = write(root, files())
    with opened_store(root, cache=root / "c", clock=lambda: time.time() + skew_s, elapsed=watch) as store:
        for fill, seconds in fills:
            (target / "new").write_bytes(weights(fill))
            os.replace(target / "new", target / WEIGHTS_FILE)
            for _ in range(3):
                watch.seconds += seconds
                assert run(lambda: store.resolve(PATH)).digest == digest(files(fill))
