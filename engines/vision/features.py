"""The vision tower's features of an image, kept for later requests with the same image."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """`rows` [n] int64: which of the image's tokens are features of the tower; the others are ordinary tokens. `embeds`
    [n, hidden]: these replace their embeddings in the language model. `deepstack`: one [n, hidden] for each of its
    first layers, added to the layer's output.
    """

    rows: torch.Tensor
    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, self.embeds, *self.deepstack))


@dataclass(slots=True)
class ImageCounters:
    """The front end's share of `engines.interface.protocol.EngineCounters`."""

    images_encoded: int = 0
    images_reused: int = 0


class FeatureCache:
    """Features by the image's digest and tokens, least recently used dropped first. The last one is always kept."""

    def __init__(self, max_bytes: int) -> None:
        self.counters = ImageCounters()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._features: OrderedDict[Hashable, ImageFeatures] = OrderedDict()

    def get(self, key: Hashable, encode: Callable[[], ImageFeatures], *, is_first: bool) -> ImageFeatures:
        """`is_first`: a request asks for this image for the first time. Raises what `encode` raises."""
        found = self._features.get(key)
        if found is not None:
            self._features.move_to_end(key)
            self.counters.images_reused += is_first
            return found
        features = self._features[key] = encode()
        self.counters.images_encoded += 1
        self._num_bytes += features.num_bytes
        while self._num_bytes > self._max_bytes and len(self._features) > 1:
            _, dropped = self._features.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
        return features
