"""What `up` has on disk is its own: nobody else reads or replaces it, and no second `up` takes it."""

import fcntl
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigRefused
from serve_app.cli.commands import main
from serve_app.cli.deployment import Cluster
from serve_app.cli.run_folder import RunFolder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "roundhouse" / "8000")


def test_while_it_is_claimed_it_holds_a_token_that_only_its_owner_reads(folder: RunFolder) -> None:
    with folder.claimed():
        assert folder.is_claimed()
        assert stat.S_IMODE(folder.token.stat().st_mode) == 0o600
        first = folder.token.read_text()
    assert not folder.token.exists()
    assert not folder.is_claimed()
    with folder.claimed():
        assert folder.token.read_text() != first


def test_a_second_claim_is_refused_and_harms_nothing(folder: RunFolder) -> None:
    with folder.claimed():
        with pytest.raises(ConfigRefused, match=r"^Your service on port 8000 already runs: stop it, or choose another"):
            folder.claimed().__enter__()
        assert folder.token.exists()


def test_a_folder_that_others_may_enter_is_closed_to_them(folder: RunFolder) -> None:
    folder.path.parent.mkdir(mode=0o777)
    folder.path.parent.chmod(0o777)
    with folder.claimed():
        assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700


def test_a_link_where_the_folder_should_be_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigRefused, match="is not owned by you: remove it, or set TMPDIR to another folder"):
        folder.claimed().__enter__()
    assert os.listdir(tmp_path / "elsewhere") == []


def test_what_a_killed_run_left_is_gone_but_for_its_log(folder: RunFolder) -> None:
    session = folder.path / "session_2031-01-01"
    session.mkdir(parents=True)
    (folder.path / "session_latest").symlink_to(session)
    folder.dashboard.write_text("http://127.0.0.1:1")
    folder.token.write_text("old")
    folder.log.write_text("why")
    with folder.claimed():
        assert {entry.name for entry in folder.path.iterdir()} == {"lock", "auth_token", "serve.log.1"}
        assert (folder.path / "serve.log.1").read_text() == "why"


def test_deploy_goes_to_no_cluster_that_it_was_not_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["deploy", "--config", str(ROOT / "config.yaml"), "--port", "8123"]) == 2
    assert capsys.readouterr().err == (
        "No service that `up` started serves on port 8123. "
        "Name its port with --port, or another cluster's dashboard with --address.\n"
    )


def claimed_by_another(folder: RunFolder, in_it: ExitStack) -> None:
    """What `deploy` would take for a service of this user: a dashboard, a token, and a lock that is held."""
    folder.path.mkdir(parents=True)
    folder.dashboard.write_text("http://127.0.0.1:9")
    folder.token.write_text("another's")
    lock = in_it.enter_context((folder.path / "lock").open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX)


def as_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (as_link, "is not owned by you: remove it, or set TMPDIR to another folder."),
        (
            lambda folder: folder.chmod(0o777),
            "must have mode 700, so that no other user can write files there, got 777.",
        ),
    ],
    ids=["link", "open"],
)
def test_deploy_trusts_no_folder_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], sentence: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = RunFolder.of(8123)
    with ExitStack() as in_it:
        claimed_by_another(folder, in_it)
        folder.path.parent.chmod(0o700)
        assert Cluster.of_service(8123).dashboard == "http://127.0.0.1:9"
        change(folder.path.parent)
        with pytest.raises(ConfigRefused, match=re.escape(f"{folder.path.parent} {sentence}")):
            Cluster.of_service(8123)


def test_a_cluster_that_is_not_there_is_said() -> None:
    command = [sys.executable, "-m", "serve_app", "deploy", "--address", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("http://127.0.0.1:9 does not take the configuration: ")
    assert done.stderr.count("\n") == 1
