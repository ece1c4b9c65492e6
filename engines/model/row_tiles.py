"""Matrix products in which the bits of a row do not depend on the other rows: the base of the exact mode.

A product picks its kernel, and with it the order of its sums, by the number of its rows. So each one is computed in
tiles of a fixed number of rows, the last one filled up.

The rest of a forward keeps rows apart under two conditions. No vector of the processor may end within a row, so the
batch is filled up to whole tiles too. And one thread computes it, since torch may split work between threads anywhere.
Other operations of a model (a convolution, say) are covered by the self-test, which compares bits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

TILE_ROWS = 32
"""On the CPU a product of 32 rows takes about as long as one of a single row: both wait for the weights."""

_MATMULS = frozenset({torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__})


def in_tiles(x: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`multiply` on x [..., in], `TILE_ROWS` rows at a time."""
    rows = x.reshape(-1, x.shape[-1])
    num_tiles = max(1, -(-rows.shape[0] // TILE_ROWS))
    filled = F.pad(rows, (0, 0, 0, num_tiles * TILE_ROWS - rows.shape[0]))
    tiles = [multiply(filled[start : start + TILE_ROWS]) for start in range(0, filled.shape[0], TILE_ROWS)]
    out = torch.cat(tiles)[: rows.shape[0]]
    return out.view(*x.shape[:-1], out.shape[-1])


class RowTiles(TorchFunctionMode):
    """Inside it, every product of rows and a weight matrix goes by tiles, whichever module or function computes it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return in_tiles(args[0], lambda x: F.linear(x, *args[1:], **kwargs))
        if func in _MATMULS and args[0].dim() >= 2 and args[1].dim() == 2:
            return in_tiles(args[0], lambda x: torch.mm(x, args[1]))
        return func(*args, **kwargs)
