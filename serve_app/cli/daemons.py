"""The daemons of Ray that a service cannot lose: without one it serves on, but replaces nothing and does not end."""

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
        """Those below this process; None if they are not all there (yet)."""
        pids = {}
        for pid in descendants():
            name = PurePath(next(iter(command_line(pid)), "")).name
            if name in _NAMES:
                pids[name] = pid
        return Daemons(pids) if pids.keys() == _NAMES.keys() else None

    def lost(self) -> str | None:
        """What has ended, None while all run."""
        return next((_NAMES[name] for name, pid in self.pids.items() if not is_running(pid)), None)
