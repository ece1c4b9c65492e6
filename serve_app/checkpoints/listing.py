"""Searches a root for checkpoints, of all owners. The entries examined and the time are bounded."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from serve_app.base.errors import InvalidRequest
from serve_app.base.model_id import CheckpointPath, parse_checkpoint_path
from serve_app.checkpoints.content import FILES, Reader, open_folder, read_at
from serve_app.checkpoints.filesystem import FileState, FileSystem
from serve_app.checkpoints.local import FOLDER, YOUNG_S
from serve_app.checkpoints.metadata import (
    METADATA_FILE,
    BadField,
    Metadata,
    NotJson,
    base_of,
    json_object,
    parse_metadata,
)
from serve_app.checkpoints.report import Report, Unfit
from serve_app.checkpoints.root_folder import LeavesRoot, open_below
from serve_app.checkpoints.tar import Archive, Member, TarRefused, TarTruncated, TarWrong, known_files

_TAR = ".tar"


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A listed checkpoint. `changed_at`: in seconds since 1970, 0 where the store gives none. `base_model`: the model
    it was trained on, None when the checkpoint does not name it. `problem`: why it cannot be sampled, None if no reason
    is known. A listing reads only the first bytes of local files. `owner`, `public` and `expires_at`: who may use it,
    and until when. `digest`: the content that it had when it was read last, None if it was not; `is_here`: that content
    is on a disk of this machine.
    """

    path: CheckpointPath
    changed_at: float = 0.0
    base_model: str | None = None
    problem: str | None = None
    owner: str | None = None
    public: bool = False
    expires_at: datetime | None = None
    digest: str | None = None
    is_here: bool = False


@dataclass(slots=True, eq=False)
class Search:
    """One search of a root: its bounds, and its results. `max_bytes`: of a checkpoint's weights. `has_failed`: some of
    the root could not be read. `is_cut`: it has reached a bound.
    """

    max_found: int = 50_000
    max_entries: int = 200_000
    seconds: float = 10.0
    max_bytes: int = 8 << 30
    found: dict[CheckpointPath, ListedCheckpoint] = field(default_factory=dict)
    has_failed: bool = False
    claimed: set[CheckpointPath] = field(default_factory=set)
    is_cut: bool = False
    _started: float = field(default_factory=time.monotonic)
    _entries: int = 0

    def goes_on(self) -> bool:
        """Count one entry; False once a bound is reached, and the search is cut."""
        self._entries += 1
        is_full = self._entries > self.max_entries or len(self.found) >= self.max_found
        self.is_cut = is_full or self._is_late(self.seconds)
        return not self.is_cut

    @property
    def has_time_to_check(self) -> bool:
        """Whether there is time to read files: parsing a header takes milliseconds, and the listing must reach every
        checkpoint.
        """
        return not self._is_late(self.seconds / 4)

    def _is_late(self, seconds: float) -> bool:
        return time.monotonic() - self._started > seconds

    def claim(self, path: CheckpointPath) -> bool:
        """Note that the path exists; False if it was noted before."""
        if path in self.claimed:
            return False
        self.claimed.add(path)
        return True

    def add(
        self,
        path: CheckpointPath,
        metadata: bytes | None,
        config: Callable[[], bytes | None],
        changed_at: float,
        check: Callable[[], Unfit | None] = lambda: None,
    ) -> None:
        """Add a checkpoint, unless who may use it cannot be read. `config` reads the adapter's configuration, if
        needed; `check` looks for errors, if there is time.
        """
        try:
            about = Metadata() if metadata is None else parse_metadata(metadata)
        except (NotJson, BadField):
            return
        base, problem = about.base_model, check() if self.has_time_to_check else None
        if base is None:
            try:
                base = _base_in(config())
            except NotJson as exc:
                problem = problem or Report(str(path)).refused(f"{CONFIG_FILE} {exc}.")
        reason = None if problem is None else str(problem)
        self.found[path] = ListedCheckpoint(path, changed_at, base, reason, about.owner, about.public, about.expires_at)


def search_folder(root: str, search: Search) -> None:
    """Checkpoints of a local root. Raises `OSError` when the root itself cannot be read."""
    for run in _children(root, search):
        with suppress(OSError):
            for name in _children(os.path.join(root, run, FOLDER), search):
                with suppress(OSError, LeavesRoot):
                    _look_at(root, run, name, search)


def _children(folder: str, search: Search) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not search.goes_on():
                return
            yield entry.name


def _look_at(root: str, run: str, name: str, search: Search) -> None:
    with open_folder(root, (run, FOLDER, name)) as folder:
        if folder is not None:
            path = _path(run, name)
            if path is not None and search.claim(path) and {CONFIG_FILE, WEIGHTS_FILE} <= folder.files.keys():
                about, config = folder.files.get(METADATA_FILE), folder.files[CONFIG_FILE]
                text = None if about is None else read_at(about, MAX_CONFIG_BYTES)
                is_young = abs(time.time() - folder.changed_at) < YOUNG_S
                reader = Reader(folder, Report(str(path)), search.max_bytes, is_young)
                read = partial(read_at, config, MAX_CONFIG_BYTES)
                search.add(path, text, read, folder.changed_at, reader.at_a_glance)
        elif name.endswith(_TAR):
            _look_at_tar(root, run, name, search)


def _look_at_tar(root: str, run: str, name: str, search: Search) -> None:
    with open_folder(root, (run, FOLDER, name.removesuffix(_TAR))) as folder:
        path = _path(run, name.removesuffix(_TAR))
        if folder is not None or path is None:  # a folder of that name counts
            return
    with open_below(root, (run, FOLDER, name)) as found, suppress(TarRefused, TarTruncated, TarWrong):
        if found is not None and search.claim(path):
            _add_tar(path, Archive.of(found[0]), os.fstat(found[0]).st_mtime, search)


def _add_tar(path: CheckpointPath, archive: Archive, changed_at: float, search: Search) -> None:
    """Raises `TarRefused`, `TarTruncated` or `TarWrong`."""
    members = known_files(archive)
    if {CONFIG_FILE, WEIGHTS_FILE} <= members.keys():
        read = partial(_text_of, archive, members)
        search.add(path, read(METADATA_FILE), partial(read, CONFIG_FILE), changed_at)


def _text_of(archive: Archive, members: Mapping[str, Member], file: str) -> bytes | None:
    member = members.get(file)
    return None if member is None else archive.read(min(member.size, MAX_CONFIG_BYTES), member.offset)


def search_files(files: FileSystem, search: Search) -> None:
    """Checkpoints of a remote root. Of a tar file, only the headers and the small files are read. Raises
    `StoreFailed`.
    """
    for run in files.children(()):
        if not search.goes_on():
            return
        # Folders before tar files: a folder counts before a tar file of its name.
        for child in sorted(files.children((run.name, FOLDER)), key=lambda child: child.name.endswith(_TAR)):
            if not search.goes_on():
                return
            if not _look_at_remote(files, run.name, child.name, search) and child.name.endswith(_TAR):
                _look_at_remote_tar(files, run.name, child, search)


def _look_at_remote(files: FileSystem, run: str, name: str, search: Search) -> bool:
    """Whether it is a checkpoint's folder."""
    path, folder = _path(run, name), (run, FOLDER, name)
    states = {} if path is None else {state.name: state for state in files.states(folder, FILES)}
    if path is None or not states:
        return False
    if search.claim(path) and {CONFIG_FILE, WEIGHTS_FILE} <= states.keys():
        about, config = states.get(METADATA_FILE), states[CONFIG_FILE]
        text = None if about is None else files.text(folder, about, MAX_CONFIG_BYTES)
        if about is None or text is not None:
            changed_at = max(state.changed_at for state in states.values())
            search.add(path, text, partial(files.text, folder, config, MAX_CONFIG_BYTES), changed_at)
    return True


def _look_at_remote_tar(files: FileSystem, run: str, file: FileState, search: Search) -> None:
    path = _path(run, file.name.removesuffix(_TAR))
    if path is not None and search.claim(path):
        with suppress(TarRefused, TarTruncated, TarWrong):
            _add_tar(path, files.archive((run, FOLDER), file), file.changed_at, search)


def _base_in(config: bytes | None) -> str | None:
    """Raises `NotJson`."""
    return None if config is None else base_of(json_object(config))


def _path(run: str, name: str) -> CheckpointPath | None:
    try:
        return parse_checkpoint_path(f"tinker://{run}/{FOLDER}/{name}")
    except InvalidRequest:
        return None
