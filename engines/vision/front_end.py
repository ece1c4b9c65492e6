"""One front end for all vision models of transformers. It records what a model hands to its language model, once per
image, and puts that into the rows of a step.

An image is encoded by the model's own forward on the image's tokens alone, with a hook where its language model begins.
So merging features, scaling embeddings and deepstack are the model's own code, whatever the family. The rows then go
through the same language model, chunk by chunk, on the paged cache.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from engines.interface.errors import ModelRefused
from engines.interface.protocol import BFLOAT16, HostTensor, PromptImage
from engines.planning.scheduler import Chunk
from engines.planning.sequence import TokenSequence
from engines.tensors.batch import ImageRows, StepBatch
from engines.tensors.transfer import to_device
from engines.vision.features import FeatureCache, ImageFeatures

_LANGUAGE_MODELS = ("language_model", "text_model")


def language_path_of(model: Any) -> str | None:
    """Where the language model is in a vision model; None in a text model."""
    inner = getattr(model, "model", None)
    return next((f"model.{name}" for name in _LANGUAGE_MODELS if getattr(inner, name, None) is not None), None)


Announce = Callable[[list[int], Mapping[str, HostTensor]], None]
"""Takes an image's tokens and tensors."""


class VisionFrontEnd:
    """Owns the hook in front of the language model. Used by one thread at a time.

    `announce`: called before an image is encoded. Where the embedding is split, all processes must encode it.

    `whole_images`: the tokens of an image attend to each other in both directions (Gemma 3). The token types tell the
    model which tokens these are.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype, *, cache_bytes: int) -> None:
        """Raises `ModelRefused` for a vision model without an image token id."""
        path = language_path_of(model)
        assert path is not None
        self._inner = model.model
        self._device = device
        self._dtype = dtype
        self._feature_id = _feature_id(model.config)
        self._takes = inspect.signature(self._inner.forward).parameters.keys()
        self.whole_images = "token_type_ids" in self._takes
        self._has_rope_index = hasattr(self._inner, "get_rope_index")
        self.cache = FeatureCache(cache_bytes)
        self.announce: Announce = _to_nobody
        self._is_recording = False
        self._step: ImageRows | None = None
        model.get_submodule(path).register_forward_pre_hook(self._before_language_model, with_kwargs=True)

    def use(self, images: ImageRows | None) -> None:
        """For the next forward of the model."""
        self._step = images

    def rows_of(self, batch: StepBatch) -> ImageRows | None:
        """Encodes the images whose rows are in the batch, unless they are cached. None for a batch without images.
        Raises whatever the tower raises.
        """
        if not any(chunk.sequence.request.images for chunk in batch.chunks):
            return None
        rows = [torch.empty(0, dtype=torch.int64, device=self._device)]
        parts: list[tuple[ImageFeatures, torch.Tensor]] = []
        for row, chunk, image in _overlaps(batch):
            features = self._features(chunk, image)
            places = features.rows + image.start
            mine = (places >= chunk.start) & (places < chunk.end)
            rows.append(places[mine] - chunk.start + row)
            parts.append((features, mine))
        positions = self._positions(batch)
        if not parts:
            return ImageRows(rows[0], torch.empty(0), (), positions)
        return ImageRows(
            rows=torch.cat(rows),  # in rising order, as chunks and images are
            embeds=torch.cat([features.embeds[mine] for features, mine in parts]),
            deepstack=tuple(
                torch.cat([features.deepstack[layer][mine] for features, mine in parts])
                for layer in range(len(parts[0][0].deepstack))
            ),
            positions=positions,
        )

    def _features(self, chunk: Chunk, image: PromptImage) -> ImageFeatures:
        token_ids = chunk.sequence.token_ids[image.start : image.start + image.length]
        encode = partial(self.encode, token_ids, image.tensors)
        return self.cache.get((image.digest, tuple(token_ids)), encode, is_first=chunk.start <= image.start)

    def encode(self, token_ids: list[int], tensors: Mapping[str, HostTensor]) -> ImageFeatures:
        """Raises whatever the tower raises."""
        self.announce(token_ids, tensors)
        ids = to_device([token_ids], self._device)
        is_feature = ids[0] == self._feature_id
        inputs = {name: self._tensor(tensor) for name, tensor in tensors.items() if name in self._takes}
        recorded = self._record(ids, self._types(ids) | inputs)
        return ImageFeatures(
            rows=is_feature.nonzero()[:, 0],
            embeds=recorded["inputs_embeds"][0][is_feature],
            deepstack=tuple(recorded.get("deepstack_visual_embeds") or ()),
        )

    def _record(self, ids: torch.Tensor, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's inputs to its language model for these tokens."""
        self._is_recording = True
        self._forget_positions()
        try:
            self._inner(input_ids=ids, use_cache=False, **inputs)
        except _Recorded as exc:
            return exc.inputs
        finally:
            self._is_recording = False
            self._forget_positions()
        raise AssertionError("the model ended without its language model")

    def _forget_positions(self) -> None:
        """Some models keep the positions of their last prompt on the module; remove them."""
        if hasattr(self._inner, "rope_deltas"):
            self._inner.rope_deltas = None

    def _types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if "mm_token_type_ids" not in self._takes:
            return {}
        return {"mm_token_type_ids": (ids == self._feature_id).int()}

    def _tensor(self, tensor: HostTensor) -> torch.Tensor:
        if tensor.dtype == BFLOAT16:
            return (
                torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16)
                .view(tensor.shape)
                .to(self._device, self._dtype)
            )
        array = np.frombuffer(bytearray(tensor.data), dtype=np.dtype(tensor.dtype)).reshape(tensor.shape)
        found = torch.from_numpy(array).to(self._device)
        return found.to(self._dtype) if found.is_floating_point() else found

    def _positions(self, batch: StepBatch) -> torch.Tensor | None:
        """[axes, T] if the model gives image tokens positions of several axes."""
        if not self._has_rope_index:
            return None
        columns = [self._chunk_positions(chunk) for chunk in batch.chunks]
        axes = max(column.shape[0] for column in columns)
        filler = batch.positions.shape[0] - sum(chunk.length for chunk in batch.chunks)
        columns.append(torch.zeros(1, filler, dtype=torch.int64, device=self._device))
        return torch.cat([column.expand(axes, -1) for column in columns], dim=1)

    def _chunk_positions(self, chunk: Chunk) -> torch.Tensor:
        """[axes or 1, length]."""
        sequence = chunk.sequence
        places = torch.arange(chunk.start, chunk.end, device=self._device)
        if not sequence.request.images:
            return places[None]
        if sequence.rope is None:
            sequence.rope = self._prompt_positions(sequence)
        prompt, offset = sequence.rope
        inside = prompt[:, chunk.start : chunk.end]
        after = places[inside.shape[1] :] + offset
        return torch.cat([inside, after.expand(prompt.shape[0], -1)], dim=1)

    def _prompt_positions(self, sequence: TokenSequence) -> tuple[torch.Tensor, int]:
        """Positions [axes, prompt] from the model, and the offset for each later token."""
        ids = to_device([sequence.token_ids[: sequence.num_prompt]], self._device)
        asked = inspect.signature(self._inner.get_rope_index).parameters.keys()
        images = sequence.request.images
        names = {name for image in images for name in image.tensors} & asked
        inputs = {name: torch.cat([self._tensor(image.tensors[name]) for image in images]) for name in names}
        positions, _ = self._inner.get_rope_index(ids, **self._types(ids), **inputs)
        found = positions[:, 0]
        return found, int(found.max()) + 1 - sequence.num_prompt

    def _before_language_model(
        self, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        del module
        if self._is_recording:
            raise _Recorded(kwargs)
        kwargs = kwargs | {"attention_mask": None}  # the paged cache is causal already
        if self._step is not None:
            kwargs |= _changes(self._step, kwargs["inputs_embeds"])
        return args, kwargs


def _changes(step: ImageRows, embeds: torch.Tensor) -> dict[str, Any]:
    """The arguments of the language model that images change. `embeds` [1, T, hidden]."""
    changes: dict[str, Any] = {}
    if step.positions is not None:
        changes["position_ids"] = step.positions[:, None]
    if step.rows.shape[0]:
        changes["inputs_embeds"] = step.merged(embeds[0])[None]
    if step.deepstack:
        is_visual = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        is_visual[0, step.rows] = True
        changes |= {"visual_pos_masks": is_visual, "deepstack_visual_embeds": list(step.deepstack)}
    return changes


def _to_nobody(token_ids: list[int], tensors: Mapping[str, HostTensor]) -> None:
    """One process has all of the model."""


class _Recorded(Exception):
    """Leaves a forward where the language model would begin, and carries its inputs."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


def _overlaps(batch: StepBatch) -> Iterator[tuple[int, Chunk, PromptImage]]:
    """(first row, chunk, image) for each image with tokens in the batch."""
    row = 0
    for chunk in batch.chunks:
        for image in sorted(chunk.sequence.request.images, key=lambda image: image.start):
            if image.start < chunk.end and chunk.start < image.start + image.length:
                yield row, chunk, image
        row += chunk.length


def _feature_id(config: Any) -> int:
    found = getattr(config, "image_token_id", None)
    if not isinstance(found, int):
        found = getattr(config, "image_token_index", None)
    if not isinstance(found, int):
        raise ModelRefused(f"{config.model_type}: its configuration names no image_token_id.")
    return found
