"""Where the preprocessing of images is counted."""

from typing import Protocol


class ImageRecorder(Protocol):
    """Called once per image for each thing that happens to it, on any thread."""

    def fetched(self, seconds: float) -> None:
        """It was downloaded from its URL."""

    def prepared(self, seconds: float) -> None:
        """It was decoded and made ready for its model."""

    def reused(self) -> None:
        """It was prepared before."""

    def refused(self) -> None:
        """It cannot be used."""


class NoImageRecorder:
    """Counts nothing."""

    def fetched(self, seconds: float) -> None:
        del seconds

    def prepared(self, seconds: float) -> None:
        del seconds

    def reused(self) -> None:
        pass

    def refused(self) -> None:
        pass
