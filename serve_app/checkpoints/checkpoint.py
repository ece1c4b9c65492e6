"""A verified checkpoint: its content, and its directory on this machine."""

from dataclasses import dataclass
from datetime import datetime
from typing import Self

from engines.interface.protocol import Adapter
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints.content import Content


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`directory` holds the adapter's two files. If they change later, a reader computes another digest.

    `base_model`: the model it was trained on, None when the checkpoint does not name it. `owner` None or `public`:
    every caller may use it.
    """

    path: CheckpointPath
    digest: str
    directory: str
    base_model: str | None
    owner: str | None
    public: bool
    expires_at: datetime | None
    chat_template: str | None

    @classmethod
    def of(cls, path: CheckpointPath, content: Content, directory: str) -> Self:
        return cls(
            path=path,
            digest=content.digest,
            directory=directory,
            base_model=content.base_model,
            owner=content.owner,
            public=content.public,
            expires_at=content.expires_at,
            chat_template=content.chat_template,
        )

    @property
    def content(self) -> Content:
        return Content(self.digest, self.base_model, self.owner, self.public, self.expires_at, self.chat_template)

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.digest, self.directory)


def is_open_to(owner: str | None, *, public: bool, caller: str | None) -> bool:
    """Whether the caller may use a checkpoint of this owner."""
    return public or owner is None or owner == caller
