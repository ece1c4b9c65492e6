"""Runs chunks of sequences through a transformers model on the paged KV cache."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from engines.attention.exact import ExactBackend
from engines.attention.interface import NAME, AttentionBackend, Paged, ShapeProbe, register
from engines.attention.recurrent import split_by_sequence, state_bytes
from engines.attention.sdpa import SdpaBackend
from engines.batch import PROBE_TOKENS, StepBatch, build_batch
from engines.block_pool import TRASH_BLOCK
from engines.config import EngineConfig
from engines.errors import ModelRefused
from engines.exact import TILE_ROWS, RowTiles
from engines.kv_cache import KVCache, LayerShape
from engines.lora.adaptable import adaptable_targets
from engines.lora.apply import AdapterModules
from engines.lora.context import AdapterContext
from engines.lora.experts import Experts
from engines.lora.targets import LoraTargets
from engines.model_loader import LoadedModel
from engines.native.adapters import NativeAdapters
from engines.native.install import NativeModel, install_kernels
from engines.packed_linear import pack_linears
from engines.protocol import GenerateRequest, SamplingParams
from engines.scheduler import Chunk
from engines.sequence import Sequence

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the model from here on: its attention is switched to the paged cache. One thread at a time. Raises
    `ModelRefused` when the model cannot be run as the configuration wants it.

    Running a chunk writes the same K and V to the same places each time, so a forward may be repeated. `state_bytes`:
    what a running sequence takes beside its blocks, in layers that carry a state; those also rule out a prefix cache.
    """

    repeatable = True

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, threads: int = 1) -> None:
        register()
        self.targets = LoraTargets.of(loaded.model)
        self._model: Any = loaded.model
        self._model.set_attn_implementation(NAME)
        self._device = loaded.device
        self._block_size = config.block_size
        self._tiled = config.exact
        self._exact = False
        self._native: NativeModel | None = None
        self._context = AdapterContext()
        self.has_states = bool(split_by_sequence(loaded.model, loaded.config, self._context.narrowed))
        if self.has_states and config.exact:
            raise ModelRefused(
                f"{loaded.config.model_type}: exact is set, and layers that carry a state from token to token sum up "
                "in an order that depends on the chunks."
            )
        probe = ShapeProbe()
        self._backend: AttentionBackend = probe
        chunk = _probe_chunk([1])
        adaptable = adaptable_targets(
            loaded.model, self.targets, run=lambda: self.forward([chunk]), num_tokens=PROBE_TOKENS
        )
        self.state_bytes = state_bytes(chunk.sequence)
        self.shapes: dict[int, LayerShape] = probe.shapes
        others = AdapterModules(
            loaded.model,
            self._context,
            adaptable=adaptable,
            head=self.targets.head,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self.adapters: AdapterModules | NativeAdapters = others
        self._native = install_kernels(loaded, probe.attention, config, threads=threads)
        if self._native is not None:  # exact as they are
            decoder = self._native.decoder
            self.adapters = NativeAdapters(decoder, others, layers="model.layers", head=self.targets.head or "")
            return
        self._exact = config.exact
        if self._exact:
            for path in self.targets.experts:
                Experts.around(loaded.model, path, self._context, row_multiple=TILE_ROWS)
        if loaded.device.type == "cpu":
            logger.info("%d linear layers packed for the CPU", pack_linears(loaded.model, tiled=self._exact))

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, or make it anew; until then nothing can be run."""
        if self._native is not None:
            self._native.decoder.allocate(num_blocks)
            return
        cache = KVCache(self.shapes, num_blocks, self._block_size, self._device)
        self._backend = ExactBackend(cache) if self._exact else SdpaBackend(cache)

    def forward(self, chunks: SequenceOf[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        """The batch as it was laid out, and logits [wanted rows, vocab] in the model's dtype."""
        batch = self._batch(chunks)
        return batch, self._run(batch, batch.logit_rows)

    def check_health(self) -> None:
        """Run a few tokens of the base model in the trash block. Raises what the device raises."""
        chunk = _probe_chunk([TRASH_BLOCK])
        if not bool(torch.isfinite(self.last_logits([chunk])[chunk.sequence.request_id]).all()):
            raise RuntimeError("the base model's logits are not finite")

    def last_logits(self, chunks: SequenceOf[Chunk]) -> dict[str, torch.Tensor]:
        """Logits [vocab] after each chunk, complete or not, by request id."""
        batch = self._batch(chunks)
        ends = torch.tensor([chunk.length for chunk in batch.chunks], device=self._device).cumsum(0) - 1
        logits = self._run(batch, ends).float()
        return {chunk.sequence.request_id: row for chunk, row in zip(batch.chunks, logits, strict=True)}

    def _batch(self, chunks: SequenceOf[Chunk]) -> StepBatch:
        return build_batch(chunks, self._block_size, self._device, row_multiple=TILE_ROWS if self._exact else 1)

    def _run(self, batch: StepBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        self._context.set(batch)
        count = logit_rows.shape[0]
        if self._exact:
            logit_rows = F.pad(logit_rows, (0, -count % TILE_ROWS))
        if self._native is not None:
            return self._native.run(batch, logit_rows)
        with RowTiles() if self._tiled else nullcontext():
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
                paged=Paged(self._backend, batch),
            )
        logits: torch.Tensor = output.logits[0, :count]
        return logits


def _probe_chunk(blocks: Iterable[int]) -> Chunk:
    request = GenerateRequest("probe", tuple(range(PROBE_TOKENS)), SamplingParams(max_tokens=1, seed=0))
    sequence = Sequence.of(request, NO_SINK)
    sequence.blocks = list(blocks)
    return Chunk(sequence, 0, PROBE_TOKENS)


class _NoSink:
    def deliver(self, outputs: SequenceOf[Any]) -> None:
        raise AssertionError("a probe has no outputs")


NO_SINK = _NoSink()
