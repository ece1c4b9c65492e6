"""The checkpoints of all roots in one order, newest first, and pages of it for one caller."""

import base64
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from serve_app.base.errors import InvalidRequest
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints.checkpoint import is_open_to
from serve_app.checkpoints.listing import ListedCheckpoint, Search

PAGE: Final = 1000

Position = tuple[float, str]
"""A place in the order: the negative time of change, then the path."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A page. `checkpoints`: newest first. `next`: what to ask for the next page with, None on the last one.
    `is_complete`: the pages hold all checkpoints.
    """

    checkpoints: tuple[ListedCheckpoint, ...]
    is_complete: bool
    next: str | None = None

    @property
    def paths(self) -> tuple[CheckpointPath, ...]:
        return tuple(checkpoint.path for checkpoint in self.checkpoints)


@dataclass(frozen=True, slots=True)
class Merged:
    """What searches of the roots have found. The first root that has anything at a path decides, as in a request."""

    searches: tuple[Search, ...]
    found: Sequence[ListedCheckpoint]

    @classmethod
    def of(cls, searches: tuple[Search, ...]) -> Self:
        found: list[ListedCheckpoint] = []
        claimed: set[CheckpointPath] = set()
        for search in searches:
            found += [checkpoint for path, checkpoint in search.found.items() if path not in claimed]
            claimed |= search.claimed
        return cls(searches, sorted(found, key=_position))

    def is_of(self, searches: tuple[Search, ...]) -> bool:
        return len(searches) == len(self.searches) and all(map(lambda a, b: a is b, searches, self.searches))

    def page(self, owner: str | None, after: Position | None = None) -> Listing:
        """What this owner may use, after a position."""
        now, mine = datetime.now(UTC), list[ListedCheckpoint]()
        start = 0 if after is None else bisect_right(self.found, after, key=_position)
        is_complete = not any(search.is_cut or search.has_failed for search in self.searches)
        for index in range(start, len(self.found)):
            checkpoint = self.found[index]
            is_over = checkpoint.expires_at is not None and checkpoint.expires_at <= now
            if not is_over and is_open_to(checkpoint.owner, public=checkpoint.public, caller=owner):
                if len(mine) == PAGE:
                    return Listing(tuple(mine), is_complete, _written(_position(mine[-1])))
                mine.append(checkpoint)
        return Listing(tuple(mine), is_complete)


def position_of(after: str) -> Position:
    """The position that a page's `next` stands for. Raises `InvalidRequest`."""
    try:
        moment, path = json.loads(base64.urlsafe_b64decode(after.encode("ascii")))
        return float(moment), str(path)
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidRequest(f"after must be the 'next' of an earlier page, got {after!r:.60}.", "after") from exc


def _position(checkpoint: ListedCheckpoint) -> Position:
    return -checkpoint.changed_at, str(checkpoint.path)


def _written(position: Position) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode("ascii")
