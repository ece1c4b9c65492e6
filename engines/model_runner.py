"""Runs chunks of sequences through a transformers model on the paged KV cache."""

import logging
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engines.attention.interface import NAME, AttentionBackend, Paged, ShapeProbe, register
from engines.attention.sdpa import SdpaBackend
from engines.batch import StepBatch, build_batch
from engines.kv_cache import KVCache, LayerShape
from engines.lora.apply import AdapterModules, multiply_rowwise
from engines.lora.context import AdapterContext
from engines.model_loader import LoadedModel
from engines.packed_linear import pack_linears
from engines.protocol import GenerateRequest, SamplingParams
from engines.scheduler import Chunk
from engines.sequence import Sequence

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 3


class ModelRunner:
    """Owns the model from here on: its attention is switched to the paged cache. One thread at a time.

    Running a chunk writes the same K and V to the same places each time, so a forward may be repeated.
    """

    repeatable = True

    def __init__(self, loaded: LoadedModel, *, block_size: int, exact: bool) -> None:
        register()
        self._model: Any = loaded.model
        self._model.set_attn_implementation(NAME)
        self._device = loaded.device
        self._block_size = block_size
        self._context = AdapterContext()
        probe = ShapeProbe()
        self._backend: AttentionBackend = probe
        linears = self._watch_linears()
        self.shapes: dict[int, LayerShape] = probe.shapes
        self.adapters = AdapterModules(
            loaded.model,
            self._context,
            token_linears=linears,
            head=_path_of(loaded.model, self._model.get_output_embeddings()),
            embedding=_path_of(loaded.model, self._model.get_input_embeddings()),
            dtype=loaded.dtype,
            device=loaded.device,
            multiply=multiply_rowwise if exact else F.linear,
        )
        if loaded.device.type == "cpu":
            logger.info("%d linear layers packed for the CPU", pack_linears(loaded.model, at_least_two_rows=exact))

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, or make it anew; until then nothing can be run."""
        self._backend = SdpaBackend(KVCache(self.shapes, num_blocks, self._block_size, self._device))

    def forward(self, chunks: SequenceOf[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        """The batch as it was laid out, and logits [wanted rows, vocab] in the model's dtype."""
        batch = build_batch(chunks, self._block_size, self._device)
        return batch, self._run(batch, batch.logit_rows)

    def last_logits(self, chunks: SequenceOf[Chunk]) -> dict[str, torch.Tensor]:
        """Logits [vocab] after each chunk, complete or not, by request id."""
        batch = build_batch(chunks, self._block_size, self._device)
        ends = torch.tensor([chunk.length for chunk in batch.chunks], device=self._device).cumsum(0) - 1
        logits = self._run(batch, ends).float()
        return {chunk.sequence.request_id: row for chunk, row in zip(batch.chunks, logits, strict=True)}

    def _run(self, batch: StepBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        self._context.set(batch)
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            paged=Paged(self._backend, batch),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _watch_linears(self) -> frozenset[str]:
        """Paths of the linear layers that see exactly one row per token, found by running a few tokens.

        Others (a router over images, experts that see only their own tokens) cannot be adapted row by row.
        """
        seen: set[str] = set()
        handles = []
        for path, module in self._model.named_modules():
            if isinstance(module, nn.Linear):

                def note(module: nn.Module, args: tuple[torch.Tensor, ...], path: str = path) -> None:
                    if args[0].numel() == _PROBE_TOKENS * args[0].shape[-1]:
                        seen.add(path)

                handles.append(module.register_forward_pre_hook(note))
        try:
            self.forward([_probe_chunk(self._block_size)])
        finally:
            for handle in handles:
                handle.remove()
        return frozenset(seen)


def _probe_chunk(block_size: int) -> Chunk:
    request = GenerateRequest("probe", tuple(range(_PROBE_TOKENS)), SamplingParams(max_tokens=1, seed=0))
    sequence = Sequence.of(request, NO_SINK)
    sequence.blocks = list(range(1, 1 + -(-_PROBE_TOKENS // block_size)))
    return Chunk(sequence, 0, _PROBE_TOKENS)


class _NoSink:
    def deliver(self, outputs: SequenceOf[Any]) -> None:
        raise AssertionError("a probe has no outputs")


NO_SINK = _NoSink()


def _path_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted), None)
