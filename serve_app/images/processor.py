"""A model's own image processor (transformers), without the rest of its `Processor`: no video, no torchvision."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from engines.interface.protocol import BFLOAT16, HostTensor
from serve_app.base.errors import ConfigRefused
from serve_app.base.model_files import read_json
from serve_app.images.decode import ImageRefused
from serve_app.images.prepared import Frame, PreparedImage

_NOT_FOR_THE_MODEL = frozenset({"num_crops", "rows", "cols", "num_patches"})
_PROBE_PIXELS = 64


class ModelProcessor:
    """Turns RGB pixels into the tensors that the model takes, and the token ids that stand for them in a prompt.

    Each image is processed alone, so the result does not depend on other images of the request. Thread-safe.
    """

    def __init__(self, source: str, revision: str | None = None) -> None:
        """`source`: a folder or hub id. Raises `ConfigRefused` for a model without an image processor."""
        config = read_json(source, "config.json", revision)
        self._processor = _image_half(source, revision, config)
        self._tokenizer = self._processor.tokenizer
        merged = self._processor._merge_kwargs(tokenizer_init_kwargs=self._tokenizer.init_kwargs, return_tensors="np")
        self._is_bfloat16 = "bfloat16" in str(config.get("dtype", config.get("torch_dtype")))
        self._kwargs: Mapping[str, Any] = {**merged["images_kwargs"], "return_tensors": "np"}
        self.frame = self._frame(config)

    def prepare(self, image: Image.Image) -> PreparedImage:
        """Raises `ImageRefused` for a shape that the model's processor does not accept."""
        try:
            data, (text,) = self._processor._process_images([image], **self._kwargs)
        except ValueError as exc:
            raise ImageRefused(
                f"has a shape that this model does not accept: {image.width} x {image.height} pixels"
            ) from exc
        token_ids = tuple(self._tokenizer(text, add_special_tokens=False).input_ids)
        tensors = {name: self._tensor(value) for name, value in data.items() if name not in _NOT_FOR_THE_MODEL}
        return PreparedImage.of(token_ids, tensors)

    def _frame(self, config: Mapping[str, Any]) -> Frame:
        placeholder_id = self._id_of(self._processor.image_token)
        feature_id = config.get("image_token_id", config.get("image_token_index", placeholder_id))
        probe = self.prepare(Image.new("RGB", (_PROBE_PIXELS, _PROBE_PIXELS))).token_ids
        first = probe.index(feature_id)
        last = len(probe) - 1 - probe[::-1].index(feature_id)
        before, after = self._around_in_template(placeholder_id)
        start_id = next((i for i in probe[:first] if self._is_special(i)), before)
        end_id = next((i for i in reversed(probe[last + 1 :]) if self._is_special(i)), after)
        return Frame(placeholder_id, feature_id, start_id, end_id)

    def _around_in_template(self, placeholder_id: int) -> tuple[int | None, int | None]:
        """The special tokens that the model's chat template writes right before and after an image."""
        if not self._processor.chat_template:
            return None, None
        parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
        text = self._processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        place = ids.index(placeholder_id) if placeholder_id in ids else 0
        before, after = ids[max(0, place - 1)], ids[min(len(ids) - 1, place + 1)]
        return before if self._is_special(before) else None, after if self._is_special(after) else None

    def _tensor(self, value: Any) -> HostTensor:
        """In the type of the model's weights, to which its tower rounds them anyway: half as many bytes travel."""
        array = np.asarray(value)
        if array.dtype == object:
            raise ImageRefused("cannot be prepared for this model: its tiles have different sizes")
        if array.dtype == np.float32 and self._is_bfloat16:
            return HostTensor(BFLOAT16, array.shape, _rounded(array).tobytes())
        return HostTensor(array.dtype.str, array.shape, array.tobytes())

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.added_tokens_decoder

    def _id_of(self, token: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id


def _rounded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper halves of float32 values, rounded to the nearest, ties to even: bfloat16."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _image_half(source: str, revision: str | None, config: Mapping[str, Any]) -> Any:
    """The model's `Processor` with its image processor and tokenizer only. Raises `ConfigRefused`."""
    kind: Any = _processor_class(_processor_name(source, revision, config))
    if kind is None:
        raise ConfigRefused(f"transformers has no image processor for the model {source!r}.")
    # What comes with a model is data: a processor or tokenizer of its own code is refused.
    options: Mapping[str, Any] = {"revision": revision, "trust_remote_code": False}

    class ImageHalf(kind):  # type: ignore[misc]
        """Loads two of the parts; the others stay None."""

        @classmethod
        def _get_arguments_from_pretrained(cls, source: str, processor_dict: Any = None, **_: Any) -> list[Any]:
            parts = {
                "image_processor": lambda: AutoImageProcessor.from_pretrained(source, backend="pil", **options),
                "tokenizer": lambda: AutoTokenizer.from_pretrained(source, **options),
            }
            return [parts[part]() if part in parts else None for part in kind.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    try:
        return ImageHalf.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as exc:
        raise ConfigRefused(f"The image processor of the model {source!r} cannot be loaded: {exc}") from exc


def _processor_class(name: str | None) -> Any:
    """The processor of transformers with this name; None if the name, which the model's files give, is another's."""
    kind = getattr(transformers, name or "", None)
    return kind if isinstance(kind, type) and issubclass(kind, ProcessorMixin) else None


def _processor_name(source: str, revision: str | None, config: Mapping[str, Any]) -> str | None:
    for file in ("processor_config.json", "preprocessor_config.json"):
        name = read_json(source, file, revision).get("processor_class")
        if isinstance(name, str):
            return name
    found = PROCESSOR_MAPPING_NAMES.get(config.get("model_type"))
    return found if isinstance(found, str) else None
