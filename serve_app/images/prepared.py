"""The values that pass from the ingress to the image preprocessing, and from there to a model replica."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from engines.interface.protocol import HostTensor, PromptImage

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one image. `pixels` and `side` are checked from the header, before decoding."""

    bytes: int = 20 * 2**20
    pixels: int = 32 * 2**20
    side: int = 16_384


@dataclass(frozen=True, slots=True)
class ImageOrder:
    """The images of one request, for one model. `total_bytes`: of the tensors of all of them. `fetch`: whether `https://`
    URLs may be followed. `request_id`: for the log.
    """

    source: str
    revision: str | None
    urls: tuple[str, ...]
    limits: ImageLimits
    total_bytes: int = 192 * 2**20
    fetch: bool = False
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """`token_ids`: the tokens that represent the image in a prompt, with its frame. `tensors`: the arguments of the
    model's vision tower. `digest`: of both; equal for images that give the model equal input.
    """

    token_ids: tuple[int, ...]
    tensors: Mapping[str, HostTensor]
    digest: str

    @classmethod
    def of(cls, token_ids: tuple[int, ...], tensors: Mapping[str, HostTensor]) -> "PreparedImage":
        content = blake2b(repr(token_ids).encode(), digest_size=_DIGEST_BYTES)
        for name, tensor in sorted(tensors.items()):
            content.update(repr((name, tensor.dtype, tensor.shape)).encode())
            content.update(tensor.data)
        return cls(token_ids, tensors, content.hexdigest())

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Frame:
    """How a model marks images. `placeholder_id`: the token that its chat template writes for one. `feature_id`: the
    token in whose place a feature of the vision tower goes. `start_id`, `end_id`: the special tokens right before and
    right after an image's own tokens; None for none.
    """

    placeholder_id: int
    feature_id: int
    start_id: int | None
    end_id: int | None

    def place(self, image: PreparedImage, start: int, token_ids: tuple[int, ...]) -> PromptImage:
        """The image whose tokens, these, begin at `start` of a prompt: from its first feature to its last. So it is the
        same with its frame and without.
        """
        first = token_ids.index(self.feature_id)
        last = len(token_ids) - 1 - token_ids[::-1].index(self.feature_id)
        return PromptImage(start + first, last + 1 - first, image.digest, image.tensors)

    def inner(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """An image's token ids without its frame, where that is a part of them."""
        first, last = 0, len(token_ids)
        if self.start_id in token_ids:
            first = token_ids.index(self.start_id) + 1
        if self.end_id in token_ids[first:]:
            last = len(token_ids) - 1 - token_ids[::-1].index(self.end_id)
        return token_ids[first:last]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one image of a request cannot be used. The message is a predicate: the caller's sentence begins with the
    image's place.
    """

    message: str


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """The images of one request, in its order; `frame`: of the model that they were prepared for."""

    frame: Frame
    images: tuple[PreparedImage | Refusal, ...]
