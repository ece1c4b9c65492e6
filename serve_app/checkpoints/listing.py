"""Which checkpoints there are for a caller. Bounded, whatever lies in the roots: in entries looked at, and in time."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from serve_app.checkpoints.checkpoint import is_open_to
from serve_app.checkpoints.content import FILES, open_folder, read_at
from serve_app.checkpoints.filesystem import FileSystem
from serve_app.checkpoints.local import FOLDER
from serve_app.checkpoints.metadata import (
    METADATA_FILE,
    BadField,
    Metadata,
    NotJson,
    base_of,
    json_object,
    parse_metadata,
)
from serve_app.checkpoints.root_folder import LeavesRoot, open_below
from serve_app.checkpoints.tar import Member, TarRefused, TarTruncated, TarWrong, known_files
from serve_app.errors import InvalidRequest
from serve_app.model_id import CheckpointPath, parse_checkpoint_path

MAX_FOUND = 1000
_TAR = ".tar"


@dataclass(frozen=True, slots=True)
class Listing:
    """`paths`: newest first. `is_complete`: whether these are all. `bases`: what they were trained on, if they tell."""

    paths: tuple[CheckpointPath, ...]
    is_complete: bool
    bases: Mapping[CheckpointPath, str] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class Search:
    """One look through a root: for whom, within which bounds, and what was found, with its time of change and, where it
    tells, the base that it was trained on. `has_failed`: the root could not be read, or not all of it.
    """

    caller: str | None
    max_found: int = MAX_FOUND
    max_entries: int = 20_000
    seconds: float = 5.0
    found: dict[CheckpointPath, float] = field(default_factory=dict)
    bases: dict[CheckpointPath, str] = field(default_factory=dict)
    has_failed: bool = False
    claimed: set[CheckpointPath] = field(default_factory=set)
    _started: float = field(default_factory=time.monotonic)
    _entries: int = 0

    def goes_on(self) -> bool:
        """Counts one more entry."""
        self._entries += 1
        return not self.is_cut

    @property
    def is_cut(self) -> bool:
        late = time.monotonic() - self._started > self.seconds
        return late or self._entries > self.max_entries or len(self.found) >= self.max_found

    def claim(self, path: CheckpointPath) -> bool:
        """Note that something lies at the path; False if that is known already."""
        if path in self.claimed:
            return False
        self.claimed.add(path)
        return True

    def add(
        self, path: CheckpointPath, metadata: bytes | None, config: Callable[[], bytes | None], changed_at: float
    ) -> None:
        """If the caller may use it. `config` reads the adapter's configuration, if it is needed."""
        try:
            about = Metadata() if metadata is None else parse_metadata(metadata)
        except (NotJson, BadField):
            return
        is_over = about.expires_at is not None and about.expires_at <= datetime.now(UTC)
        if not is_over and is_open_to(about.owner, public=about.public, caller=self.caller):
            self.found[path] = changed_at
            base = about.base_model or _base_in(config())
            if base is not None:
                self.bases[path] = base


def merge(searches: Iterable[Search]) -> Listing:
    """Of the roots in their order: the first that has anything at a path decides, as in a request."""
    found: dict[CheckpointPath, float] = {}
    bases: dict[CheckpointPath, str] = {}
    claimed: set[CheckpointPath] = set()
    is_complete = True
    for search in searches:
        mine = search.found.keys() - claimed
        found |= {path: search.found[path] for path in mine}
        bases |= {path: search.bases[path] for path in mine & search.bases.keys()}
        claimed |= search.claimed
        is_complete = is_complete and not (search.is_cut or search.has_failed)
    paths = sorted(found, key=lambda path: (-found[path], str(path)))
    return Listing(tuple(paths[:MAX_FOUND]), is_complete and len(paths) <= MAX_FOUND, bases)


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
                search.add(path, text, partial(read_at, config, MAX_CONFIG_BYTES), folder.changed_at)
        elif name.endswith(_TAR):
            _look_at_tar(root, run, name, search)


def _look_at_tar(root: str, run: str, name: str, search: Search) -> None:
    with open_folder(root, (run, FOLDER, name.removesuffix(_TAR))) as folder:
        path = _path(run, name.removesuffix(_TAR))
        if folder is not None or path is None:  # a folder of that name counts
            return
    with open_below(root, (run, FOLDER, name)) as found, suppress(TarRefused, TarTruncated, TarWrong):
        if found is not None and search.claim(path):
            members = known_files(found[0])
            if {CONFIG_FILE, WEIGHTS_FILE} <= members.keys():
                archive, _ = found
                read = partial(_text_of, archive, members)
                search.add(path, read(METADATA_FILE), partial(read, CONFIG_FILE), os.fstat(archive).st_mtime)


def _text_of(archive: int, members: Mapping[str, Member], file: str) -> bytes | None:
    member = members.get(file)
    return None if member is None else read_at(archive, min(member.size, MAX_CONFIG_BYTES), member.offset)


def search_files(files: FileSystem, search: Search) -> None:
    """Checkpoints of a remote root, tar files excepted: who may use them is written inside. Raises `StoreFailed`."""
    for run in files.children(()):
        if not search.goes_on():
            return
        for name in files.children((run, FOLDER)):
            path = _path(run, name)
            if not search.goes_on():
                return
            if path is None or not search.claim(path):
                continue
            states = {state.name: state for state in files.states((run, FOLDER, name), FILES)}
            if {CONFIG_FILE, WEIGHTS_FILE} <= states.keys():
                about, config, folder = states.get(METADATA_FILE), states[CONFIG_FILE], (run, FOLDER, name)
                text = None if about is None else files.text(folder, about, MAX_CONFIG_BYTES)
                if about is None or text is not None:
                    search.add(path, text, partial(files.text, folder, config, MAX_CONFIG_BYTES), 0.0)


def _base_in(config: bytes | None) -> str | None:
    try:
        return None if config is None else base_of(json_object(config))
    except NotJson:
        return None


def _path(run: str, name: str) -> CheckpointPath | None:
    try:
        return parse_checkpoint_path(f"tinker://{run}/{FOLDER}/{name}")
    except InvalidRequest:
        return None
