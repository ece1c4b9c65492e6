"""A real PostgreSQL on a free port of this machine, from the system's packages."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from serve_app.config.deploy import free_port
from tests.support.waiting import eventually

PASSWORD = "not-to-be-shown"
_USER = "roundhouse"
_ACCOUNTS = ("postgres", "nobody")  # PostgreSQL refuses to run as root
_OPTIONS = ("-c", "fsync=off", "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=60")


def postgres_fixture() -> Iterator["Postgres"]:
    """For a module that has its own. Skips where PostgreSQL is not installed."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("needs PostgreSQL's initdb and postgres on the path")
    with _running() as running:
        yield running


@dataclass
class Postgres:
    """A cluster. `stop` and `start` it, to have a database that is away and back."""

    folder: Path
    port: int
    account: Mapping[str, int]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of its first database."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://{_USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def new_database(self, name: str) -> str:
        """The URL of an empty one."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url_of(name)

    def start(self) -> None:
        command = ["postgres", "-D", str(self.folder / "data"), "-p", str(self.port), "-k", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *_OPTIONS], stdout=log, stderr=log, cwd=self.folder, **self.account
            )
        eventually(self._answers, timeout_s=60)

    def stop(self) -> None:
        """At once: its clients lose their connections."""
        if self.process is not None:
            self.process.send_signal(3)  # SIGQUIT, an immediate shutdown
            self.process.wait(30)
            self.process = None

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def _running() -> Iterator[Postgres]:
    # Not below pytest's folders, which only their owner may enter.
    folder = Path(tempfile.mkdtemp(prefix="roundhouse-postgres-"))
    account = _account()
    if account:
        os.chown(folder, account["user"], account["group"])
    running = Postgres(folder, free_port(), account)
    try:
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = ["initdb", "-D", str(folder / "data"), "-U", _USER, "-A", "scram-sha-256", "--no-sync"]
        command += ["--pwfile", str(password), "-E", "UTF8", "--locale", "C"]
        made = subprocess.run(command, capture_output=True, text=True, cwd=folder, **account)
        assert made.returncode == 0, made.stderr
        running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)


def _account() -> Mapping[str, int]:
    """Arguments of `Popen`, for another user than root."""
    if os.getuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = next(names[name] for name in _ACCOUNTS if name in names)
    return {"user": entry.pw_uid, "group": entry.pw_gid}
