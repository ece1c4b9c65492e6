"""The folder of one `up` process while it runs. After its end only the log remains.

It lies in the system's folder for temporary files, below a folder that only this user may enter. Its name is the
service's port. It contains Ray's session too. So other users cannot reach Ray's sockets and files, and `/tmp/ray` stays
unchanged for other clusters.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve_app.base.errors import ConfigRefused

_LOG, _EARLIER_LOG, _LOCK = "serve.log", "serve.log.1", "lock"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`dashboard`: a file that holds the dashboard's address; it exists once Ray and Serve run."""

    path: Path

    @staticmethod
    def of(port: int) -> "RunFolder":
        # Short: below it lie Ray's sockets, and the path of a socket has at most 107 bytes.
        return RunFolder(Path(tempfile.gettempdir()) / f"roundhouse-{os.getuid()}" / str(port))

    @property
    def log(self) -> Path:
        return self.path / _LOG

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def token(self) -> Path:
        return self.path / "auth_token"

    @property
    def dashboard(self) -> Path:
        return self.path / "dashboard"

    @property
    def ray_logs(self) -> Path:
        return self.path / "session_latest" / "logs"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the folder for this process and remove what an earlier run left, except its log. Raises `ConfigRefused`
        when a service runs in it.
        """
        _make_private(self.path.parent)
        self.path.mkdir(exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise ConfigRefused(
                    f"Your service on port {self.path.name} already runs: stop it, or choose another port with --port."
                ) from exc
            self.clear()
            if self.log.exists():
                self.log.replace(self.path / _EARLIER_LOG)
            with open(os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                yield
            finally:
                self.token.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything but the log, after an ordered shutdown."""
        for entry in self.path.iterdir():
            if entry.name not in (_LOG, _EARLIER_LOG, _LOCK):
                _remove(entry)

    def forget_session(self) -> None:
        """Remove Ray's session before Ray starts again."""
        for entry in (self.dashboard, *self.path.glob("session_*")):
            _remove(entry)

    def is_claimed(self) -> bool:
        """Whether a service runs in it. Raises `ConfigRefused` when another user could have written files there."""
        try:
            _require_private(self.path.parent)
            with (self.path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def _make_private(folder: Path) -> None:
    """Raises `ConfigRefused` when another user could write files there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_own(folder)
    folder.chmod(0o700)


def _require_own(folder: Path) -> os.stat_result:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigRefused(f"{folder} is not owned by you: remove it, or set TMPDIR to another folder.")
    return found


def _require_private(folder: Path) -> None:
    mode = stat.S_IMODE(_require_own(folder).st_mode)
    if mode != 0o700:
        raise ConfigRefused(f"{folder} must have mode 700, so that no other user can write files there, got {mode:o}.")


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
