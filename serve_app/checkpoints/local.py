"""A root on this machine's file system, NFS included.

Looked at anew at every request: by opening the files, because that is what makes an NFS client ask its server. What was
read is remembered by the files' identity, size and time stamps, once these are too old for a later write to leave them
as they are. Over NFS, mount with `lookupcache=positive`, or a new checkpoint stays unseen for as long as the client
keeps the old state of the folder.

A run that replaces a checkpoint should write beside it and rename the folder, or list the files' SHA-256 in
checkpoint.json: nothing else tells the new configuration beside the old weights from a checkpoint.
"""

import asyncio
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from engines.errors import afresh
from serve_app.checkpoints.archive import unpack_into
from serve_app.checkpoints.checkpoint import Checkpoint
from serve_app.checkpoints.content import Fingerprint, Reader, fingerprint, open_folder
from serve_app.checkpoints.disk_cache import DiskCache
from serve_app.checkpoints.report import OwnedIncomplete, OwnedRefused, Report
from serve_app.checkpoints.root_folder import open_below
from serve_app.model_id import CheckpointPath
from serve_app.single_flight import SingleFlight

FOLDER: Final = "sampler_weights"
YOUNG_S: Final = 10.0
# The coarsest time stamps of file systems in use. Files younger than that can change without a trace.
_STAMP_S: Final = 2.0
# Time stamps are those of the kernel's last tick: a write within this time may leave the one there is.
_TICK_S: Final = 0.02
_ATTEMPTS: Final = 4
_REMEMBERED: Final = 4096
_REMEMBERED_CHARACTERS: Final = 1 << 25

LookupResult = Checkpoint | OwnedRefused


@dataclass(frozen=True, slots=True)
class _Seen:
    """What lies at a path now: `changed_at` in seconds since 1970, `is_tar` and its state."""

    state: Fingerprint
    changed_at: float
    is_tar: bool


class _Memory:
    """The last outcomes by path, for as long as nothing changed. Bounded in number and in characters of templates.
    Used from several threads.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._outcomes: OrderedDict[CheckpointPath, tuple[Fingerprint, LookupResult]] = OrderedDict()
        self._characters = 0

    def get(self, path: CheckpointPath, state: Fingerprint) -> LookupResult | None:
        with self._mutex:
            known = self._outcomes.get(path)
            if known is None or known[0] != state:
                return None
            self._outcomes.move_to_end(path)
            return known[1]

    def put(self, path: CheckpointPath, state: Fingerprint, outcome: LookupResult) -> None:
        with self._mutex:
            if path in self._outcomes:
                self._characters -= _characters(self._outcomes.pop(path)[1])
            self._outcomes[path] = (state, outcome)
            self._characters += _characters(outcome)
            while len(self._outcomes) > _REMEMBERED or self._characters > _REMEMBERED_CHARACTERS:
                self._characters -= _characters(self._outcomes.popitem(last=False)[1][1])


def _characters(outcome: LookupResult) -> int:
    return len(outcome.chat_template or "") if isinstance(outcome, Checkpoint) else 0


class LocalRoot:
    """One folder. `looks` runs what takes microseconds, `reads` what takes as long as reading a checkpoint."""

    def __init__(
        self,
        root: str,
        cache: DiskCache,
        *,
        looks: Executor,
        reads: Executor,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = os.path.abspath(root)
        self.num_reads = 0
        self._cache = cache
        self._looks = looks
        self._reading = SingleFlight[tuple[CheckpointPath, Fingerprint], Checkpoint | None](reads)
        self._max_bytes = max_bytes
        self._clock = clock
        self._memory = _Memory()

    async def find(self, path: CheckpointPath) -> Checkpoint | None:
        """The content that the path has now; None when there is nothing.

        Raises `OwnedIncomplete`, `OwnedRefused`, `LeavesRoot`, `CacheFull` or `OSError`.
        """
        seen = await asyncio.get_running_loop().run_in_executor(self._looks, self._look, path)
        if not isinstance(seen, _Seen):
            return _settled(seen)
        return await self._reading.run((path, seen.state), lambda: self._read(path))

    def _look(self, path: CheckpointPath) -> _Seen | LookupResult | None:
        """What is remembered of the path, or else its state."""
        with open_folder(self.root, _parts(path)) as folder:
            seen = None if folder is None else _Seen(folder.fingerprint, folder.changed_at, is_tar=False)
        if seen is None:
            seen = self._look_for_tar(path)
        if seen is None:
            return None
        known = self._memory.get(path, seen.state)
        if isinstance(known, Checkpoint) and seen.is_tar and self._cache.use(known.digest) is None:
            return seen
        return known or seen

    def _look_for_tar(self, path: CheckpointPath) -> _Seen | None:
        with open_below(self.root, _parts(path, ".tar")) as found:
            if found is None:
                return None
            status = os.fstat(found[0])
            if not stat.S_ISREG(status.st_mode):
                return None
            return _Seen((*found[1], fingerprint(status)), max(status.st_mtime, status.st_ctime), is_tar=True)

    def _read(self, path: CheckpointPath) -> Checkpoint | None:
        report = Report(str(path))
        for _ in range(_ATTEMPTS):
            seen = self._look(path)
            if not isinstance(seen, _Seen):
                return _settled(seen)
            now = self._clock()
            if 0 <= now - seen.changed_at < _TICK_S:
                time.sleep(_TICK_S - (now - seen.changed_at))
                continue
            outcome = self._outcome(path, seen, report, is_young=now - seen.changed_at < YOUNG_S)
            after = self._look(path)
            if outcome is not None and isinstance(after, _Seen) and after.state == seen.state:
                if now - seen.changed_at >= _STAMP_S and not isinstance(outcome, OwnedIncomplete):
                    self._memory.put(path, seen.state, outcome)
                return _settled(outcome)
        raise report.incomplete("it is being written.")

    def _outcome(
        self, path: CheckpointPath, seen: _Seen, report: Report, *, is_young: bool
    ) -> LookupResult | OwnedIncomplete | None:
        """None when what was seen is not there any more."""
        self.num_reads += 1
        try:
            if seen.is_tar:
                return self._read_tar(path, report, is_young=is_young)
            with open_folder(self.root, _parts(path)) as folder:
                if folder is None or folder.fingerprint != seen.state:
                    return None
                content = Reader(folder, report, self._max_bytes, is_young).read()
                return Checkpoint.of(path, content, folder.path)
        except (OwnedIncomplete, OwnedRefused) as exc:
            return afresh(exc)

    def _read_tar(self, path: CheckpointPath, report: Report, *, is_young: bool) -> Checkpoint | None:
        with open_below(self.root, _parts(path, ".tar")) as found:
            if found is None:
                return None
            content, directory = unpack_into(
                self._cache, found[0], report, max_bytes=self._max_bytes, is_young=is_young
            )
        return Checkpoint.of(path, content, directory)


def _parts(path: CheckpointPath, suffix: str = "") -> tuple[str, ...]:
    return path.run, FOLDER, path.name + suffix


def _settled(outcome: LookupResult | OwnedIncomplete | None) -> Checkpoint | None:
    if isinstance(outcome, Exception):
        raise afresh(outcome)
    return outcome
