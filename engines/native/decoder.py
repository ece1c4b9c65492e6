"""The C kernels that replace a transformers model's decoder layers and output head."""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from engines.interface.errors import EngineError
from engines.native.library import Library, Settings, Step, pointer
from engines.native.structure import DecoderParts, LayerParts
from engines.tensors.batch import StepBatch

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


@dataclass(frozen=True, slots=True)
class DeepRows:
    """What the first layers add to their output in some rows. `added` [layers, n, hidden] float32; `of_row` [T] int32:
    which of the n a row gets, -1 for none.
    """

    of_row: torch.Tensor
    added: torch.Tensor


_NOT_DEEP = DeepRows(torch.empty(0, dtype=torch.int32), torch.empty(0, 0, 0))


class NativeDecoder:
    """A model from the embedded tokens to the logits. Owns the packed weights and the KV cache. The original layers
    lose their weights. Raises `MemoryError`.
    """

    def __init__(
        self, library: Library, parts: DecoderParts, *, block_size: int, max_tokens: int, max_slots: int, threads: int
    ) -> None:
        linears = parts.layers[0].linears
        self.dtype = linears[0].weight.dtype
        self._vocab_size = parts.head.out_features
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._kv_heads = parts.kv_heads
        self._library = library
        settings = Settings(
            layers=len(parts.layers),
            hidden=linears[0].in_features,
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
        _require_memory(self._model, "the kernels' buffers")
        # Not when the interpreter ends: the loop's thread may still be computing.
        weakref.finalize(self, library.free, self._model).atexit = False
        for index, layer in enumerate(parts.layers):
            self._set_layer(index, layer, parts.windows[index])
        head, norm = parts.head.weight.contiguous(), _floats(parts.norm)
        done = library.set_head(self._model, self._vocab_size, pointer(head), pointer(norm), parts.norm_eps)
        _require_memory(done, "the output head")

    def _set_layer(self, index: int, layer: LayerParts, window: int) -> None:
        weights = [linear.weight.contiguous() for linear in layer.linears]
        modules = (layer.norm1, layer.norm2, layer.q_norm, layer.k_norm)
        norms = [None if norm is None else _floats(norm) for norm in modules]
        bias = None
        if any(linear.bias is not None for linear in layer.linears[:3]):
            bias = torch.cat([_bias(linear) for linear in layer.linears[:3]])
        done = self._library.set_layer(self._model, index, *map(pointer, [*weights, *norms, bias]), window)
        _require_memory(done, f"the weights of layer {index}")
        for linear in layer.linears:  # packed by now, and two copies of all layers may not fit
            linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, or make it anew."""
        _require_memory(self._library.set_cache(self._model, num_blocks), f"a KV cache of {num_blocks} blocks")

    def set_pair(self, slot: int, pair: PackedPair) -> None:
        """The pair's tensors must stay alive until the slot is cleared."""
        self._library.set_pair(
            self._model, pair.layer, pair.module, slot, pointer(pair.a), pointer(pair.b), pair.rank, pair.scale
        )

    def clear_slot(self, slot: int) -> None:
        self._library.clear_slot(self._model, slot)

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: StepBatch,
        logit_rows: torch.Tensor,
        deep: "DeepRows | None" = None,
    ) -> torch.Tensor:
        """hidden [T, hidden] float32, overwritten; cos and sin of the rows' positions [T, head size] float32;
        logit_rows [R] -> logits [R, vocab] float32
        """
        deep = deep or _NOT_DEEP
        arrays = _Arrays.of(batch, self._kv_heads, self._block_size)
        step = Step(
            rows=hidden.shape[0],
            fresh=len(arrays.fresh),
            items=len(arrays.items),
            rows_per_item=ROWS_PER_ITEM,
            max_len=arrays.max_len,
            span=arrays.spans.ctypes.data,
            tables=arrays.tables.ctypes.data,
            item=arrays.items.ctypes.data,
            kv_slots=pointer(batch.kv_slots),
            fresh_block=arrays.fresh.ctypes.data,
            slots=pointer(batch.slots),
            cos=pointer(rotation[0]),
            sin=pointer(rotation[1]),
            hidden=pointer(hidden),
            deep_layers=deep.added.shape[0],
            deep_count=deep.added.shape[1],
            deep_row=pointer(deep.of_row),
            deep=pointer(deep.added),
        )
        if not self._library.forward(self._model, ctypes.byref(step)):
            raise EngineError("The kernels had no memory for this batch.")
        return self._logits(hidden, logit_rows, batch.slots)

    def _logits(self, hidden: torch.Tensor, logit_rows: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        count = logit_rows.shape[0]
        padded = torch.empty(count + _ROW_PADDING, -(-self._vocab_size // _COLUMN_PADDING) * _COLUMN_PADDING)
        for start in range(0, count, self._max_tokens):
            rows = logit_rows[start : start + self._max_tokens]
            to = pointer(padded[start:])
            self._library.head(self._model, pointer(hidden), pointer(rows), rows.shape[0], pointer(slots), to)
        return padded[:count, : self._vocab_size]


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The batch as the kernels read it.

    - spans [n, 4]: first row, rows, tokens with these, offset of the block table.
    - block tables, one after another.
    - attention items [n, 3]: span, KV head, first row.
    - blocks taken into use.
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
            blocks = chunk.block_table(block_size)
            fresh += blocks[-(-chunk.start // block_size) :]
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


def _require_memory(done: int | None, what: str) -> None:
    """`done`: 0 or NULL when the kernels could not allocate memory."""
    if not done:
        raise MemoryError(f"no memory for {what}")


def _floats(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().contiguous()


def _bias(linear: nn.Linear) -> torch.Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else _floats(linear.bias)
