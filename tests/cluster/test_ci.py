"""`.ci/run` runs the README's commands, with what can be kept between runs outside the clone."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.readme_blocks import ROOT

FAKE_MAKE = f"""#!/bin/bash
if [[ "$*" == "--silent print-python" ]]; then echo {sys.executable}; exit; fi
echo "$*" >> calls
[[ "$1" != "$FAILING" ]]
"""


class Clone:
    """A clone with a `make` that writes down what it is called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.keep = folder / "keep"
        for name in (".ci/run", "pyproject.toml", "constraints.txt", "cluster/prepare_demo.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        (folder / "bin").mkdir()
        (folder / "bin" / "make").write_text(FAKE_MAKE)
        (folder / "bin" / "make").chmod(0o755)
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"

    def run(self, **environment: str) -> tuple[int, list[str]]:
        """The exit status of `.ci/run`, and the targets and variables that it made."""
        (self.folder / "calls").write_text("")
        defaults = {"PATH": self.path, "XDG_CACHE_HOME": str(self.keep), "FAILING": "nothing"}
        command = [self.folder / ".ci" / "run"]
        done = subprocess.run(command, env=defaults | environment, capture_output=True, text=True, timeout=60)
        return done.returncode, (self.folder / "calls").read_text().splitlines()

    @property
    def kept(self) -> Path:
        (folder,) = self.keep.glob("roundhouse-ci-*")
        return folder


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


INSIDE = ["test VENV=.venv", "test-slow VENV=.venv"]


def test_it_makes_test_and_test_slow_in_an_environment_outside_the_clone(clone: Clone) -> None:
    status, calls = clone.run()
    assert (status, calls) == (0, [f"test VENV={clone.kept}/venv", f"test-slow VENV={clone.kept}/venv"])
    assert (clone.folder / ".cache" / "models").resolve() == clone.kept / "models"


def test_other_pins_are_kept_elsewhere(clone: Clone) -> None:
    clone.run()
    with (clone.folder / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    clone.run()
    assert len(list(clone.keep.glob("roundhouse-ci-*"))) == 2


@pytest.mark.parametrize("place", ["/dev/null", "/proc/version"])
def test_where_nothing_can_be_kept_it_works_inside_the_clone(clone: Clone, place: str) -> None:
    assert clone.run(XDG_CACHE_HOME=place) == (0, INSIDE)


def test_without_a_home_it_works_inside_the_clone(clone: Clone) -> None:
    assert clone.run(XDG_CACHE_HOME="", HOME="/dev/null") == (0, INSIDE)


def test_what_another_run_is_using_is_left_alone(clone: Clone) -> None:
    clone.run()
    with (clone.kept / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clone.run() == (0, INSIDE)


def test_an_environment_that_does_not_work_any_more_is_removed(clone: Clone) -> None:
    clone.run()
    (clone.kept / "venv" / "bin").mkdir(parents=True)
    (clone.kept / "venv" / "bin" / "python").symlink_to("/gone")
    status, _ = clone.run()
    assert status == 0
    assert not (clone.kept / "venv").exists()


@pytest.mark.parametrize(("failing", "made"), [("test", 1), ("test-slow", 2)])
def test_a_failure_of_either_fails_the_run(clone: Clone, failing: str, made: int) -> None:
    status, calls = clone.run(FAILING=failing)
    assert (status, len(calls)) == (1, made)
