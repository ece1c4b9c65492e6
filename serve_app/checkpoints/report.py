"""Errors about one checkpoint, with its owner: other callers must get "not found", whatever the error is."""

from dataclasses import dataclass, field

from serve_app.base.errors import CheckpointIncomplete, CheckpointRefused
from serve_app.checkpoints.metadata import Metadata


class OwnedIncomplete(CheckpointIncomplete):
    """The checkpoint is incomplete. `owner` None: it has no owner, or the owner is not known yet."""

    def __init__(self, message: str, owner: str | None = None, public: bool = False) -> None:
        super().__init__(message, owner, public)
        self.owner = owner
        self.public = public


class OwnedRefused(CheckpointRefused):
    """The checkpoint is refused."""

    def __init__(self, message: str, owner: str | None = None, public: bool = False) -> None:
        super().__init__(message, owner, public)
        self.owner = owner
        self.public = public


Unfit = OwnedIncomplete | OwnedRefused


@dataclass(slots=True)
class Report:
    """`label`: the checkpoint's path. `about`: filled in as soon as it has been read."""

    label: str
    about: Metadata = field(default_factory=Metadata)

    def refused(self, message: str) -> OwnedRefused:
        text = f"The checkpoint {self.label} cannot be served: {message}"
        return OwnedRefused(text, self.about.owner, self.about.public)

    def incomplete(self, message: str) -> OwnedIncomplete:
        text = f"The checkpoint {self.label} is not complete: {message}"
        return OwnedIncomplete(text, self.about.owner, self.about.public)
