"""Records on disk that wait for the database: a folder per process, with files of lines that are only appended to.

    <directory>/spool/<writer>/lock             held by the process while it lives
    <directory>/spool/<writer>/00000001.jsonl   a segment; the one with the highest number is being written

The lock is the system's (`flock`), so it ends with its process, however that ends. A folder whose lock is free is
adopted by any process that uses the same directory.
"""

import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from serve_app.base.errors import ConfigRefused

_LOCK: Final = "lock"
_SUFFIX: Final = ".jsonl"
_SEGMENT_BYTES: Final = 4 << 20
_BEING_MADE: Final = "."  # the first letter of folders that are not locked yet
_PRIVATE: Final = 0o700


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that is no longer written to."""

    path: Path
    num_bytes: int

    def lines(self) -> Iterator[bytes]:
        if self.num_bytes == 0:
            return
        with self.path.open("rb") as stream:
            yield from stream


class Folder:
    """A locked folder of segments. `close` or `remove` it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, spools: Path) -> Self:
        """A new one. It gets its name when it is locked, so that nobody adopts it before."""
        writer = uuid.uuid4().hex
        made = spools / f"{_BEING_MADE}{writer}"
        made.mkdir(mode=_PRIVATE)
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(made.rename(spools / writer), lock)

    @classmethod
    def adopt(cls, path: Path) -> Self | None:
        """None if its process lives, or another one adopts it, or it belongs to another user."""
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(path, lock)

    @property
    def writer(self) -> str:
        """The id of the process that wrote it."""
        return self.path.name

    def segments(self) -> list[Segment]:
        """Oldest first, the one that is being written too."""
        found: list[Segment] = []
        for path in sorted(self.path.glob(f"*{_SUFFIX}")):
            with suppress(FileNotFoundError):
                found.append(Segment(path, path.stat().st_size))
        return found

    def close(self) -> None:
        """Let others adopt it."""
        os.close(self._lock)

    def remove(self) -> None:
        """Close it, and delete it with its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def abandoned(spools: Path) -> list[Folder]:
    """The folders of processes that ended, locked now."""
    candidates = [path for path in sorted(spools.iterdir()) if not path.name.startswith(_BEING_MADE)]
    return [folder for path in candidates if (folder := Folder.adopt(path)) is not None]


class Spool:
    """The folder of this process, and the segment that it writes. `append` and `rotate` are thread-safe."""

    def __init__(self, folder: Folder, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._changing = threading.Lock()
        self._number = 0
        self._file: int | None = None
        self._size = 0  # of the segment that is being written
        self._closed: list[Segment] = []
        self.num_bytes = 0  # of all lines that wait

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Raises `ConfigRefused` where the folder cannot be written."""
        spools = directory / "spool"
        try:
            spools.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            return cls(Folder.create(spools))
        except OSError as exc:
            got = f"got {str(directory)!r}: {exc.strerror}"
            raise ConfigRefused(f"ledger.directory must be a folder that can be written, {got}.") from exc

    def append(self, line: bytes) -> None:
        """Write a line, in one call of the system: it outlives this process. Raises `OSError`, for a full disk as an
        example; then nothing of it is left.
        """
        with self._changing:
            if self._file is None or self._size >= self._segment_bytes:
                self._begin()
            assert self._file is not None
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, self._size)
                raise OSError(f"{written} of {len(line)} bytes were written.")
            self._size += written
            self.num_bytes += written

    def rotate(self) -> None:
        """Close the segment that is being written, if it has a line. The next line begins another."""
        with self._changing:
            self._end()

    def closed(self) -> list[Segment]:
        """The segments that are no longer written, oldest first."""
        with self._changing:
            return list(self._closed)

    def remove(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        with self._changing:
            self._closed.remove(segment)
            self.num_bytes -= segment.num_bytes

    def close(self) -> None:
        """Leave the lines to whoever adopts them. Without lines nothing is left."""
        with self._changing:
            self._end()
        if self.num_bytes == 0:
            self.folder.remove()
        else:
            self.folder.close()

    def _path(self, number: int) -> Path:
        return self.folder.path / f"{number:08d}{_SUFFIX}"

    def _begin(self) -> None:
        path = self._path(self._number + 1)
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end()
        self._file, self._number = made, self._number + 1

    def _end(self) -> None:
        if self._file is None:
            return
        os.close(self._file)
        self._closed.append(Segment(self._path(self._number), self._size))
        self._file, self._size = None, 0
