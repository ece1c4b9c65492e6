"""The backend of the exact mode: the bits of a token's output depend on its sequence and position alone.

A kernel orders its sums by the shapes that it gets. So the shapes are a function of the position. Queries go in tiles
of 16 positions that begin at a multiple of 16, filled up with zeros. K and V go up to the end of the tile. This is
slow: each tile of each sequence is a call of its own.
"""

import torch

from engines.attention.interface import Attention
from engines.attention.sdpa import attend_span
from engines.planning.scheduler import Chunk
from engines.tensors.batch import StepBatch
from engines.tensors.kv_cache import KVCache

_TILE = 16


class ExactBackend:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, batch: StepBatch
    ) -> torch.Tensor:
        self._cache.write(attention.layer, k, v, batch.kv_slots, batch.fresh_blocks)
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        row = 0
        for chunk in batch.chunks:
            rows = slice(row, row + chunk.length)
            out[rows] = self._attend_chunk(q[rows], attention, chunk)
            row += chunk.length
        return out

    def _attend_chunk(self, q: torch.Tensor, attention: Attention, chunk: Chunk) -> torch.Tensor:
        """q [chunk.length, heads, k_dim] -> [chunk.length, heads, v_dim]"""
        first, last = chunk.start - chunk.start % _TILE, chunk.end + -chunk.end % _TILE
        filled = q.new_zeros(last - first, *q.shape[1:])
        filled[chunk.start - first : chunk.end - first] = q
        size = self._cache.block_size
        table = torch.tensor(chunk.sequence.blocks[: -(-last // size)], device=q.device)
        keys = self._cache.k[attention.layer].index_select(0, table).flatten(0, 1)
        values = self._cache.v[attention.layer].index_select(0, table).flatten(0, 1)
        tiles = [
            attend_span(
                filled[start - first : start - first + _TILE],
                keys[: start + _TILE],
                values[: start + _TILE],
                start,
                attention,
            )
            for start in range(first, last, _TILE)
        ]
        return torch.cat(tiles)[chunk.start - first : chunk.end - first]
