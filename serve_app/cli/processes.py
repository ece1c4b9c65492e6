"""Ends all descendant processes of a command, by their ids, and no other process."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that all can be found (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """In a new child: get SIGINT when the parent dies without ending its child (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def descendants() -> list[int]:
    """Ids of all descendants of this process, nearest first. Zombies do not count."""
    children: dict[int, list[int]] = {}
    for pid, parent, state in _process_table():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def is_running(pid: int) -> bool:
    """False for a zombie too."""
    try:
        return _status(Path("/proc") / str(pid))[1] != "Z"
    except (OSError, ValueError):
        return False


def command_line(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def end_descendants(grace_s: float) -> None:
    """Ask all descendants to end, and kill those that still run after `grace_s`. Returns when none is left."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    # A process whose parent ends while the table is read is missed; the next look finds it, handed to this process.
    looks_without_any = 0
    while looks_without_any < 2:
        alive = descendants()
        looks_without_any = 0 if alive else looks_without_any + 1
        how = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in alive:
            if how == signal.SIGKILL or pid not in asked:
                asked.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
        _reap()
        time.sleep(_POLL_S)
    _reap()


def _reap() -> None:
    """Wait for adopted processes that have ended, so that no zombies remain."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _process_table() -> Iterator[tuple[int, int, str]]:
    """(id, parent's id, state) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                parent, state = _status(entry)
                yield int(entry.name), parent, state


def _status(process: Path) -> tuple[int, str]:
    """(parent's id, state). Raises `OSError` for a process that has ended."""
    # The command, in parentheses, may hold anything, parentheses included.
    state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    return int(parent), state
