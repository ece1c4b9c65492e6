"""A root on this machine's file system, NFS included.

Every request opens the files again, because only opening makes an NFS client ask its server. Results are cached by the
files' identity, size and time stamps, once these are old enough that any later write must change them. Time stamps may
come from a clock that is ahead of ours, so what counts is also for how long this process has seen the same files. Over
NFS, mount with `lookupcache=positive`. Otherwise a new checkpoint stays invisible for as long as the client caches the
folder.

A run that replaces a checkpoint should write a new folder and rename it, or list the files' SHA-256 in checkpoint.json.
Otherwise a new configuration with old weights looks like a complete checkpoint.
"""

import asyncio
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from engines.interface.errors import afresh
from serve_app.base.model_id import CheckpointPath
from serve_app.base.single_flight import SingleFlight
from serve_app.checkpoints.archive import unpack_into
from serve_app.checkpoints.audit import audited
from serve_app.checkpoints.checkpoint import Checkpoint
from serve_app.checkpoints.content import Fingerprint, Reader, fingerprint, open_folder
from serve_app.checkpoints.disk_cache import DiskCache
from serve_app.checkpoints.notes import read, written
from serve_app.checkpoints.report import OwnedIncomplete, OwnedRefused, Report
from serve_app.checkpoints.root_folder import open_below
from serve_app.checkpoints.root_threads import RootThreads

FOLDER: Final = "sampler_weights"
YOUNG_S: Final = 10.0
# The coarsest time stamps of file systems in use. Files younger than that can change without a trace.
_STAMP_S: Final = 2.0
# The kernel takes time stamps from its last tick: a write within this time may not change the stamp.
_TICK_S: Final = 0.02
# How far the clocks of two machines may be apart and count as equal. What seems older than that is old.
_CLOCKS_S: Final = 30.0
_ATTEMPTS: Final = 4
_REMEMBERED: Final = 4096
_REMEMBERED_CHARACTERS: Final = 1 << 25
_SIGHTINGS: Final = 1 << 16

LookupResult = Checkpoint | OwnedRefused


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of a path now: the files' state, `changed_at` in seconds since 1970, `is_tar`, and the outcome for this
    state if it is cached.
    """

    state: Fingerprint
    changed_at: float
    is_tar: bool
    known: LookupResult | None = None


class _Memory:
    """A cache of the last outcomes by path, valid while the files are unchanged. Bounded in number and in characters of
    templates. Thread-safe.
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
            self._trim()

    def forget(self, digest: str) -> None:
        """Drop the outcomes with this content."""
        with self._mutex:
            for path, (_, outcome) in list(self._outcomes.items()):
                if isinstance(outcome, Checkpoint) and outcome.digest == digest:
                    self._characters -= _characters(self._outcomes.pop(path)[1])

    def _trim(self) -> None:
        while len(self._outcomes) > _REMEMBERED or self._characters > _REMEMBERED_CHARACTERS:
            self._characters -= _characters(self._outcomes.popitem(last=False)[1][1])


def _characters(outcome: LookupResult) -> int:
    return len(outcome.chat_template or "") if isinstance(outcome, Checkpoint) else 0


class _Sightings:
    """Since when the files at a path are as they are, by our own clock. Bounded. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._first: OrderedDict[CheckpointPath, tuple[int, float]] = OrderedDict()

    def since(self, path: CheckpointPath, state: Fingerprint, now: float) -> float:
        """When this state was seen first; `now` if that is now."""
        with self._mutex:
            known = self._first.get(path)
            if known is None or known[0] != hash(state):
                known = self._first[path] = (hash(state), now)
            self._first.move_to_end(path)
            if len(self._first) > _SIGHTINGS:
                self._first.popitem(last=False)
            return known[1]

    def forget(self, path: CheckpointPath) -> None:
        """The path does not exist."""
        with self._mutex:
            self._first.pop(path, None)

    def __contains__(self, path: CheckpointPath) -> bool:
        with self._mutex:
            return path in self._first


@dataclass(frozen=True, slots=True)
class _Age:
    """How old the state of files is: by their time stamps and our clock, which may disagree, and how long we have seen
    it. In seconds.
    """

    told: float
    seen: float

    @property
    def still_ticks(self) -> bool:
        """Whether a write may come with the same time stamp."""
        return max(self.told, self.seen) < _TICK_S

    @property
    def is_young(self) -> bool:
        return max(self.told, self.seen) < YOUNG_S

    @property
    def is_settled(self) -> bool:
        """Whether any later write must change the state, whatever the clock of the time stamps says."""
        return self.seen >= _STAMP_S or self.told >= _CLOCKS_S


class LocalRoot:
    """One folder."""

    def __init__(
        self,
        root: str,
        cache: DiskCache,
        *,
        threads: RootThreads,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = os.path.abspath(root)
        self.num_reads = 0
        self._cache = cache
        self._threads = threads
        self._reading = SingleFlight[tuple[CheckpointPath, Fingerprint], Checkpoint | None](threads.reads)
        self._max_bytes = max_bytes
        self._clock = clock
        self._elapsed = elapsed
        self._memory = _Memory()
        self._sightings = _Sightings()

    async def find(self, path: CheckpointPath, who: str) -> Checkpoint | None:
        """The content that the path has now; None when it does not exist. `who` is named in the log if it is read.

        Raises `NoAnswer`, `OwnedIncomplete`, `OwnedRefused`, `LeavesRoot`, `CacheFull` or `OSError`.
        """
        loop = asyncio.get_running_loop()
        async with self._threads.in_time():
            seen = await loop.run_in_executor(self._threads.looks, self._threads.answering(self._look), path)
        if seen is None:
            return None
        if seen.known is not None and not seen.is_tar:
            return _settled(seen.known)
        known = await loop.run_in_executor(self._threads.entries, self._known, path, seen)
        if known is not None:
            return _settled(known)
        return await self._reading.run((path, seen.state), lambda: self._read(path, who))

    def has_had(self, path: CheckpointPath) -> bool:
        """Whether the path existed when it was looked at last."""
        return path in self._sightings or self.last(path) is not None

    def last(self, path: CheckpointPath) -> str | None:
        """The digest of the content that was read last, as far as it was noted."""
        return self._cache.notes.last(self._name(path))

    def doubt(self, digest: str) -> None:
        """Nothing that was found to have this content is taken to have it any more."""
        self._memory.forget(digest)

    def _name(self, path: CheckpointPath) -> str:
        return f"{self.root} {path}"

    def _look(self, path: CheckpointPath) -> _Seen | None:
        """The state of the path, with its cached outcome."""
        with open_folder(self.root, _parts(path)) as folder:
            seen = None if folder is None else _Seen(folder.fingerprint, folder.changed_at, is_tar=False)
        if seen is None:
            seen = self._look_for_tar(path)
        if seen is None:
            self._sightings.forget(path)
            return None
        return replace(seen, known=self._memory.get(path, seen.state))

    def _known(self, path: CheckpointPath, seen: _Seen) -> LookupResult | None:
        """The outcome for this state, from memory or from the notes. The copy of a tar file must still be there."""
        known = seen.known or self._noted(path, seen)
        if seen.is_tar and isinstance(known, Checkpoint) and self._cache.use(known.digest) is None:
            return None
        if known is not None and seen.known is None:
            self._memory.put(path, seen.state, known)
        return known

    def _noted(self, path: CheckpointPath, seen: _Seen) -> Checkpoint | None:
        text = self._cache.notes.get(self._name(path), _lasting(seen.state))
        content = None if text is None else read(text)
        if content is None:
            return None
        directory = self._cache.entry(content.digest) if seen.is_tar else str(seen.state[0])
        return Checkpoint.of(path, content, directory)

    def _look_for_tar(self, path: CheckpointPath) -> _Seen | None:
        with open_below(self.root, _parts(path, ".tar")) as found:
            if found is None:
                return None
            status = os.fstat(found[0])
            if not stat.S_ISREG(status.st_mode):
                return None
            return _Seen((*found[1], fingerprint(status)), max(status.st_mtime, status.st_ctime), is_tar=True)

    def _read(self, path: CheckpointPath, who: str) -> Checkpoint | None:
        report = Report(str(path))
        for _ in range(_ATTEMPTS):
            seen = self._look(path)
            if seen is None:
                return None
            known = self._known(path, seen)
            if known is not None:
                return _settled(known)
            age = self._age(path, seen)
            if age.still_ticks:
                time.sleep(_TICK_S)
                continue
            outcome = self._outcome(path, seen, report, who, is_young=age.is_young)
            after = self._look(path)
            if outcome is not None and after is not None and after.state == seen.state:
                if age.is_settled and not isinstance(outcome, OwnedIncomplete):
                    self._keep(path, seen.state, outcome)
                return _settled(outcome)
        raise report.incomplete("it is being written.")

    def _keep(self, path: CheckpointPath, state: Fingerprint, outcome: LookupResult) -> None:
        self._memory.put(path, state, outcome)
        if isinstance(outcome, Checkpoint):
            self._cache.notes.put(self._name(path), _lasting(state), written(outcome.content), outcome.digest)

    def _age(self, path: CheckpointPath, seen: _Seen) -> _Age:
        now = self._elapsed()
        return _Age(self._clock() - seen.changed_at, now - self._sightings.since(path, seen.state, now))

    def _outcome(
        self, path: CheckpointPath, seen: _Seen, report: Report, who: str, *, is_young: bool
    ) -> LookupResult | OwnedIncomplete | None:
        """Read the checkpoint; None when it no longer exists."""
        self.num_reads += 1
        try:
            with audited(who, path, self.root) as load:
                read_it = self._read_tar if seen.is_tar else self._read_folder
                checkpoint = read_it(path, seen, report, is_young=is_young)
                load.digest = load.digest if checkpoint is None else checkpoint.digest
                return checkpoint
        except (OwnedIncomplete, OwnedRefused) as exc:
            return afresh(exc)

    def _read_folder(self, path: CheckpointPath, seen: _Seen, report: Report, *, is_young: bool) -> Checkpoint | None:
        with open_folder(self.root, _parts(path)) as folder:
            if folder is None or folder.fingerprint != seen.state:
                return None
            content = Reader(folder, report, self._max_bytes, is_young).read()
            return Checkpoint.of(path, content, folder.path)

    def _read_tar(self, path: CheckpointPath, seen: _Seen, report: Report, *, is_young: bool) -> Checkpoint | None:
        del seen
        with open_below(self.root, _parts(path, ".tar")) as found:
            if found is None:
                return None
            content, directory = unpack_into(
                self._cache, found[0], report, max_bytes=self._max_bytes, is_young=is_young
            )
        return Checkpoint.of(path, content, directory)


def _parts(path: CheckpointPath, suffix: str = "") -> tuple[str, ...]:
    return path.run, FOLDER, path.name + suffix


def _lasting(state: Fingerprint) -> str:
    """The state without the devices, whose numbers may change when the machine starts anew."""
    return json.dumps([part[1:] if isinstance(part, tuple) else part for part in state])


def _settled(outcome: LookupResult | OwnedIncomplete | None) -> Checkpoint | None:
    if isinstance(outcome, Exception):
        raise afresh(outcome)
    return outcome
