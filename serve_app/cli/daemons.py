"""The Ray daemons that a service depends on. Without one it continues to serve, but cannot replace a replica or shut
down.
"""

from dataclasses import dataclass
from pathlib import PurePath

from serve_app.cli.processes import command_line, descendants, is_running

_NAMES = {"raylet": "raylet", "gcs_server": "control store (gcs_server)"}


@dataclass(frozen=True, slots=True)
class Daemons:
    """Process ids by the executable's name."""

    pids: dict[str, int]

    @staticmethod
    def find() -> "Daemons | None":
        """The daemons among this process's descendants; None unless all of them run."""
        pids: dict[str, int] = {}
        for pid in descendants():
            name = PurePath(next(iter(command_line(pid)), "")).name
            if name in _NAMES:
                # The nearest one. A worker that a daemon starts has the daemon's command line until it executes its
                # own; it ends soon, and the service would end with it.
                pids.setdefault(name, pid)
        return Daemons(pids) if pids.keys() == _NAMES.keys() else None

    def lost(self) -> str | None:
        """The daemon that has ended; None while all run."""
        return next((_NAMES[name] for name, pid in self.pids.items() if not is_running(pid)), None)
