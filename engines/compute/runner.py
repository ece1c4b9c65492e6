"""Runs chunks of sequences through a transformers model on the paged KV cache."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engines.attention.exact import ExactBackend
from engines.attention.interface import NAME, Attention, AttentionBackend, Paged, ShapeProbe, register
from engines.attention.recurrent import split_by_sequence, state_bytes
from engines.attention.sdpa import SdpaBackend
from engines.compute.native_path import NativeModel, install_kernels
from engines.config import EngineConfig
from engines.errors import ModelRefused
from engines.lora.adaptable import adaptable_targets
from engines.lora.apply import AdapterModules
from engines.lora.context import AdapterContext
from engines.lora.experts import AdaptedExperts
from engines.lora.format.targets import LoraTargets
from engines.lora.shards import Shards
from engines.model.loader import LoadedModel
from engines.model.packed_linear import pack_linears
from engines.model.row_tiles import TILE_ROWS, RowTiles
from engines.native.adapters import NativeAdapters
from engines.planning.block_pool import TRASH_BLOCK
from engines.planning.scheduler import Chunk
from engines.planning.sequence import TokenSequence
from engines.protocol import GenerateRequest, SamplingParams
from engines.tensors.batch import PROBE_TOKENS, Carried, StepBatch, build_batch
from engines.tensors.kv_cache import KVCache, LayerShape

if TYPE_CHECKING:
    from engines.compute.device_path import GpuPath

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the model from here on: its attention is switched to the paged cache. One thread at a time. Raises
    `ModelRefused` when the model cannot be run as the configuration wants it.

    Running a chunk writes the same K and V to the same places each time, so a forward may be repeated. `state_bytes`:
    what a running sequence takes beside its blocks, in layers that carry a state; those also rule out a prefix cache.
    """

    repeatable = True

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, *, threads: int = 1, shards: Shards | None = None
    ) -> None:
        """`shards`: which part of the model `loaded` is, if it is not all of it."""
        register()
        self.targets = LoraTargets.of(loaded.model)
        self._model: Any = loaded.model
        self._model.set_attn_implementation(NAME)
        self._device = loaded.device
        self._block_size = config.block_size
        self._tiled = config.exact
        self._exact = False
        self._native: NativeModel | None = None
        self._gpu: GpuPath | None = None
        self._context = AdapterContext()
        self.has_states = bool(split_by_sequence(loaded.model, loaded.config, self._context.narrowed))
        if self.has_states:
            _check_states(loaded.config.model_type, exact=config.exact, is_split=shards is not None)
        probe = ShapeProbe()
        self._backend: AttentionBackend = probe
        chunk = _probe_chunk([1])
        adaptable = adaptable_targets(
            loaded.model, self.targets, run=lambda: self.forward([chunk]), num_tokens=PROBE_TOKENS, shards=shards
        )
        self.state_bytes = state_bytes(chunk.sequence)
        self.shapes: dict[int, LayerShape] = probe.shapes
        self._context_length = config.context_length or loaded.context_length
        self._gpu = self._gpu_path(loaded, config, by_row=shards is None and not self.has_states)
        adapter_modules = AdapterModules if self._gpu is None else self._gpu.adapter_modules
        others = adapter_modules(
            loaded.model,
            self._context,
            adaptable=adaptable,
            head=self.targets.head,
            dtype=loaded.dtype,
            device=loaded.device,
            shards=shards,
        )
        self.adapters: AdapterModules | NativeAdapters = others
        if shards is None:  # what takes the place of a layer would take the place of its exchange too
            self._replace_layers(loaded, config, others, probe.attention, threads)

    def _replace_layers(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        others: AdapterModules,
        attention: Mapping[int, Attention],
        threads: int,
    ) -> None:
        """By what computes the same faster here, or exactly."""
        self._native = install_kernels(loaded, attention, config, threads=threads)
        if self._native is not None:  # exact as they are
            decoder = self._native.decoder
            self.adapters = NativeAdapters(decoder, others, layers="model.layers", head=self.targets.head or "")
            return
        self._exact = config.exact
        if self._exact:
            for path in self.targets.experts:
                AdaptedExperts.around(loaded.model, path, self._context, row_multiple=TILE_ROWS)
        if loaded.device.type == "cpu":
            logger.info("%d linear layers packed for the CPU", pack_linears(loaded.model, tiled=self._exact))

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, or make it anew; until then nothing can be run."""
        if self._native is not None:
            self._native.decoder.allocate(num_blocks)
            return
        cache = KVCache(self.shapes, num_blocks, self._block_size, self._device)
        if self._gpu is not None:
            self._backend = self._gpu.allocate(cache, self._context_length)
        else:
            self._backend = ExactBackend(cache) if self._exact else SdpaBackend(cache)

    def warm_up(self) -> None:
        """Do now what would hold up the first requests. After the last `allocate`."""
        if self._gpu is not None:
            self._gpu.record()

    def fall_back(self) -> bool:
        """Do without what may not work on this device, one thing a call: from the next `allocate` on. False when
        there is nothing left to do without.
        """
        if self._gpu is None:
            return False
        if self._gpu.without_graphs():
            return True
        is_demanded, self._gpu = self._gpu.is_demanded, None
        return not is_demanded

    def forward(self, chunks: Sequence[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        """The batch as it was laid out, and logits [wanted rows, vocab] in the model's dtype, which hold until the
        next call.
        """
        if self._gpu is not None and all(chunk.completes for chunk in chunks):
            decoded = self._gpu.decode(chunks)
            if decoded is not None:
                return decoded
        batch = self._batch(chunks)
        return batch, self._run(batch, batch.logit_rows)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """As of `loop.Runner`: by the recorded decode steps."""
        return self._gpu.decode(chunks, carried) if self._gpu is not None and self._gpu.overlaps else None

    def check_health(self) -> None:
        """Run a few tokens of the base model in the trash block. Raises what the device raises."""
        chunk = _probe_chunk([TRASH_BLOCK])
        if not bool(torch.isfinite(self.last_logits([chunk])[chunk.sequence.request_id]).all()):
            raise RuntimeError("the base model's logits are not finite")

    def last_logits(self, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """Logits [vocab] after each chunk, complete or not, by request id."""
        decoded = None if self._gpu is None else self._gpu.decode(chunks)
        if decoded is not None:
            return _by_request(*decoded)
        batch = self._batch(chunks)
        ends = torch.tensor([chunk.length for chunk in batch.chunks], device=self._device).cumsum(0) - 1
        return _by_request(batch, self._run(batch, ends))

    def _batch(self, chunks: Sequence[Chunk]) -> StepBatch:
        return build_batch(chunks, self._block_size, self._device, row_multiple=TILE_ROWS if self._exact else 1)

    def _run(self, batch: StepBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        tiles = None if self._gpu is None else self._gpu.tiles(batch)
        self._context.set(batch, by_row=tiles is not None, tiles=tiles)
        count = logit_rows.shape[0]
        if self._exact:
            logit_rows = F.pad(logit_rows, (0, -count % TILE_ROWS))
        if self._native is not None:
            return self._native.run(batch, logit_rows)
        return self._compute(batch, logit_rows)[:count]

    def _compute(self, batch: StepBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        with RowTiles() if self._tiled else nullcontext():
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
                paged=Paged(self._backend, batch),
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _compute_rows(self, batch: StepBatch) -> torch.Tensor:
        self._context.set(batch, by_row=True)
        return self._compute(batch, batch.logit_rows)

    def _gpu_path(self, loaded: LoadedModel, config: EngineConfig, *, by_row: bool) -> "GpuPath | None":
        """Raises `ModelRefused` where the Triton kernels are demanded and cannot be had."""
        is_demanded = config.attention != "auto"
        if config.exact or config.attention in ("sdpa", "native"):
            return None
        if not is_demanded and loaded.device.type != "cuda":
            return None
        try:
            from engines.compute.device_path import GpuPath  # Triton comes with torch for CUDA and with no other
        except ImportError as exc:
            if is_demanded:
                raise ModelRefused(f"attention = {config.attention!r} is not possible here: {exc}") from exc
            logger.warning("computing with torch alone, not with Triton kernels: %s", exc)
            return None
        return GpuPath(config, loaded.device, self._compute_rows, by_row=by_row)


def _check_states(model_type: str, *, exact: bool, is_split: bool) -> None:
    """Raises `ModelRefused` for what is not done with layers that carry a state from token to token."""
    if exact:
        raise ModelRefused(
            f"{model_type}: exact is set, and layers that carry a state from token to token sum up in an order that "
            "depends on the chunks."
        )
    if is_split:
        raise ModelRefused(f"{model_type}: layers that carry a state from token to token are not split over devices.")


def _by_request(batch: StepBatch, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    copied = logits.to(torch.float32, copy=True)  # what a graph wrote holds until it runs again
    return {chunk.sequence.request_id: row for chunk, row in zip(batch.chunks, copied, strict=True)}


def _probe_chunk(blocks: Iterable[int]) -> Chunk:
    request = GenerateRequest("probe", tuple(range(PROBE_TOKENS)), SamplingParams(max_tokens=1, seed=0))
    sequence = TokenSequence.of(request, NO_SINK)
    sequence.blocks = list(blocks)
    return Chunk(sequence, 0, PROBE_TOKENS)


class _NoSink:
    def deliver(self, outputs: Sequence[Any]) -> None:
        raise AssertionError("a probe has no outputs")


NO_SINK = _NoSink()
