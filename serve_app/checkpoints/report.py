"""Errors about one checkpoint, with its owner: other callers must get "not found", whatever the error is."""

from dataclasses import dataclass, field

from serve_app.base.errors import CheckpointIncomplete, CheckpointRefused
from serve_app.checkpoints.metadata import Metadata


class OwnedIncomplete(CheckpointIncomplete):
    """The checkpoint is incomplete. `owner` None: it has no owner, or the owner is not known yet. `is_hidden`: it says
    whose it is, but that cannot be read; no caller may know of it.
    """

    def __init__(self, message: str, owner: str | None = None, public: bool = False, is_hidden: bool = False) -> None:
        super().__init__(message, owner, public, is_hidden)
        self.owner = owner
        self.public = public
        self.is_hidden = is_hidden


class OwnedRefused(CheckpointRefused):
    """The checkpoint is refused. The fields are those of `OwnedIncomplete`."""

    def __init__(self, message: str, owner: str | None = None, public: bool = False, is_hidden: bool = False) -> None:
        super().__init__(message, owner, public, is_hidden)
        self.owner = owner
        self.public = public
        self.is_hidden = is_hidden


Unfit = OwnedIncomplete | OwnedRefused


@dataclass(slots=True)
class Report:
    """`label`: the checkpoint's path. `about`: filled in as soon as it has been read, None if it cannot be read."""

    label: str
    about: Metadata | None = field(default_factory=Metadata)

    def refused(self, message: str) -> OwnedRefused:
        return OwnedRefused(f"The checkpoint {self.label} cannot be served: {message}", *self._whose())

    def incomplete(self, message: str) -> OwnedIncomplete:
        return OwnedIncomplete(f"The checkpoint {self.label} is not complete: {message}", *self._whose())

    def _whose(self) -> tuple[str | None, bool, bool]:
        return (None, False, True) if self.about is None else (self.about.owner, self.about.public, False)
