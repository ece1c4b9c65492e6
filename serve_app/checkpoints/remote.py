"""A root that fsspec reaches: object stores, hubs, web servers.

A change is detected by the store's description of the files (ETag, generation, time of change), fetched at most every
`recheck_s`; so is that nothing is there. Notes on disk record the content of each path, so that a restart downloads
nothing again. Failures are cached for seconds. An incomplete or refused checkpoint is cached until the description
changes.
"""

import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from engines.interface.errors import afresh
from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, PICKLE_FILE, WEIGHTS_FILE
from serve_app.base.errors import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointRefused,
    CheckpointUnavailable,
)
from serve_app.base.model_id import CheckpointPath
from serve_app.base.single_flight import SingleFlight
from serve_app.checkpoints.archive import read_workspace, unpack_into
from serve_app.checkpoints.audit import audited
from serve_app.checkpoints.checkpoint import Checkpoint
from serve_app.checkpoints.content import FILES, MARKER_FILE, Content, max_file_bytes
from serve_app.checkpoints.disk_cache import DiskCache
from serve_app.checkpoints.filesystem import FileState, FileSystem, StoreFailed
from serve_app.checkpoints.local import FOLDER, YOUNG_S
from serve_app.checkpoints.metadata import METADATA_FILE, BadField, Metadata, NotJson, parse_metadata
from serve_app.checkpoints.notes import read, written
from serve_app.checkpoints.report import Report, Unfit
from serve_app.checkpoints.root_threads import NoAnswer, RootThreads

_ATTEMPTS = 3
_REMEMBERED = 16_384
_ABSENT = 16_384
_FAILED_S = 3.0


@dataclass(frozen=True, slots=True)
class _Listing:
    """The store's description of a path: the files of a folder, or one tar file."""

    files: tuple[FileState, ...]
    is_tar: bool

    @property
    def is_telling(self) -> bool:
        """Whether an equal listing proves equal content."""
        return all(file.version is not None for file in self.files)


@dataclass(slots=True)
class _Known:
    """The cached state of one path: the last listing, since when it is the same, when the store was asked last
    (monotonic seconds), and the outcome. An error is valid until `until`.
    """

    listing: _Listing | None = None
    since: float = -math.inf
    asked_at: float = -math.inf
    content: Content | None = None
    error: CheckpointError | None = None
    until: float = -math.inf


class RemoteRoot:
    """One root. Owned by one event loop."""

    def __init__(
        self,
        files: FileSystem,
        url: str,
        cache: DiskCache,
        *,
        threads: RootThreads,
        max_bytes: int,
        recheck_s: float = 2.0,
    ) -> None:
        self.files = files
        self.num_fetches = 0
        self._url = url
        self._cache = cache
        self._threads = threads
        self._listings = SingleFlight[CheckpointPath, _Listing | None](threads.looks)
        self._entries = SingleFlight[tuple[CheckpointPath, str], str | None](threads.entries)
        self._noted = SingleFlight[tuple[CheckpointPath, _Listing], tuple[Content, str] | None](threads.entries)
        self._fetches = SingleFlight[tuple[CheckpointPath, _Listing], tuple[Content, str]](threads.reads)
        self._max_bytes = max_bytes
        self._recheck_s = recheck_s
        self._known: OrderedDict[CheckpointPath, _Known] = OrderedDict()
        # When the store was asked last. Apart from what exists, which asking for many other paths would drop.
        self._absent: OrderedDict[CheckpointPath, float] = OrderedDict()

    async def find(self, path: CheckpointPath, who: str) -> Checkpoint | None:
        """The content that the path had at most `recheck_s` ago; None when it does not exist. `who` is named in the log
        if it is downloaded.

        Raises a `CheckpointError`, which is `NoAnswer` if the store does not say what it has, `CacheFull` or `OSError`.
        """
        now = time.monotonic()
        if now < self._absent.get(path, -math.inf) + self._recheck_s:
            return None
        known = self._remembered(path)
        if known.error is not None and now < min(known.until, known.asked_at + self._recheck_s):
            raise afresh(known.error)
        if known.content is None or now >= known.asked_at + self._recheck_s:
            await self._ask(path, known)
        if known.listing is None:
            return None
        if known.error is not None:
            raise afresh(known.error)
        if known.content is not None:
            content = known.content
            directory = await self._entries.run((path, content.digest), lambda: self._cache.use(content.digest))
            if directory is not None:
                return Checkpoint.of(path, content, directory)
        content, directory = await self._fetch(path, known, known.listing, who)
        return Checkpoint.of(path, content, directory)

    def _remembered(self, path: CheckpointPath) -> _Known:
        known = self._known.setdefault(path, _Known())
        self._known.move_to_end(path)
        return known

    def _trim(self) -> None:
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        while len(self._absent) > _ABSENT:
            self._absent.popitem(last=False)

    def has_had(self, path: CheckpointPath) -> bool:
        """Whether the path existed when the store was asked last."""
        known = self._known.get(path)
        if known is None or known.listing is None:
            return path not in self._absent and self.last(path) is not None
        return True

    def last(self, path: CheckpointPath) -> str | None:
        """The digest of the content that was downloaded last, as far as it was noted."""
        return self._cache.notes.last(f"{self._url} {path}")

    def doubt(self, digest: str) -> None:
        """Nothing that was found to have this content is taken to have it any more."""
        for known in self._known.values():
            if known.content is not None and known.content.digest == digest:
                known.content = None

    async def _ask(self, path: CheckpointPath, known: _Known) -> None:
        """Refresh the listing; drop the outcome of an older one."""
        try:
            async with self._threads.in_time():
                listing = await self._listings.run(path, self._threads.answering(lambda: self._list(path)))
        except StoreFailed as exc:
            known.error = NoAnswer(f"The store of the checkpoint {path} does not answer.")
            known.asked_at, known.until = time.monotonic(), time.monotonic() + _FAILED_S
            raise afresh(known.error) from exc
        finally:
            self._trim()
        now = time.monotonic()
        if listing != known.listing or not (listing and listing.is_telling) or now >= known.until:
            known.error = None
        if listing != known.listing or not (listing and listing.is_telling):
            known.content = None
        if listing != known.listing:
            known.listing, known.since = listing, now
        known.asked_at = now
        if listing is None:
            self._known.pop(path, None)
            self._absent[path] = now

    def _list(self, path: CheckpointPath) -> _Listing | None:
        folder = self.files.states((path.run, FOLDER, path.name), FILES)
        if folder:
            return _Listing(folder, is_tar=False)
        archive = self.files.states((path.run, FOLDER), [f"{path.name}.tar"])
        return _Listing(archive, is_tar=True) if archive else None

    async def _fetch(self, path: CheckpointPath, known: _Known, listing: _Listing, who: str) -> tuple[Content, str]:
        is_young = time.monotonic() - known.since < YOUNG_S
        try:
            fetched = await self._noted.run((path, listing), lambda: self._read_note(path, listing))
            if fetched is None:
                fetched = await self._fetches.run((path, listing), lambda: self._fetched(path, listing, who, is_young))
        except (CheckpointIncomplete, CheckpointRefused) as exc:
            if known.listing == listing:
                known.error = afresh(exc)
                known.until = math.inf if isinstance(exc, CheckpointRefused) else time.monotonic() + YOUNG_S
            raise
        except FileNotFoundError as exc:  # it existed when it was listed
            raise Report(str(path)).incomplete("it is being written.") from exc
        except StoreFailed as exc:
            known.error = CheckpointUnavailable(f"The store of the checkpoint {path} does not answer.")
            known.until = time.monotonic() + _FAILED_S
            raise afresh(known.error) from exc
        if known.listing == listing:
            known.content = fetched[0]
        return fetched

    def _note(self, path: CheckpointPath, listing: _Listing) -> tuple[str, str]:
        """The name and the state of the note on a path."""
        return f"{self._url} {path}", json.dumps(asdict(listing))

    def _read_note(self, path: CheckpointPath, listing: _Listing) -> tuple[Content, str] | None:
        """The content that the path had with this listing, if its copy is still there."""
        text = self._cache.notes.get(*self._note(path, listing)) if listing.is_telling else None
        content = None if text is None else read(text)
        directory = None if content is None else self._cache.use(content.digest)
        return None if content is None or directory is None else (content, directory)

    def _fetched(self, path: CheckpointPath, listing: _Listing, who: str, is_young: bool) -> tuple[Content, str]:
        for _ in range(_ATTEMPTS):
            with audited(who, path, self._url) as load:
                found = self._fetch_once(path, listing, is_young=is_young)
                load.digest = found[0].digest
            after = self._list(path)
            if after == listing:
                if listing.is_telling:
                    name, state = self._note(path, listing)
                    self._cache.notes.put(name, state, written(found[0]), found[0].digest)
                return found
            if after is None:
                break
            listing = after
        raise Report(str(path)).incomplete("it is being written.")

    def _fetch_once(self, path: CheckpointPath, listing: _Listing, *, is_young: bool) -> tuple[Content, str]:
        folder = (path.run, FOLDER) if listing.is_tar else (path.run, FOLDER, path.name)
        report = Report(str(path))
        if (problem := self._problem(listing, report)) is not None:
            report.about = self._about(folder, listing)
            raise problem()
        self.num_fetches += 1
        limits = {file: limit for file in listing.files if (limit := self._limit(file, listing)) is not None}
        room = sum(limit if file.size is None else file.size for file, limit in limits.items())
        with self._cache.workspace(room) as workspace:
            for file, limit in limits.items():
                self.files.fetch(folder, file, os.path.join(workspace, file.name), limit)
            if listing.is_tar:
                return self._unpacked(report, os.path.join(workspace, listing.files[0].name), is_young=is_young)
            is_final = any(file.name == MARKER_FILE for file in listing.files)
            content = read_workspace(workspace, report, max_bytes=self._max_bytes, is_young=is_young, is_final=is_final)
            return content, self._cache.publish(workspace, content.digest)

    def _unpacked(self, report: Report, file: str, *, is_young: bool) -> tuple[Content, str]:
        with open(file, "rb") as archive:
            return unpack_into(self._cache, archive.fileno(), report, max_bytes=self._max_bytes, is_young=is_young)

    def _limit(self, file: FileState, listing: _Listing) -> int | None:
        return self._max_bytes if listing.is_tar else max_file_bytes(file.name, self._max_bytes)

    def _about(self, folder: tuple[str, ...], listing: _Listing) -> Metadata | None:
        """What the checkpoint says about itself; None if that cannot be read."""
        about = next((file for file in listing.files if file.name == METADATA_FILE), None)
        if about is None:
            return Metadata()
        text = self.files.text(folder, about, MAX_CONFIG_BYTES)
        try:
            return None if text is None else parse_metadata(text)
        except (NotJson, BadField):
            return None

    def _problem(self, listing: _Listing, report: Report) -> Callable[[], Unfit] | None:
        """The error that the listing alone shows, before any download."""
        names = {file.name for file in listing.files}
        if not listing.is_tar:
            if PICKLE_FILE in names and WEIGHTS_FILE not in names:
                return partial(report.refused, f"{PICKLE_FILE} is never read; save the adapter as {WEIGHTS_FILE}.")
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                if name not in names:
                    return partial(report.incomplete, f"{name} is not there.")
        for file in listing.files:
            limit = self._limit(file, listing)
            if limit is not None and file.size is not None and file.size > limit:
                return partial(report.refused, f"{file.name} has {file.size} bytes; the limit is {limit}.")
        return None
