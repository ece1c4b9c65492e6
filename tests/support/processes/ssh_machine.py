"""A machine that is reached by ssh: this one, by a sshd on a loopback port, with a home folder of its own."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve_app.config.deploy import free_port
from tests.support.processes.running_up import MARK
from tests.support.waiting import eventually

# ssh's ProxyCommand: Ray has no option for the port.
RELAY = """#!{python}
import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", {port}))
def send():
    while data := os.read(0, 65536):
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := peer.recv(65536):
    os.write(1, data)
"""


@dataclass(frozen=True)
class SshMachine:
    """`mark` is in the environment of everything that is started by ssh."""

    home: Path
    key: Path
    proxy_command: str
    mark: str

    @property
    def user(self) -> str:
        return getpass.getuser()

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Kill what was started, until nothing of it is left."""

        def nothing_is_left() -> bool:
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.processes()

        eventually(nothing_is_left)


@contextmanager
def ssh_machine(folder: Path) -> Iterator[SshMachine]:
    """Skips the test where sshd or rsync is missing."""
    for name, package in {"sshd": "openssh-server", "rsync": "rsync"}.items():
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{name} is not installed: apt-get install {package}")
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_bytes((folder / "key.pub").read_bytes())
    (folder / "home").mkdir()
    port, mark = free_port(), f"{MARK}={os.urandom(8).hex()}"
    relay = folder / "relay"
    relay.write_text(RELAY.format(python=sys.executable, port=port))
    relay.chmod(0o755)
    machine = SshMachine(folder / "home", folder / "key", str(relay), mark)
    with _sshd(folder, port, machine):
        yield machine


@contextmanager
def _sshd(folder: Path, port: int, machine: SshMachine) -> Iterator[None]:
    settings = {
        "ListenAddress": "127.0.0.1",
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "SetEnv": f"HOME={machine.home} {machine.mark}",
    }
    config = folder / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and a boot makes it
    with (
        (folder / "sshd.log").open("w") as log,
        subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stdout=log, stderr=log) as sshd,
    ):
        try:
            eventually(lambda: _listens(port))
            yield
        finally:
            sshd.terminate()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
