"""The checkpoint store: from a checkpoint's path to its current content, verified, in a local folder.

    path -> root by root -> what lies there -> is it complete, whose is it, which content -> Checkpoint

Local folders are served in place; tar files and remote roots go through the disk cache. A checkpoint needs no
announcement: the first request after its last byte was written finds it. The same holds for a replacement.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from engines.interface.errors import AdapterChanged
from engines.interface.protocol import Adapter
from serve_app.base.errors import CheckpointNotFound, CheckpointUnavailable, InvalidRequest
from serve_app.base.model_id import CheckpointPath
from serve_app.base.single_flight import SingleFlight
from serve_app.checkpoints.checkpoint import Checkpoint, is_open_to
from serve_app.checkpoints.disk_cache import CacheFull, DiskCache
from serve_app.checkpoints.filesystem import FileSystem, StoreFailed
from serve_app.checkpoints.listing import ListedCheckpoint, Search, search_files, search_folder
from serve_app.checkpoints.local import LocalRoot
from serve_app.checkpoints.pages import Listing, Merged, Position, position_of
from serve_app.checkpoints.remote import RemoteRoot
from serve_app.checkpoints.report import OwnedIncomplete, OwnedRefused
from serve_app.checkpoints.root_folder import LeavesRoot
from serve_app.checkpoints.root_threads import LOOK_S, NoAnswer, RootThreads
from serve_app.config.paths import resolve_path
from serve_app.config.service import CheckpointsConfig

logger = logging.getLogger(__name__)

_LOGGED = 256
_LIST_S = 15.0  # a search looks for 10 s; the rest is for the call that it waits for
_RELIST_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Counts since the store was opened: checkpoints read and hashed, downloaded, and removed from the disk cache;
    requests for a checkpoint that is refused, and for one whose owner cannot be read.
    """

    reads: int
    fetches: int
    evictions: int
    refusals: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class _Searched:
    """A search of a root, and until when its result is used."""

    search: Search
    until: float


class CheckpointStore:
    """Owned by one event loop. `close` it."""

    def __init__(
        self,
        roots: Sequence[str],
        *,
        cache_directory: str | None = None,
        cache_bytes: int = 50 << 30,
        max_bytes: int = 8 << 30,
        timeout_s: float = 60.0,
        recheck_s: float = 2.0,
        look_s: float = LOOK_S,
        relist_s: float = 3.0,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """`roots`: folders and URLs, in search order. `cache_directory` None: a folder under the user's cache.
        `max_bytes`: of one checkpoint's weights. `timeout_s`: how long a request waits; the work continues for later
        requests. `look_s`: how long a root may take to say whether it has a checkpoint. `relist_s`: how long a listing
        is used. Touches no file yet. Raises `ConfigRefused`.
        """
        directory = cache_directory or str(Path.home() / ".cache" / "roundhouse" / "checkpoints")
        self._cache = DiskCache(directory, cache_bytes)
        self._helpers = ThreadPoolExecutor(4, thread_name_prefix="checkpoint-helper")
        self._num_refused = 0
        self._num_hidden = 0
        self._logged: OrderedDict[str, None] = OrderedDict()
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._elapsed = elapsed
        self._threads = [RootThreads(look_s, elapsed) for _ in roots]
        self._roots = [
            self._root(root, threads, max_bytes, recheck_s) for root, threads in zip(roots, self._threads, strict=True)
        ]
        self._listings = [SingleFlight[int, Search](threads.searches) for threads in self._threads]
        self._searches: dict[int, _Searched] = {}
        self._merged = Merged.of(())
        self._relist_s = relist_s

    @classmethod
    def of(cls, config: CheckpointsConfig) -> Self:
        """The store that the configuration describes. Raises `ConfigRefused`."""
        cache = config.cache_directory
        return cls(
            [resolve_path(root) for root in config.roots],
            cache_directory=None if cache is None else resolve_path(cache),
            cache_bytes=config.cache_bytes,
        )

    def _root(self, root: str, threads: RootThreads, max_bytes: int, recheck_s: float) -> LocalRoot | RemoteRoot:
        if root.startswith("file://"):
            root = root.removeprefix("file://")
        if "://" in root:
            return RemoteRoot(
                FileSystem(root), root, self._cache, threads=threads, max_bytes=max_bytes, recheck_s=recheck_s
            )
        return LocalRoot(
            root,
            self._cache,
            threads=threads,
            max_bytes=max_bytes,
            clock=self._clock,
            elapsed=self._elapsed,
        )

    @property
    def counters(self) -> StoreCounters:
        return StoreCounters(
            reads=sum(root.num_reads for root in self._roots if isinstance(root, LocalRoot)),
            fetches=sum(root.num_fetches for root in self._roots if isinstance(root, RemoteRoot)),
            evictions=self._cache.evictions,
            refusals=self._num_refused,
            unreadable=self._num_hidden,
        )

    async def resolve_for(self, path: CheckpointPath, caller: str | None, who: str = "") -> Checkpoint:
        """As `resolve`, for one caller: another owner's private checkpoint is not found, whatever its errors. Nor is
        one for anybody that says whose it is in words that cannot be read.
        """
        try:
            checkpoint = await self.resolve(path, who)
        except (OwnedIncomplete, OwnedRefused) as exc:
            if exc.is_hidden:
                self._hide(str(exc))
            if exc.is_hidden or not is_open_to(exc.owner, public=exc.public, caller=caller):
                raise _not_found(path) from None
            raise
        if not is_open_to(checkpoint.owner, public=checkpoint.public, caller=caller):
            raise _not_found(path)
        return checkpoint

    def _hide(self, reason: str) -> None:
        """Count it, and log each reason once: requests must not fill the log."""
        self._num_hidden += 1
        if reason not in self._logged:
            logger.warning("It is not known whose checkpoint this is, so nobody may use it. %s", reason)
        self._logged[reason] = None
        self._logged.move_to_end(reason)
        if len(self._logged) > _LOGGED:
            self._logged.popitem(last=False)

    async def resolve(self, path: CheckpointPath, who: str = "") -> Checkpoint:
        """The content that the path has now, without a check of the owner. `who` is named in the log if it is read.

        Raises `CheckpointNotFound` (also when it has expired), `CheckpointIncomplete`, `CheckpointRefused`,
        `CheckpointUnavailable`, or `InvalidRequest` when a link leads out of its root.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                with _translated(path):
                    checkpoint = await self._find(path, who)
        except OwnedRefused as exc:
            self._num_refused += not exc.is_hidden
            raise
        except TimeoutError as exc:
            raise CheckpointUnavailable(f"The checkpoint {path} was not read within {self._timeout_s:g} s.") from exc
        now = datetime.fromtimestamp(self._clock(), UTC)
        if checkpoint is None or (checkpoint.expires_at is not None and checkpoint.expires_at <= now):
            raise _not_found(path)
        return checkpoint

    @asynccontextmanager
    async def keep(self, adapter: Adapter) -> AsyncIterator[None]:
        """Keep the adapter's local copy for as long as the context lasts. Raises `AdapterChanged` when it is gone. If
        the context raises that, the adapter's files are read anew when they are asked for next.
        """
        try:
            async with self._pinned(adapter) if self._cache.holds(adapter.directory) else nullcontext():
                yield
        except AdapterChanged:
            for root in self._roots:
                root.doubt(adapter.digest)
            await asyncio.get_running_loop().run_in_executor(self._helpers, self._cache.doubt, adapter.digest)
            raise

    @asynccontextmanager
    async def _pinned(self, adapter: Adapter) -> AsyncIterator[None]:
        pinning = asyncio.get_running_loop().run_in_executor(self._helpers, self._cache.pin, adapter.digest)
        try:
            if not await asyncio.shield(pinning):
                raise AdapterChanged("The copy of the checkpoint was just removed from the checkpoint cache.")
            yield
        finally:
            if pinning.done():
                self._unpin(adapter.digest, pinning)
            else:
                pinning.add_done_callback(partial(self._unpin, adapter.digest))

    def _unpin(self, digest: str, pinning: asyncio.Future[bool]) -> None:
        if not pinning.cancelled() and pinning.exception() is None and pinning.result():
            self._cache.unpin(digest)

    async def _find(self, path: CheckpointPath, who: str) -> Checkpoint | None:
        """The content in the first root that has the path, complete or not. A root that does not answer is passed by,
        unless it is known to have the path. Raises `NoAnswer` if nothing is found and not all roots have answered.
        """
        silent: NoAnswer | None = None
        for root in self._roots:
            try:
                checkpoint = await root.find(path, who)
            except NoAnswer as exc:
                if await asyncio.to_thread(root.has_had, path):
                    raise  # another root's content would not be what this path has now
                silent = exc
                continue
            if checkpoint is not None:
                return checkpoint
        if silent is not None:
            raise silent
        return None

    async def list(self, owner: str | None, after: str | None = None) -> Listing:
        """Checkpoints that look complete and that this owner may use, of seconds ago. `after`: `next` of the page
        before. A search of a root is bounded; a root that cannot be listed, or does not answer in time, is left out.
        Raises `InvalidRequest`.
        """
        position = None if after is None else position_of(after)
        searches = await asyncio.gather(*(self._search(number) for number in range(len(self._roots))))
        return await asyncio.get_running_loop().run_in_executor(
            self._helpers, self._page, tuple(searches), owner, position
        )

    def _page(self, searches: tuple[Search, ...], owner: str | None, after: Position | None) -> Listing:
        merged = self._merged
        if not merged.is_of(searches):
            merged = self._merged = Merged.of(searches)
        page = merged.page(owner, after)
        return replace(page, checkpoints=tuple(self._with_content(searches, one) for one in page.checkpoints))

    def _with_content(self, searches: tuple[Search, ...], checkpoint: ListedCheckpoint) -> ListedCheckpoint:
        roots = zip(searches, self._roots, strict=True)
        root = next(root for search, root in roots if checkpoint.path in search.found)
        digest = root.last(checkpoint.path)
        is_copied = digest is not None and os.path.isdir(self._cache.entry(digest))
        return replace(checkpoint, digest=digest, is_here=is_copied or isinstance(root, LocalRoot))

    async def _search(self, number: int) -> Search:
        kept = self._searches.get(number)
        if kept is not None and self._elapsed() < kept.until:
            return kept.search
        try:
            async with asyncio.timeout(min(self._timeout_s, _LIST_S)):
                return await self._listings[number].run(number, partial(self._search_root, number))
        except TimeoutError:
            logger.warning("Checkpoint root %d was not listed in time.", number)
            search = Search(has_failed=True)
            self._searches[number] = _Searched(search, self._elapsed() + _LIST_S)
            return search

    def _search_root(self, number: int) -> Search:
        """Search, and keep the result: for longer if the search took long."""
        began = self._elapsed()
        search = _searched(self._roots[number], self._max_bytes)
        now = self._elapsed()
        self._searches[number] = _Searched(search, now + min(_RELIST_S, self._relist_s + 10 * (now - began)))
        return search

    def close(self) -> None:
        """Stop. Running calls finish later; their results are dropped."""
        self._helpers.submit(self._cache.notes.close)
        self._helpers.shutdown(wait=False)
        for threads in self._threads:
            threads.close()


def _searched(root: LocalRoot | RemoteRoot, max_bytes: int) -> Search:
    search = Search(max_bytes=max_bytes)
    try:
        if isinstance(root, LocalRoot):
            search_folder(root.root, search)
        else:
            search_files(root.files, search)
    except FileNotFoundError:
        pass
    except (OSError, StoreFailed) as exc:
        logger.warning("A checkpoint root cannot be listed: %r", exc)
        search.has_failed = True
    return search


def _not_found(path: CheckpointPath) -> CheckpointNotFound:
    """The same text that the catalogue uses for an unknown model: the two must not differ."""
    return CheckpointNotFound(f"The model {str(path)!r} does not exist, or this key may not use it.")


@contextmanager
def _translated(path: CheckpointPath) -> Iterator[None]:
    """Converts what roots raise to errors of the service."""
    try:
        yield
    except LeavesRoot as exc:
        raise InvalidRequest(
            f"model names {str(path)!r}, but a link in this path leads out of the store.", "model"
        ) from exc
    except CacheFull as exc:
        logger.error("The checkpoint cache has no room for %s.", path)
        raise CheckpointUnavailable(
            f"The checkpoint {path} cannot be loaded now: the checkpoint cache is full."
        ) from exc
    except OSError as exc:
        logger.error("The checkpoint %s cannot be read: %r", path, exc)
        raise CheckpointUnavailable(f"The checkpoint {path} cannot be read now.") from exc
