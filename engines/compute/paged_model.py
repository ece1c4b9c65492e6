"""A transformers model on the paged KV cache, and what a run on a few tokens showed about it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from engines.attention.interface import NAME, Attention, AttentionBackend, Paged, ShapeProbe, register
from engines.attention.recurrent import split_by_sequence, state_bytes
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.interface.protocol import GenerateRequest, HostTensor, SamplingParams
from engines.lora.adaptable import adaptable_targets
from engines.lora.apply import AdapterModules
from engines.lora.context import AdapterContext
from engines.lora.format.targets import LoraTargets, TargetKind
from engines.lora.shards import Shards
from engines.model.loader import LoadedModel
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.tensors.batch import PROBE_TOKENS, StepBatch, build_batch
from engines.tensors.kv_cache import LayerShape
from engines.vision.front_end import VisionFrontEnd, language_path_of


@dataclass(frozen=True, slots=True)
class PagedModel:
    """Owns the model. Compute paths are built over it and may change its layers.

    - `context`: which rows have which adapter; set before each forward. `context_length`: of the longest sequence.
    - `adaptable`: modules that can be adapted row by row. `shapes`, `attention`: what each layer caches and asks for.
    - `has_states`: whether layers carry a state from token to token, which rules out a prefix cache. `state_bytes`: its
      size per running sequence, beside the blocks.
    - `shards`: which part of the model this is, if not all of it. `vision`: puts images into rows, if the model takes
      any.
    """

    loaded: LoadedModel
    context: AdapterContext
    context_length: int
    targets: LoraTargets
    adaptable: Mapping[str, TargetKind]
    shapes: Mapping[int, LayerShape]
    attention: Mapping[int, Attention]
    has_states: bool
    state_bytes: int
    shards: Shards | None
    vision: VisionFrontEnd | None

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig, shards: Shards | None = None) -> Self:
        """Switches the model's attention to the paged cache, permanently. Raises `ModelRefused` when the model cannot
        run as configured.
        """
        register()
        targets = LoraTargets.of(loaded.model)
        language_path = language_path_of(loaded.model) if loaded.takes_images else None
        loaded.model.get_submodule(language_path or "").set_attn_implementation(NAME)
        vision = None
        if language_path is not None:
            vision = VisionFrontEnd(loaded.model, loaded.device, loaded.dtype, cache_bytes=config.image_cache_bytes)
        context = AdapterContext()
        has_states = bool(split_by_sequence(loaded.model, loaded.config, context.narrowed))
        if has_states:
            _check_states(loaded.config.model_type, exact=config.exact, is_split=shards is not None)
        probe, chunk = ShapeProbe(), probe_chunk([1])
        batch = build_batch([chunk], config.block_size, loaded.device)
        adaptable = adaptable_targets(
            loaded.model,
            targets,
            run=lambda: _run(loaded.model, batch, batch.logit_rows, probe),
            num_tokens=PROBE_TOKENS,
            shards=shards,
        )
        return cls(
            loaded=loaded,
            context=context,
            context_length=config.context_length or loaded.context_length,
            targets=targets,
            adaptable=adaptable,
            shapes=probe.shapes,
            attention=probe.attention,
            has_states=has_states,
            state_bytes=state_bytes(chunk.sequence),
            shards=shards,
            vision=vision,
        )

    @property
    def whole_images(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions, so that an image is computed in one
        step.
        """
        return self.vision is not None and self.vision.whole_images

    def adapter_modules(self) -> AdapterModules:
        return AdapterModules(
            self.loaded.model,
            self.context,
            adaptable=self.adaptable,
            head=self.targets.head,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
            shards=self.shards,
        )

    def with_images(self, batch: StepBatch) -> StepBatch:
        """The batch with its images, encoded by the base model. Raises whatever the tower raises."""
        if self.vision is None:
            return batch
        with self.context.without_adapters():
            return replace(batch, images=self.vision.rows_of(batch))

    def encode_with(self, token_ids: list[int], tensors: Mapping[str, HostTensor]) -> None:
        """This process' part in the encoding of another process' image."""
        assert self.vision is not None
        with self.context.without_adapters():
            self.vision.encode(token_ids, tensors)

    def compute(self, batch: StepBatch, logit_rows: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        """Logits of these rows [R, vocab] in the model's dtype, by transformers' own forward, with images."""
        if self.vision is not None:
            self.vision.use(batch.images)
        return _run(self.loaded.model, batch, logit_rows, backend)


def probe_chunk(blocks: Iterable[int]) -> Chunk:
    """A few tokens of the base model, to try the model with."""
    request = GenerateRequest("probe", tuple(range(PROBE_TOKENS)), SamplingParams(max_tokens=1, seed=0))
    sequence = TokenSequence.of(request, NO_SINK)
    sequence.blocks = list(blocks)
    return Chunk(sequence, 0, PROBE_TOKENS)


def _run(model: Any, batch: StepBatch, logit_rows: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
    output = model(
        input_ids=batch.token_ids[None],
        position_ids=batch.positions[None],
        use_cache=False,
        logits_to_keep=logit_rows,
        paged=Paged(backend, batch),
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _check_states(model_type: str, *, exact: bool, is_split: bool) -> None:
    """Raises `ModelRefused` for options that do not work with layers that carry a state from token to token."""
    if exact:
        raise ModelRefused(
            f"{model_type}: exact is not possible with layers that carry a state from token to token. The order of "
            "their sums depends on the chunks."
        )
    if is_split:
        raise ModelRefused(f"{model_type}: layers that carry a state from token to token cannot be split over devices.")
