"""The C kernels in the place of a transformers model's decoder layers and output head."""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from engines.attention.interface import Paged
from engines.batch import StepBatch
from engines.errors import EngineError
from engines.native.library import Library, Settings, Step, pointer
from engines.native.structure import DecoderParts, LayerParts

ROWS_PER_ITEM = 16
_ROW_PADDING = 32
_COLUMN_PADDING = 32


@dataclass(frozen=True, slots=True)
class PackedPair:
    """A LoRA pair in the kernels' layout: `a` [rank, in]; `b` [rank / 2, out, 2] in bfloat16, [rank, out] in float."""

    layer: int
    module: int
    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scale: float


class NativeDecoder(nn.Module):
    """All decoder layers of a model. hidden_states [1, T, hidden] of any float type -> float32.

    Owns the packed weights and the KV cache; `begin` has to be called with the batch before each forward.
    """

    def __init__(
        self, library: Library, parts: DecoderParts, *, block_size: int, max_tokens: int, max_slots: int, threads: int
    ) -> None:
        super().__init__()
        linears = parts.layers[0].linears
        self.dtype = linears[0].weight.dtype
        self.hidden = linears[0].in_features
        self.vocab_size = parts.head.out_features
        self.max_tokens = max_tokens
        self._block_size = block_size
        self._kv_heads = parts.kv_heads
        self._library = library
        settings = Settings(
            layers=len(parts.layers),
            hidden=self.hidden,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dim=parts.dim,
            inner=linears[4].out_features,
            block_size=block_size,
            max_tokens=max_tokens,
            max_slots=max_slots,
            is_bf16=self.dtype == torch.bfloat16,
            threads=threads,
            eps=parts.eps,
            scale=parts.scale,
        )
        self._model = library.new(ctypes.byref(settings))
        weakref.finalize(self, library.free, self._model)
        for index, layer in enumerate(parts.layers):
            self._set_layer(index, layer, parts.windows[index])
        library.set_head(self._model, self.vocab_size, pointer(parts.head.weight.contiguous()))
        self._batch: StepBatch | None = None
        self._head_slots: torch.Tensor | None = None
        self._arrays: _Arrays | None = None

    def _set_layer(self, index: int, layer: LayerParts, window: int) -> None:
        weights = [linear.weight.contiguous() for linear in layer.linears]
        modules = (layer.norm1, layer.norm2, layer.q_norm, layer.k_norm)
        norms = [None if norm is None else _floats(norm) for norm in modules]
        bias = None
        if any(linear.bias is not None for linear in layer.linears[:3]):
            bias = torch.cat([_bias(linear) for linear in layer.linears[:3]])
        self._library.set_layer(self._model, index, *map(pointer, [*weights, *norms, bias]), window)

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, or make it anew."""
        if not self._library.set_cache(self._model, num_blocks):
            raise MemoryError(f"no memory for a KV cache of {num_blocks} blocks")

    def begin(self, batch: StepBatch, logit_rows: torch.Tensor) -> None:
        """Lay the batch out for the forward that follows. `logit_rows` [R]: the rows that the head will see."""
        self._batch = batch
        self._head_slots = None if batch.slots is None else batch.slots[logit_rows].contiguous()
        self._arrays = _Arrays.of(batch, self._kv_heads, self._block_size)

    def set_pair(self, slot: int, pair: PackedPair) -> None:
        """The pair's tensors must stay alive until the slot is cleared."""
        self._library.set_pair(
            self._model, pair.layer, pair.module, slot, pointer(pair.a), pointer(pair.b), pair.rank, pair.scale
        )

    def clear_slot(self, slot: int) -> None:
        self._library.clear_slot(self._model, slot)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: Paged,
        **others: Any,
    ) -> torch.Tensor:
        assert paged.batch is self._batch, "begin was not called for this batch"
        assert self._arrays is not None
        cos, sin = (x[0].float().contiguous() for x in position_embeddings)
        hidden = hidden_states[0].to(torch.float32, copy=True).contiguous()
        arrays = self._arrays
        step = Step(
            rows=hidden.shape[0],
            spans=len(arrays.spans),
            fresh=len(arrays.fresh),
            items=len(arrays.items),
            rows_per_item=ROWS_PER_ITEM,
            max_len=arrays.max_len,
            span=arrays.spans.ctypes.data,
            tables=arrays.tables.ctypes.data,
            item=arrays.items.ctypes.data,
            kv_slots=pointer(paged.batch.kv_slots),
            fresh_block=arrays.fresh.ctypes.data,
            slots=pointer(paged.batch.slots),
            cos=pointer(cos),
            sin=pointer(sin),
            hidden=pointer(hidden),
        )
        if not self._library.forward(self._model, ctypes.byref(step)):
            raise EngineError("The kernels had no memory for this batch.")
        return hidden[None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] after the last norm -> float32 [R, vocab]"""
        hidden = hidden.float().contiguous()
        slots = self._head_slots
        rows = hidden.shape[0]
        padded = torch.empty(rows + _ROW_PADDING, -(-self.vocab_size // _COLUMN_PADDING) * _COLUMN_PADDING)
        for start in range(0, rows, self.max_tokens):
            part = hidden[start : start + self.max_tokens]
            own = None if slots is None else slots[start : start + self.max_tokens]
            self._library.head(self._model, pointer(part), part.shape[0], pointer(own), pointer(padded[start:]))
        return padded[:rows, : self.vocab_size]


class NativeHead(nn.Module):
    """The output head: x [1, R, hidden] -> float32 [1, R, vocab]."""

    def __init__(self, decoder: NativeDecoder) -> None:
        super().__init__()
        self._decoder = [decoder]  # in a list, so that it is not registered as a second owner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._decoder[0].logits(x[0])[None]


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The batch as the kernels read it: spans [n, 4] (first row, rows, tokens with these, offset of the table), block
    tables one after the other, attention items [n, 3] (span, KV head, first row), blocks taken into use.
    """

    spans: np.ndarray[Any, np.dtype[np.int32]]
    tables: np.ndarray[Any, np.dtype[np.int32]]
    items: np.ndarray[Any, np.dtype[np.int32]]
    fresh: np.ndarray[Any, np.dtype[np.int64]]
    max_len: int

    @classmethod
    def of(cls, batch: StepBatch, kv_heads: int, block_size: int) -> "_Arrays":
        spans: list[int] = []
        tables: list[int] = []
        items: list[int] = []
        fresh: list[int] = []
        row = max_len = 0
        for index, chunk in enumerate(batch.chunks):
            first, last = -(-chunk.start // block_size), -(-chunk.end // block_size)
            blocks = chunk.sequence.blocks[:last]
            fresh += blocks[first:]
            spans += (row, chunk.length, chunk.end, len(tables))
            tables += blocks
            for start in range(0, chunk.length, ROWS_PER_ITEM):
                for head in range(kv_heads):
                    items += (index, head, start)
            row += chunk.length
            max_len = max(max_len, chunk.end)
        return cls(
            np.array(spans, dtype=np.int32).reshape(-1, 4),
            np.array(tables, dtype=np.int32),
            np.array(items, dtype=np.int32).reshape(-1, 3),
            np.array(fresh, dtype=np.int64),
            max_len,
        )


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().contiguous()


def _bias(linear: nn.Linear) -> torch.Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else _floats(linear.bias)
